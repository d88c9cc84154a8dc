"""Arguments of public functions, looked at before anything is done with them.

Each check returns the value, or raises a TypeError or ValueError that says what was given to what, and what it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import types
import typing
from collections.abc import Callable
from typing import Any

_SHORT = 60  # letters


def short(value: Any) -> str:
    """A value in few words: what one would type, else what it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | bytes | int | float | complex | list | tuple | dict | set | range):
        text = repr(value)
        if len(text) <= _SHORT and "\n" not in text:
            return text
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def wrong(where: str, value: Any, wants: str) -> TypeError:
    """The error for a value of the wrong kind.

    Args:
        where: the function's argument, as `prepare_model: model`.
        wants: what it takes, as `a torch.nn.Module`.
    """
    return TypeError(f"{where} is {short(value)}; it takes {wants}")


def kind(value: Any, kinds: Any, where: str, wants: str) -> Any:
    """A value that is of one of these classes."""
    if not isinstance(value, kinds):
        raise wrong(where, value, wants)
    return value


def flag(value: Any, where: str, default: bool = False) -> bool:
    """True or False; also what counts as one of them (0, 1, a bool of numpy or torch). None: the default."""
    if value is True or value is False:
        return value
    if value is None:
        return default
    if str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and value.ndim == 0:
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise wrong(where, value, "True or False")


def whole(value: Any, where: str, wants: str, least: int | None = None) -> int:
    """A whole number; also one of numpy or torch. A bool is none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise wrong(where, value, wants)
    if least is not None and number < least:
        raise ValueError(f"{where} is {number}; it takes {wants}")
    return number


def called(value: Any, where: str, wants: str = "a function") -> Any:
    """Something that can be called."""
    if not callable(value):
        raise wrong(where, value, wants)
    return value


def process(value: Any, where: str, ranks: int) -> int:
    """The index of one of so many processes."""
    index = whole(value, where, f"the index of a process, 0 to {ranks - 1}")
    if not 0 <= index < ranks:
        raise ValueError(f"{where} is {index}; there are processes 0 to {ranks - 1}")
    return index


def fields(options: Any) -> Any:
    """A dataclass of options whose values are what its fields are declared as."""
    if options is not None:
        made_by: Any = type(options)
        for name, (hints, wants) in _declared(made_by).items():
            value = getattr(options, name)
            if not any(_fits(value, hint) for hint in hints):
                raise wrong(f"{made_by.__name__}.{name}", value, wants)
    return options


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", types.NoneType: "None",
          Callable: "a function"}  # fmt: skip


@functools.cache
def _declared(kind: type) -> dict[str, tuple[tuple[Any, ...], str]]:
    """By field: what it may be, and that in words."""
    found = {}
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        hint = hints[one.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        several = tuple(typing.get_origin(part) or part for part in (typing.get_args(hint) if union else (hint,)))
        said = [_WORDS.get(part) or f"a {getattr(part, '__name__', part)}" for part in several]
        found[one.name] = several, " or ".join(dict.fromkeys(said))
    return found


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if hint is Callable:
        return callable(value)
    if hint is bool:
        return value is True or value is False or (isinstance(value, int) and value in (0, 1))
    if hint in (int, float):
        plain = isinstance(value, float) or hasattr(value, "__index__")
        return plain and not isinstance(value, bool) and (hint is float or hasattr(value, "__index__"))
    if issubclass(hint, str):
        return isinstance(value, str | os.PathLike)
    return isinstance(value, hint)
