"""Values inside plain tuples, lists and dicts."""

from __future__ import annotations

from typing import Any


def inside(value: Any) -> list[Any]:
    """The objects in plain tuples, lists and dicts."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        return [item for one in value for item in inside(one)]
    return [value]


def replaced(value: Any, done: dict[int, Any]) -> Any:
    """`value` with what was prepared in place of the originals; the very object where nothing in it was."""
    if type(value) is dict:
        items = {key: replaced(item, done) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if type(value) in (list, tuple):
        new = [replaced(item, done) for item in value]
        return type(value)(new) if any(one is not other for one, other in zip(new, value, strict=True)) else value
    return done.get(id(value), value)
