"""Datasets without indices: every rank reads the same stream and keeps its share of each step.

Where the stream ends only the process that reads it knows, and with workers that is not the rank: so the sizes of a
short step travel with its samples and its batch. Full steps travel bare.

Ranks that read a random stream must draw alike, and a run that goes on what an uninterrupted one draws: without workers
(theirs are seeded) each step is read in a `Sandbox` of the epoch's seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from nbdist.data import randomness
from nbdist.data.cursor import Cursor
from nbdist.data.options import Options
from nbdist.data.plan import known_length, parted
from nbdist.data.sandbox import Sandbox
from nbdist.data.stream_state import StreamState


class StreamFeed:
    """What feeds a prepared loader from a stream.

    Args:
        loader: the user's loader.
        options: how it is prepared.
        seed: gives the loader's seed.
    """

    kind = "stream"
    sharded = False

    def __init__(self, loader: DataLoader, options: Options, seed: Callable[[], int]) -> None:
        self._loader, self._options, self._seed = loader, options, seed
        self.batch = options.each(loader.batch_size)

    @property
    def stride(self) -> int:
        """Samples of all ranks in a full step."""
        return self.batch * self._options.ranks

    def length(self) -> int | None:
        """Samples an epoch; None when the dataset has no length."""
        return known_length(self._loader.dataset)

    def _begins(self, epoch: int) -> int:
        """Tell the user's dataset of the epoch. Returns its seed."""
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch)
        return randomness.mixed(self._seed(), epoch)


class StreamSource(StreamFeed):
    """Every rank reads the stream whole, and keeps its part. Takes what `StreamFeed` takes."""

    def __init__(self, loader: DataLoader, options: Options, seed: Callable[[], int]) -> None:
        super().__init__(loader, options, seed)
        batched = loader.batch_size is not None
        self.stream = ShardedIterable(loader.dataset, self.batch, options.rank, options.ranks, loader.drop_last)
        # Of one stream that all ranks read; what differs by rank is not in a loader's state.
        self.own_state = StreamState.of(loader) if not options.shared_by else None
        self._draws_apart = not loader.num_workers
        if loader.persistent_workers:
            self.stream.share()
        self.attributes: dict[str, Any] = {
            "dataset": self.stream,
            "collate_fn": TailCollate(loader.collate_fn, self.batch if batched else None),
        }
        if batched and self.batch != loader.batch_size:
            self.attributes["batch_size"] = self.batch
            self.attributes["batch_sampler"] = BatchSampler(loader.sampler, self.batch, loader.drop_last)

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks, beside the length: each worker has a part of the stream."""
        loader = self._loader
        return {
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,
        }

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """The batches of an epoch from `start` on; `begin` starts the loader's own iterator, with a seed."""
        seed = self._begins(epoch)  # workers draw the same on all ranks: it is one stream
        # Each worker gives its batches in turn until it ends, so of `start` batches it has given at least this many.
        self.stream.passed_over = start // max(self._loader.num_workers, 1)
        skip, hold = start, None
        if self.own_state is not None:
            hold = self.own_state.hold
            if self.own_state.begin(epoch, start):
                skip = self.stream.passed_over = 0
        self.stream.sandbox = Sandbox(seed) if self._draws_apart else None
        inner = begin(seed)
        if skip:
            inner = itertools.islice(inner, skip, None)
        size, ranks = self.batch, self._options.ranks
        if self._options.accumulates():
            return known_last(inner, cursor, size, ranks, start, hold)
        return _streamed(inner, cursor, size, ranks, start)


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
        self._passed_over: Any = 0
        self.sandbox: Sandbox | None = None  # where the next iteration reads the user's dataset

    def share(self) -> None:
        """Workers that outlive an epoch see what is written to `passed_over`."""
        self._passed_over = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def passed_over(self) -> int:
        """Steps of a process's stream that are read and not given: batches of nothing stand for them."""
        return int(self._passed_over)

    @passed_over.setter
    def passed_over(self, steps: int) -> None:
        if isinstance(self._passed_over, torch.Tensor):
            self._passed_over.fill_(steps)
        else:
            self._passed_over = steps

    def __iter__(self) -> Iterator[Any]:
        passed_over = self.passed_over
        if self._ranks == 1 and not passed_over and self.sandbox is None:
            return iter(self._dataset)  # a short step shows in its length
        return self._parts(passed_over, self.sandbox or nullcontext())

    def _parts(self, passed_over: int, sandbox: AbstractContextManager[None]) -> Iterator[Any]:
        whole, start = self._batch * self._ranks, self._batch * self._rank
        with sandbox:
            source = iter(self._dataset)
        while True:
            with sandbox:
                rows = list(itertools.islice(source, whole))
            if not rows or (len(rows) < whole and self._drop_last):
                return
            if passed_over:
                passed_over -= 1
                yield from [NOTHING] * self._batch
            elif len(rows) == whole:
                yield from rows[start : start + self._batch]
            else:
                parts = parted(rows, self._ranks)
                mine = parts[self._rank]
                for sample in mine or parts[0]:
                    yield Tail(sample, len(mine), len(rows))

    def __len__(self) -> int:
        """In samples of one rank, so that the loader works out the right number of steps from it."""
        whole = self._batch * self._ranks
        rows = len(self._dataset)
        return (rows // whole if self._drop_last else -(-rows // whole)) * self._batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _streamed(inner: Iterator[Any], cursor: Cursor, size: int, ranks: int, start: int) -> Iterator[Any]:
    """Sets the cursor to each batch."""
    whole = size * ranks
    for step, batch in enumerate(inner, start):
        cursor.step = step
        if type(batch) is Tail:
            cursor.local, cursor.total = batch.local, batch.total
            batch = batch.value
        else:  # workers end one by one: after a short step a full one may follow
            cursor.local, cursor.total = size, whole
        yield batch


def known_last(
    inner: Iterator[Any], cursor: Cursor, size: int, ranks: int, start: int, hold: Callable[[], None] | None = None
) -> Iterator[Any]:
    """The same with one batch of look-ahead: the last one is known as such. An error waits until the batch before is
    delivered. `hold` is called before each look ahead.
    """
    whole, step = size * ranks, start
    held: Any = next(inner, _NONE)
    while held is not _NONE:
        error, following = None, _NONE
        try:
            if hold is not None:
                hold()
            following = next(inner, _NONE)
        except Exception as raised:
            error = raised
        cursor.step, cursor.last = step, following is _NONE and error is None
        if type(held) is Tail:
            cursor.local, cursor.total = held.local, held.total
            held = held.value
        else:
            cursor.local, cursor.total = size, whole
        yield held
        if error is not None:
            raise error
        held = following
        step += 1


_NONE: Any = object()


class _Nothing:
    """Stands for a sample that is passed over."""


NOTHING = _Nothing()


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
    """The user's collate function, over samples that may be tails, or fewer than there should be.

    Args:
        collate: the user's function.
        size: samples of a full batch; None with batch_size=None: it then gets one sample and no list of them.
    """

    def __init__(self, collate: Callable[[Any], Any], size: int | None) -> None:
        self._collate, self._size = collate, size

    def __call__(self, rows: Any) -> Any:
        size = self._size
        first = rows if size is None else rows[0]
        if first is NOTHING:
            return None
        if type(first) is not Tail:
            batch = self._collate(rows)
            return batch if size is None or len(rows) == size else Tail(batch, len(rows), len(rows))
        value = self._collate(first.value if size is None else [row.value for row in rows])
        return Tail(value, first.local, first.total)
