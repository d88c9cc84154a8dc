"""How the notebook shows things, put in place on a rank: at once where the library is there, else once it is."""

from __future__ import annotations

import functools
import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nbdist.worker.environment import silence_false_alarms
from nbdist.worker.imports import when_imported

_told_filters: list[Any] = list(warnings.filters)


def apply(settings: dict[str, dict[Any, Any]], shell: Any) -> None:
    """Put these in place; one that this library does not have is passed over."""
    for name, section in settings.items():
        if name == "warnings":
            _warnings(section["filters"])
        elif name == "logging":
            _logging(section)
        elif name == "plain":
            _each(section, functools.partial(setattr, shell.display_formatter.formatters["text/plain"]))
        elif name == "matplotlib_inline":
            when_imported("matplotlib", functools.partial(_inline, section, shell))
        else:
            put_shown(name, section)


def put_shown(name: str, section: dict[Any, Any]) -> None:
    """How a library shows its values, when it is imported."""
    when_imported(name, functools.partial(_SECTIONS[name], section))


def _each(section: dict[Any, Any], put: Callable[[Any, Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, value in section.items():
            try:
                put(key, value)
            except Exception:  # this version knows no such setting, or no such value
                continue


def _warnings(filters: tuple[Any, ...]) -> None:
    """A cell's own filters stay in front of the notebook's."""
    own = [one for one in warnings.filters if one not in _told_filters]
    _told_filters[:] = filters
    warnings.filters[:] = [*own, *filters]  # type: ignore[index]
    silence_false_alarms()  # and Python sees that its filters have changed


def _logging(section: dict[Any, Any]) -> None:
    for name, told in section.items():
        if name is None:
            logging.disable(told)
            continue
        level, propagate, handlers = told
        logger = logging.getLogger(name or None)
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in [one for one in logger.handlers if getattr(one, "of_the_notebook", False)]:
            logger.removeHandler(handler)
        for stream, at, formatter in handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(at)
            if formatter is not None:
                handler.setFormatter(pickle.loads(formatter))
            handler.of_the_notebook = True  # type: ignore[attr-defined]
            logger.addHandler(handler)


def _numpy(section: dict[Any, Any], module: ModuleType) -> None:
    _each(section, lambda key, value: module.set_printoptions(**{key: value}))


def _torch(section: dict[Any, Any], module: ModuleType) -> None:
    _each(section, lambda key, value: setattr(module._tensor_str.PRINT_OPTS, key, value))


def _pandas(section: dict[Any, Any], module: ModuleType) -> None:
    _each(section, lambda key, value: module.get_option(key) == value or module.set_option(key, value))


def _matplotlib(section: dict[Any, Any], module: ModuleType) -> None:
    section = dict(section)
    backend = section.pop("backend", None)
    _each(section, module.rcParams.__setitem__)
    if backend is not None:
        _each({"backend": backend}, lambda _, value: module.use(value))


def _inline(section: dict[Any, Any], shell: Any, module: ModuleType) -> None:
    from matplotlib_inline.config import InlineBackend

    one = InlineBackend.instance(parent=shell)
    one.shell = shell
    _each(section, functools.partial(setattr, one))


_SECTIONS: dict[str, Callable[[dict[Any, Any], ModuleType], None]] = {
    "numpy": _numpy,
    "torch": _torch,
    "pandas": _pandas,
    "matplotlib": _matplotlib,
}
