"""How objects travel that would not by themselves: cached functions and cached properties of the notebook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def make_cached(maxsize: int | None, typed: bool, function: Callable[..., Any]) -> Any:
    """A function with `functools.lru_cache`, its cache empty: each process has its own."""
    return functools.lru_cache(maxsize, typed)(function)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    made: Any = functools.cached_property(function)
    made.attrname = name
    return made


def _cached(value: Any) -> Any:
    if getattr(value, "__module__", None) != "__main__":
        return value.__reduce__()
    parameters = value.cache_parameters()
    return make_cached, (parameters["maxsize"], parameters["typed"], value.__wrapped__)


def _cached_property(value: Any) -> Any:
    return make_cached_property, (value.func, value.attrname)  # 3.11 keeps a lock in it


REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(len)): _cached,
    functools.cached_property: _cached_property,
}
