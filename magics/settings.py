"""How the notebook shows things, for its ranks: what the user set here (print options, plots, warnings, logging) holds
there too.

Only what changed here since the ranks were told is sent: what a cell sets on the ranks stays theirs until then.
"""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

Section = dict[Any, Any]


def changes(told: dict[str, Section]) -> dict[str, Section]:
    """What is not as these ranks were told, by section; `told` is brought up to date."""
    found: dict[str, Section] = {}
    for name, (module, read) in _SECTIONS.items():
        if module not in sys.modules:
            continue
        try:
            now = read()
        except Exception:  # a library of another version: its settings stay here
            continue
        before = told.get(name)
        if before == now:
            continue
        if before is None:
            before = _at_first(name)
        try:
            pickle.dumps(now)
        except Exception:
            continue
        new = {key: value for key, value in now.items() if key not in before or not _equal(before[key], value)}
        if new:
            found[name] = new
        told[name] = now
    return found


def section(name: str) -> Section:
    """One section as it is here."""
    return _SECTIONS[name][1]()


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays
        return one is other


def _at_first(name: str) -> Section:
    """What a process has that was told nothing; where that is not known everything is told."""
    if name == "matplotlib":
        return dict(dict.items(sys.modules["matplotlib"].rcParamsOrig))
    return {}


def formatters(shell: Any, told: dict[Any, Any]) -> tuple[list[tuple[str, str, str, Any]], list[str]]:
    """The notebook's own formatters (`for_type`) that these ranks were not told: [(kind, module and name of the type,
    function)], and what cannot be sent, in words. `told` is brought up to date.
    """
    import cloudpickle

    found, left_out = [], []
    for kind, formatter in shell.display_formatter.formatters.items():
        printers: dict[Any, Any] = {**formatter.deferred_printers, **formatter.type_printers}
        for of, function in printers.items():
            if getattr(function, "__module__", None) != "__main__" or told.get((kind, of)) is function:
                continue
            told[kind, of] = function
            module, name = of if isinstance(of, tuple) else (of.__module__, of.__name__)
            try:
                cloudpickle.dumps(function)
            except Exception as error:
                left_out.append(f"the {kind} formatter of {name} cannot be sent to the ranks: {error}")
            else:
                found.append((kind, module, name, function))
    return found, left_out


# ---------------------------------------------------------------- one reader for each section


def _warnings() -> Section:
    kept = tuple(one for one in warnings.filters if getattr(one[2], "__module__", "") != "__main__")
    return {"filters": kept}


def _logging() -> Section:
    loggers: Section = {"": _logger(logging.getLogger(), True)}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # most have nothing of their own, and there may be hundreds
        if isinstance(logger, logging.Logger) and (logger.level or logger.handlers or not logger.propagate):
            own = name.partition(".")[0] not in sys.modules  # a library makes its own handlers, there as here
            told = _logger(logger, own)
            if told != (logging.NOTSET, True, ()):
                loggers[name] = told
    loggers[None] = logging.root.manager.disable
    return loggers


def _logger(logger: logging.Logger, handlers: bool) -> tuple[int, bool, tuple[Any, ...]]:
    """Level, propagate, and its handlers that write to the notebook: (stream, level, formatter)."""
    told = []
    for handler in logger.handlers if handlers else ():
        if type(handler) is logging.StreamHandler:
            stream = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}.get(id(handler.stream))
            if stream is not None:
                told.append((stream, handler.level, _pickled(handler.formatter)))
    return logger.level, logger.propagate, tuple(told)


def _pickled(value: Any) -> bytes | None:
    """A formatter as bytes, so that it can be compared; one of a class of the notebook's is left out."""
    if getattr(type(value), "__module__", "") == "__main__":
        return None
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def _numpy() -> Section:
    return dict(sys.modules["numpy"].get_printoptions())


def _torch() -> Section:
    return dict(vars(sys.modules["torch"]._tensor_str.PRINT_OPTS))


def _pandas() -> Section:
    pandas = sys.modules["pandas"]
    found: Section = {}

    def walk(group: dict[str, Any], start: str) -> None:
        for name, value in group.items():
            if isinstance(value, dict):
                walk(value, f"{start}{name}.")
            elif isinstance(value, str | int | float | bool | None):
                found[start + name] = value

    options = vars(pandas.options)["d"]  # the dict behind it: asking for each takes a millisecond
    for group in ("display", "styler"):
        walk(options[group], f"{group}.")
    return found


_FILES = frozenset({"agg", "svg", "pdf", "ps", "cairo"})  # backends that open no window and show nothing


def _matplotlib() -> Section:
    matplotlib = sys.modules["matplotlib"]
    found = dict(dict.items(matplotlib.rcParams))  # past its own getter, which would choose a backend
    backend = found.pop("backend", None)
    for name in ("backend_fallback", "interactive"):
        found.pop(name, None)
    if isinstance(backend, str) and backend.lower() in _FILES:
        found["backend"] = backend
    elif isinstance(backend, str):
        found["backend"] = "inline"  # a widget or a window: a rank has neither
    return found


def _inline() -> Section:
    """Its object, or what `%config` keeps for it until there is one."""
    from IPython import get_ipython
    from matplotlib_inline.config import InlineBackend

    names = ("figure_formats", "rc", "print_figure_kwargs", "close_figures")
    config = get_ipython().config
    if InlineBackend.initialized():
        one = InlineBackend.instance()
    elif "InlineBackend" in config:
        one = InlineBackend(config=config)
    else:
        return {}
    return {name: getattr(one, name) for name in names}


def _plain() -> Section:
    from IPython import get_ipython

    one = get_ipython().display_formatter.formatters["text/plain"]
    return {
        name: getattr(one, name) for name in ("pprint", "max_width", "max_seq_length", "verbose", "float_precision")
    }


_SECTIONS: dict[str, tuple[str, Callable[[], Section]]] = {
    "warnings": ("warnings", _warnings),
    "logging": ("logging", _logging),
    "numpy": ("numpy", _numpy),
    "torch": ("torch", _torch),
    "pandas": ("pandas", _pandas),
    "matplotlib": ("matplotlib", _matplotlib),
    "matplotlib_inline": ("matplotlib", _inline),
    "plain": ("IPython", _plain),
}
