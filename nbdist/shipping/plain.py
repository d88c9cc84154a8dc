"""The bulk rule: a large container of builtin data only is one node.

Fingerprint and test are one pass of the C pickler: it stops at the first object that is not builtin data. The same
bytes are what is sent, so that a million integers never pass through Python code or a pickler's memo.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from operator import is_
from typing import Any

import xxhash

from nbdist.shipping.kinds import CannotApply, Kind, Snapshot
from nbdist.shipping.regions import equal_bytes

LARGE = 1000  # entries


class _NotPlain(Exception):
    pass


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        raise _NotPlain


def plain_bytes(value: Any) -> memoryview | None:
    """The pickle of builtin data; None when anything else is in it."""
    stream = io.BytesIO()
    try:
        _PlainPickler(stream, 5).dump(value)
    except (_NotPlain, RecursionError):
        return None
    return stream.getbuffer()


class Bulk:
    """Stands for a bulk container in a message, before all else: rebuilds the container from its own pickle."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self.data,)


class BulkKind(Kind):
    """A list, dict or set of at least LARGE entries of builtin data. Inner containers have no identity of their own."""

    letter = "U"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return () if light else (digest,), ()

    def children(self, value: Any, references: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def shape(self, value: Any) -> Any:
        return len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        data = plain_bytes(value)
        if data is None:
            raise TypeError("changed while it was being sent")
        return Bulk(bytes(data))

    def apply(self, value: Any, change: Any) -> None:
        if isinstance(value, list):
            value[:] = change
        elif isinstance(value, dict | set):
            value.clear()
            value.update(change)
        else:
            raise CannotApply("not a container", change)


BULK = BulkKind()


_SCALARS = frozenset({int, float, str, bytes, bool, type(None), complex})
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_ITEMS = object.__basicsize__ + _POINTER  # where a list keeps the address of its items, and a tuple its items


class Flat:
    """The content of a list of scalars: the very objects, compared as a block of addresses (1 ms for a million)."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items

    def holds(self, value: list[Any]) -> bool:
        """Has the list these very items? They are held here, so an address cannot stand for another object."""
        if len(value) != len(self.items):
            return False
        if not _ADDRESSES_CAN_BE_COMPARED:
            return all(map(is_, value, self.items))
        return _equal_items(value, self.items)

    def __eq__(self, other: object) -> bool:
        return self is other  # a list that is as it was keeps its Flat

    __hash__ = None  # type: ignore[assignment]


def _equal_items(value: list[Any], items: tuple[Any, ...]) -> bool:
    size = len(items) * _POINTER
    if not size:
        return True
    address = ctypes.c_void_p.from_address(id(value) + _ITEMS).value
    return address is not None and equal_bytes(address, id(items) + _ITEMS, size)


def _addresses_can_be_compared() -> bool:
    """Are lists and tuples laid out as CPython lays them out? Tried on small ones; without, items are compared one by
    one.
    """
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    one = [object() for _ in range(3)]
    other = [*one[:2], object()]
    return _equal_items(one, tuple(one)) and not _equal_items(one, tuple(other))


_ADDRESSES_CAN_BE_COMPARED = _addresses_can_be_compared()


def holds_any(value: Any, ids: set[int]) -> bool:
    """Has a bulk container one of these mutable objects directly in it? Lists of scalars are not looked through."""
    if isinstance(value, set):
        return False
    items = value.values() if isinstance(value, dict) else value
    if not any(type(one) in _MUTABLE for one in (next(iter(items), None), next(reversed(items), None))):
        return False
    return not ids.isdisjoint(map(id, items))


_MUTABLE = frozenset({list, dict, set, bytearray})


def bulk_digest(value: Any, old: Any = None) -> Any:
    """What a bulk container's content is compared by; None when it is not one. `old`: its digest before."""
    if type(value) is list:
        if type(old) is Flat and old.holds(value):
            return old
        if set(map(type, value)) <= _SCALARS:
            return Flat(tuple(value))
    data = plain_bytes(value)
    return None if data is None else xxhash.xxh3_64_intdigest(data)
