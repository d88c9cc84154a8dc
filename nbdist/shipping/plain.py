"""The bulk rule: a large container of builtin data only is one node.

Fingerprint and test are one pass of the C pickler: it stops at the first object that is not builtin data. The same bytes are what
is sent, so that a million integers never pass through Python code or a pickler's memo.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import xxhash

from nbdist.shipping.kinds import CannotApply, Kind, Snapshot

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


def bulk_digest(value: Any) -> int | None:
    """The hash of a bulk container's content; None when it is not one."""
    data = plain_bytes(value)
    return None if data is None else xxhash.xxh3_64_intdigest(data)
