"""Kinds of containers: lists, deques, sets, dicts and bytearrays, their subclasses with attributes included."""

from __future__ import annotations

import copyreg
from collections import OrderedDict, deque
from collections.abc import Iterable
from operator import is_
from typing import Any

from nbdist.shipping.kinds import Kind, Snapshot, attributes_of, mapping_change, put_attributes, put_items


class _Attributed(Kind):
    """Containers that may carry instance attributes when their class is a subclass."""

    def extra(self, value: Any) -> dict[str, Any]:
        return attributes_of(value) if type(value) not in _BARE else {}

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return references if type(value) in _BARE else (*references, type(value))


_BARE = {list, dict, set, deque, bytearray}

# Methods that pickle calls to fill a container; what a class of the user's has in their place must not run again.
_FILLING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (OrderedDict, ("__setitem__",)),
    (dict, ("__setitem__",)),
    (list, ("append", "extend")),
    (set, ("__init__", "__new__")),
)


def unfilled(value: Any) -> Any:
    """How an instance of a user's container class is made without calling what that class has overridden; None where
    pickle's own way does not call it.
    """
    cls = type(value)
    for base, names in _FILLING:
        if not issubclass(cls, base):
            continue
        own = any(getattr(cls, name) is not getattr(base, name) for name in names)
        plain = cls.__reduce_ex__ is base.__reduce_ex__ and cls.__reduce__ is base.__reduce__
        if not own or not plain or hasattr(cls, "__getnewargs__") or hasattr(cls, "__getnewargs_ex__"):
            return None
        items = list(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
        state = (base, items, attributes_of(value))
        return copyreg.__newobj__, (cls,), state, None, None, fill  # type: ignore[attr-defined]
    return None


def fill(value: Any, state: tuple[Any, list[Any], dict[str, Any]]) -> None:
    base, items, attributes = state
    if issubclass(base, dict):
        for key, content in items:
            base.__setitem__(value, key, content)
    elif base is list:
        list.extend(value, items)
    else:
        set.update(value, items)
    put_attributes(value, (list(attributes.items()), [], None))


class _Filled(_Attributed):
    """Containers of single items: a change is all of them, with which the container is filled anew."""

    base: type[Any]

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return list(self.base.__iter__(value)), self.extra(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (*change[0], *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        self.fill(value, change[0])
        if type(value) not in _BARE:
            _replace_attributes(value, change[1])

    def fill(self, value: Any, items: list[Any]) -> None:
        """Put these in the place of all that it holds."""
        raise NotImplementedError


class ListKind(_Filled):
    letter, base = "L", list

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if type(value) is list:
            return (), tuple(value)
        extra = self.extra(value)
        return tuple(extra), (*extra.values(), type(value), *list.__iter__(value))

    def shape(self, value: Any) -> Any:
        return list.__len__(value)

    def fill(self, value: Any, items: list[Any]) -> None:
        list.__setitem__(value, slice(None), items)


class DequeKind(_Filled):
    letter, base = "Q", deque

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        extra = self.extra(value)
        return (value.maxlen, tuple(extra)), (*extra.values(), *value)

    def shape(self, value: Any) -> Any:
        return len(value)

    def fill(self, value: Any, items: list[Any]) -> None:
        value.clear()
        value.extend(items)


def _replace_attributes(value: Any, now: dict[str, Any]) -> None:
    put_attributes(value, (list(now.items()), [name for name in attributes_of(value) if name not in now], None))


class SetKind(_Filled):
    letter, base, unordered = "S", set, True

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        # Membership by identity: comparing two sets of user objects would call their __eq__.
        if light:
            return (), ()
        held, extra = tuple(set.__iter__(value)), self.extra(value)
        return (frozenset(map(id, held)), _Held(held), tuple(extra)), tuple(extra.values())

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        if type(value) is set:
            return value
        return (*set.__iter__(value), *self.extra(value).values(), type(value))

    def shape(self, value: Any) -> Any:
        return len(value)

    def fill(self, value: Any, items: list[Any]) -> None:
        set.clear(value)
        set.update(value, items)


class _Held:
    """Keeps objects alive in a snapshot without taking part in its comparison."""

    __slots__ = ("objects",)

    def __init__(self, objects: Any) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    __hash__ = None  # type: ignore[assignment]


class DictKind(_Attributed):
    letter = "D"

    def extra(self, value: Any) -> dict[str, Any]:
        found = super().extra(value)
        if hasattr(value, "default_factory"):
            found["default_factory"] = value.default_factory
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if type(value) is dict:
            return (), (*value, *value.values())
        extra = self.extra(value)
        base = self._base(value)
        return tuple(extra), (*base.keys(value), *base.values(value), *extra.values())

    def shape(self, value: Any) -> Any:
        keys = list(self._base(value).keys(value))
        return tuple(key if type(key) in (str, int) else type(key).__name__ for key in keys)

    def _base(self, value: Any) -> type[dict[Any, Any]]:
        # An OrderedDict keeps its order beside the dict that it is.
        return OrderedDict if isinstance(value, OrderedDict) else dict

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        base = self._base(value)
        now = dict(zip(base.keys(value), base.values(value), strict=True))
        extra = self.extra(value)
        if old is None or old[0] != self.letter:
            return True, list(now.items()), [], list(now), extra
        references, count = old[2], (len(old[2]) - len(old[1])) // 2
        before = dict(zip(references[:count], references[count : 2 * count], strict=True))
        was = dict(zip(old[1], references[2 * count :], strict=True))
        unchanged = list(was) == list(extra) and all(map(is_, was.values(), extra.values()))
        return (False, *mapping_change(before, now), None if unchanged else extra)

    def sent(self, change: Any) -> Iterable[Any]:
        _, put, removed, order, extra = change
        found: list[Any] = [part for pair in put for part in pair]
        return (*found, *removed, *(order or ()), *(extra or {}).values())

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        return [(f"[{pair[0]!r}]" if type(pair[0]) in (str, int) else "[...]", pair) for pair in change[1]]

    def join(self, change: Any, parts: list[Any]) -> Any:
        kept = {id(part) for part in parts}
        order = change[3] and [k for k in change[3] if all(k is not p[0] or id(p) in kept for p in change[1])]
        return change[0], [pair for pair in change[1] if id(pair) in kept], change[2], order, change[4]

    def apply(self, value: Any, change: Any) -> None:
        whole, put, removed, order, extra = change
        base = self._base(value)
        if whole:
            kept = {key for key, _ in put}
            removed = [key for key in list(dict.keys(value)) if key not in kept]
        put_items(value, base, (put, removed, order))
        if extra is not None and type(value) is not dict:
            extra = dict(extra)
            if "default_factory" in extra:
                value.default_factory = extra.pop("default_factory")
            if hasattr(value, "__dict__"):
                _replace_attributes(value, extra)


class BytearrayKind(_Attributed):
    letter = "B"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return () if light else bytes(value), ()

    def shape(self, value: Any) -> Any:
        return len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return bytes(value)

    def apply(self, value: Any, change: Any) -> None:
        value[:] = change
