"""Datasets without indices: every rank reads the same stream and keeps its share; the sizes travel with each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from nbdist.data.plan import shares


class ShardedIterable(IterableDataset):
    """Stands for the user's dataset under a prepared loader. Gives (real rows of this rank, of all ranks, sample).

    Args:
        dataset: the user's dataset; the same samples in the same order on every rank. Its attributes are seen through.
        batch: samples a rank takes at a full step.
        rank, ranks: which part is ours, of how many.
        drop_last: leave a short last step out.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, ranks: int, drop_last: bool) -> None:
        self._dataset, self._batch, self._rank, self._ranks, self._drop_last = dataset, batch, rank, ranks, drop_last

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        source = iter(self._dataset)
        whole = self._batch * self._ranks
        while rows := list(itertools.islice(source, whole)):
            if len(rows) < whole and self._drop_last:
                return
            sizes = shares(len(rows), self._ranks)
            at, mine = sum(sizes[: self._rank]), sizes[self._rank]
            for sample in rows[at : at + mine] if mine else rows[: sizes[0]]:
                yield mine, len(rows), sample

    def __len__(self) -> int:
        """In samples of one rank, so that the loader works out the right number of steps from it."""
        whole = self._batch * self._ranks
        rows = len(self._dataset)
        return (rows // whole if self._drop_last else -(-rows // whole)) * self._batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Sized:
    """A batch and how many real rows it has: on this rank, and on all."""

    __slots__ = ("batch", "local", "total")

    def __init__(self, batch: Any, local: int, total: int) -> None:
        self.batch, self.local, self.total = batch, local, total

    def pin_memory(self, device: Any = None) -> Sized:
        """What a loader's pinning thread calls on a type it does not know."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch, device)
        return self


class SizedCollate:
    """The user's collate function over the samples that `ShardedIterable` gives.

    Args:
        collate: the user's function.
        batched: whether it gets a list of samples; with batch_size=None it gets one.
    """

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self._collate, self._batched = collate, batched

    def __call__(self, rows: Any) -> Sized:
        if self._batched:
            local, total, _ = rows[0]
            return Sized(self._collate([sample for _, _, sample in rows]), local, total)
        local, total, sample = rows
        return Sized(self._collate(sample), local, total)
