"""The outermost layer of a prepared loader: batches on their way to the user, and the stack of running iterators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nbdist.data.cursor import Cursor, Live
from nbdist.data.move import send_to_device
from nbdist.data.source import Planned
from nbdist.state import step_boundary

if TYPE_CHECKING:
    from nbdist.data.inside import Inside


def delivered(inner: Iterable[Any], cursor: Cursor, inside: Inside) -> Iterator[Any]:
    """The outermost layer. The newest iterator that delivered is the last in `live`; it leaves as soon as nobody
    holds it.
    """
    position, live = cursor.position, inside.live
    device = inside.options.device
    pinned = inside.original.pin_memory and device is not None and device.type == "cuda"
    non_blocking = inside.options.non_blocking or pinned
    boundary = step_boundary
    try:
        if inside.unbatched:
            inner = _weighed(inner, cursor, inside.options.ranks)
        if device is None and isinstance(inner, Planned):  # both layers in one, as most loaders have nothing between
            ragged, count = inner.ragged, inner.count
            for step, batch in enumerate(inner.batches, inner.start):
                cursor.step = step
                position.delivered = step + 1
                if step >= ragged:
                    count(step)
                if live[-1] is not cursor:
                    _put_in_front(live, cursor)
                yield batch
                if boundary.made != boundary.counted:  # trained on, and all that goes with it
                    boundary.passed()
        else:
            for batch in inner:
                position.delivered += 1
                if live[-1] is not cursor:
                    _put_in_front(live, cursor)
                yield batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)
                if boundary.made != boundary.counted:
                    boundary.passed()
        if isinstance(live, Live):
            live.stand_ins = None if cursor.local or cursor.step < 0 else _stand_ins(batch, cursor, inside)
        position.end()
    finally:
        if cursor in live:
            live.remove(cursor)


def _stand_ins(last: Any, cursor: Cursor, inside: Inside) -> tuple[int, int] | None:
    """For `Live`: an epoch ends with a batch that is none of this rank's. None where the rows before are not known."""
    source: Any = inside.source
    if inside.unbatched or getattr(source, "own_batches", None) is not None or not hasattr(source, "batch"):
        return None
    real = (cursor.step - cursor.position.start) * source.batch
    return real + rows_of(last), real


def _weighed(inner: Iterable[Any], cursor: Cursor, ranks: int) -> Iterator[Any]:
    """Batches that came as the dataset's items: how many rows each has shows only in it, and here only."""
    cursor.plan = None
    for batch in inner:
        cursor.local = rows_of(batch) if cursor.local else 0
        cursor.total = cursor.local if ranks == 1 else 0
        yield batch


def rows_of(batch: Any) -> int:
    """The first dimension that all tensors (and arrays) of a batch have; 1 where they differ, or where a number tells
    that it is one sample. Without tensors, the length of its lists.
    """
    sizes: set[int] = set()
    lists: set[int] = set()
    waiting = [batch]
    while waiting:
        one = waiting.pop()
        shape = getattr(one, "shape", None)
        if shape is not None and hasattr(one, "dtype"):
            sizes.add(shape[0] if len(shape) else 1)
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, tuple):
            waiting.extend(one)
        elif isinstance(one, list):
            lists.add(len(one))
            waiting.extend(item for item in one if not isinstance(item, int | float))
        elif isinstance(one, int | float):
            sizes.add(1)
    (rows, *more) = sizes or lists or {1}
    return 1 if more else rows


def _put_in_front(live: list[Cursor | None], cursor: Cursor) -> None:
    if cursor in live:
        live.remove(cursor)
    live.append(cursor)
