"""One rank reads: rank 0 iterates the user's dataset, makes every rank's batch, and sends each its own.

Each step is one small broadcast (what comes, how many rows each rank has), then one message to each rank. Rank 0 sends
nothing ahead, so ranks that leave a loop at the same batch leave nothing behind. Getting a batch is a collective: all
ranks iterate alike.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from nbdist import messages
from nbdist.data import parcel, randomness
from nbdist.data.cursor import Cursor
from nbdist.data.options import Options
from nbdist.data.plan import parted
from nbdist.data.sandbox import Sandbox
from nbdist.data.source import Source
from nbdist.data.stream import StreamFeed

_BATCH, _LAST, _END, _FAILED = range(4)

# A step as rank 0 reads it: the batches of the ranks that have one, each rank's rows, whether it is known to be the
# last.
Step = tuple[list[Any], list[int], bool]


class DispatchedRows(Source):
    """Feeds a prepared loader with what rank 0 reads by index; takes what `Source` takes."""

    _told: int | None = None

    def told(self, lengths: list[int | None]) -> None:
        """What `length` is on each rank: rank 0's counts."""
        self._told = lengths[0]

    def _len(self) -> int:
        return super()._len() if self._told is None else self._told

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks: rank 0's loader counts."""
        return {}

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        steps = None
        if dist.get_rank() == 0:
            plan = self.stream.plan = self.plan(epoch)
            self.stream.start, self.stream.everyone = start, True
            inner = _begun(begin, randomness.mixed(self._seed(), epoch))

            def read() -> Iterator[Step]:
                step = start
                for first in inner:
                    sizes = plan.sizes(step)
                    batches = [first, *(next(inner) for size in sizes[1:] if size)]
                    yield batches, sizes, plan.is_last(step)
                    step += 1

            steps = read()
        return _dispatched(steps, cursor, start, self._options)


class DispatchedStream(StreamFeed):
    """Rank 0 reads the stream. Takes what `StreamFeed` takes."""

    def __init__(self, loader: DataLoader, options: Options, seed: Callable[[], int]) -> None:
        super().__init__(loader, options, seed)
        batched = loader.batch_size is not None
        # A step is made in one piece, wherever the loader makes its batches.
        self.attributes: dict[str, Any] = {
            "batch_size": self.stride,
            "batch_sampler": BatchSampler(loader.sampler, self.stride, loader.drop_last),
            "collate_fn": StepCollate(loader.collate_fn, batched, options.ranks),
        }

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks: rank 0's loader counts."""
        return {}

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        steps = None
        if dist.get_rank() == 0:
            seed = self._begins(epoch)
            if self._loader.num_workers:
                inner = _begun(begin, seed)
            else:
                sandbox = Sandbox(seed)
                with sandbox:
                    inner = _begun(begin, seed)
                inner = sandbox.around(inner)
            steps = self._read(inner, start)
        return _dispatched(steps, cursor, start, self._options)

    def _read(self, inner: Iterator[Any], start: int) -> Iterator[Step]:
        for _ in range(start):
            next(inner, None)
        if not self._options.accumulates():
            for batches, sizes in inner:
                yield batches, sizes, False
            return
        held = next(inner, None)
        while held is not None:  # one step of look-ahead
            following = next(inner, None)
            yield *held, following is None
            held = following


class StepCollate:
    """The user's collate function, over the rows of all ranks: gives the batches of a step and each rank's rows."""

    def __init__(self, collate: Callable[[Any], Any], batched: bool, ranks: int) -> None:
        self._collate, self._batched, self._ranks = collate, batched, ranks

    def __call__(self, rows: list[Any]) -> tuple[list[Any], list[int]]:
        parts = parted(rows, self._ranks)
        batches = [self._collate(part if self._batched else part[0]) for part in parts if part]
        return batches, [len(part) for part in parts]


def told_of(error: Exception) -> str:
    """What happened, and where."""
    last = traceback.format_exception_only(error)[-1].strip()
    return f"{last}\n\n{''.join(traceback.format_exception(error))}"


def _begun(begin: Callable[[int], Iterator[Any]], seed: int) -> Iterator[Any]:
    """The loader's own iterator. What it raises now is raised when it is first asked: the other ranks then listen."""
    try:
        return begin(seed)
    except Exception as error:
        return _failing(error)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _dispatched(steps: Iterator[Step] | None, cursor: Cursor, start: int, options: Options) -> Iterator[Any]:
    """Every rank's batches; `steps` are rank 0's, None elsewhere."""
    rank, ranks, together = options.rank, options.ranks, options.together
    device = messages.message_device()
    step = start
    while True:
        head = torch.zeros(1 + 2 * ranks, dtype=torch.int64)
        batches: list[Any] = []
        parcels: list[torch.Tensor] = []
        error: Exception | None = None
        if steps is not None:
            head[0] = _END
            try:
                for batches, sizes, last in steps:
                    own = all(sizes) and together == 1
                    parcels = [parcel.pack(batch) for batch in (batches[1:] if own else batches)]
                    if own:
                        parcels.insert(0, torch.empty(0, dtype=torch.uint8))  # rank 0 has its own already
                    parcels += parcels[:1] * (ranks - len(parcels))  # a rank with nothing has rank 0's
                    head = torch.tensor([_LAST if last else _BATCH, *sizes, *map(len, parcels)])
                    break
            except Exception as raised:
                error, head[0] = raised, _FAILED
        head = head.to(device)
        with messages.waiting():
            dist.broadcast(head, 0)
        status, *numbers = head.tolist()
        if status == _END:
            return
        if status == _FAILED:
            told = messages.exchange(None if error is None else told_of(error))[0]
            if error is not None:
                raise error
            raise messages.echo(f"rank 0, which reads for all ranks (dispatch_batches=True), failed: {told}")
        if steps is not None:
            sent = [dist.isend(parcels[to // together].to(device), to) for to in range(1, options.everyone)]
            batch = batches[0]
            for work in sent:
                work.wait()
        else:
            received = torch.empty(numbers[ranks + rank], dtype=torch.uint8, device=device)
            dist.recv(received, 0)
            batch = parcel.unpack(received.cpu())
        cursor.local, cursor.total = numbers[rank], sum(numbers[:ranks])
        cursor.step, cursor.last = step, status == _LAST
        step += 1
        yield batch
