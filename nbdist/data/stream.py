"""Datasets without indices: every rank reads the same stream and keeps its share of each step.

Where the stream ends only the process that reads it knows, and with workers that is not the rank: so the sizes of a
short step travel with its samples and its batch. Full steps travel bare.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from nbdist.data.plan import shares


class ShardedIterable(IterableDataset):
    """Stands for the user's dataset under a prepared loader. Gives the samples; those of a short step as `Tail`.

    Args:
        dataset: the user's dataset; the same samples in the same order on every rank. Its attributes are seen through.
        batch: samples a rank takes at a full step.
        rank, ranks: which part is ours, of how many.
        drop_last: leave a short last step out.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, ranks: int, drop_last: bool) -> None:
        self._dataset, self._batch, self._rank, self._ranks, self._drop_last = dataset, batch, rank, ranks, drop_last

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._dataset)
        whole, start = self._batch * self._ranks, self._batch * self._rank
        while rows := list(itertools.islice(source, whole)):
            if len(rows) == whole:
                yield from rows[start : start + self._batch]
                continue
            if self._drop_last:
                return
            sizes = shares(len(rows), self._ranks)
            at, mine = sum(sizes[: self._rank]), sizes[self._rank]
            for sample in rows[at : at + mine] if mine else rows[: sizes[0]]:
                yield Tail(sample, mine, len(rows))

    def __len__(self) -> int:
        """In samples of one rank, so that the loader works out the right number of steps from it."""
        whole = self._batch * self._ranks
        rows = len(self._dataset)
        return (rows // whole if self._drop_last else -(-rows // whole)) * self._batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Tail:
    """A sample, or a batch, of a short step, and how many real rows that step has: on this rank, and on all."""

    __slots__ = ("local", "total", "value")

    def __init__(self, value: Any, local: int, total: int) -> None:
        self.value, self.local, self.total = value, local, total

    def pin_memory(self, device: Any = None) -> Tail:
        """What a loader's pinning thread calls on a type it does not know."""
        try:
            from torch.utils.data._utils.pin_memory import pin_memory
        except ImportError:  # not pinned: the copy to the device then waits for itself
            return self
        self.value = pin_memory(self.value, device)
        return self


class TailCollate:
    """The user's collate function, over samples that may be tails.

    Args:
        collate: the user's function.
        batched: whether it gets a list of samples; with batch_size=None it gets one.
    """

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self._collate, self._batched = collate, batched

    def __call__(self, rows: Any) -> Any:
        first = rows[0] if self._batched else rows
        if type(first) is not Tail:
            return self._collate(rows)
        value = self._collate([row.value for row in rows] if self._batched else first.value)
        return Tail(value, first.local, first.total)
