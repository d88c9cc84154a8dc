"""Datasets that are another one on each rank: nothing is split, but every rank must make the same number of steps.

How much the others have is known from their lengths where there are any. Else the ranks tell each other, for a chunk of
steps at a time: the first chunk is one step, and later ones grow up to 32, as long as a chunk's batches, which are read
ahead for it, stay below 64 MiB. The message of the next chunk is on its way while a batch of this one is in use. A rank
with nothing left goes on with its last batch, at weight 0; one that never had a batch borrows one.

Iterating such a stream is a collective: all ranks start and leave it alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from nbdist import messages
from nbdist.data import parcel, randomness
from nbdist.data.cursor import Cursor
from nbdist.data.dispatch import told_of
from nbdist.data.options import Options, never
from nbdist.data.source import Source
from nbdist.data.stream import StreamSource

CHUNK, BYTES = 32, 64 << 20
_NONE: Any = object()

# (the batch or _NONE, each rank's rows, whether it is the last)
Step = tuple[Any, list[int], bool]


def is_sharded(loader: DataLoader, options: Options) -> bool:
    """Whether each rank's dataset is another one: as the caller says, else the dataset.

    A dataset says so by a true attribute `sharded_by_rank`, or is an iterable one from Hugging Face's
    `split_dataset_by_node`. (Their datasets with indices do not show it.)
    """
    if options.already_sharded is not None:
        return options.already_sharded
    dataset = loader.dataset
    if getattr(dataset, "sharded_by_rank", False):
        return True
    return isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is not None


class OwnData:
    """Feeds a prepared loader from a dataset that is only this rank's.

    Args:
        loader: the user's loader.
        options: how it is prepared.
        seed: gives the loader's seed.
    """

    sharded = False

    def __init__(self, loader: DataLoader, options: Options, seed: Callable[[], int]) -> None:
        self._options = options
        alone = replace(options, rank=0, ranks=1, shared_by=options.ranks, accumulates=never)
        streamed = isinstance(loader.dataset, IterableDataset)
        feed: Any = StreamSource if streamed else Source
        self._inner: Any = feed(loader, alone, lambda: randomness.mixed(seed(), options.rank))
        self.kind = "sharded stream" if streamed else "sharded samples"
        self.attributes: dict[str, Any] = self._inner.attributes
        self._rows: list[int] | None = None  # of each rank, where all of them have a length
        if not streamed:
            self._inner.steps = self._steps

    @property
    def stride(self) -> int:
        return self._inner.stride

    def length(self) -> int | None:
        """This rank's samples an epoch; None when that is not known, or tells not how many steps there are."""
        if isinstance(self._inner, StreamSource) or self._inner.own_batches is not None:
            return None
        return self._inner.length()

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks: where lengths are known, by what steps are counted from them."""
        if self.length() is None:
            return {}
        alike = self._inner.alike()
        return {name: alike[name] for name in ("batch_size", "drop_last")}

    def told(self, lengths: list[int | None]) -> None:
        """What `length` is on each rank."""
        known = [length for length in lengths if length is not None]
        self._rows = known if len(known) == len(lengths) else None

    def _steps(self) -> int:
        if self._rows is None:
            raise TypeError("how many batches the ranks make together shows only as they go")
        return max(self._batches(rows) for rows in self._rows)

    def _batches(self, rows: int) -> int:
        return rows // self._inner.batch if self._inner.drop_last else -(-rows // self._inner.batch)

    def _sizes(self, step: int) -> list[int]:
        assert self._rows is not None
        batch = self._inner.batch
        return [min(batch, rows - step * batch) if step < self._batches(rows) else 0 for rows in self._rows]

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        own = Cursor(cursor.position)
        inner = iter(self._inner.iterate(epoch, start, own, begin))
        if self._rows is not None:
            steps = self._known(inner, start)
        else:
            steps = _exchanged(((batch, own.local) for batch in inner), self._options)
        return _filled(steps, cursor, start, self._options)

    def _known(self, inner: Iterator[Any], start: int) -> Iterator[Step]:
        for step in range(start, self._steps()):
            yield next(inner, _NONE), self._sizes(step), step == self._steps() - 1


def _filled(steps: Iterator[Step], cursor: Cursor, start: int, options: Options) -> Iterator[Any]:
    """Sets the cursor to each batch, and gives a stand-in where there is none."""
    held, rank = _NONE, options.rank
    for step, (batch, sizes, last) in enumerate(steps, start):
        if step == start and options.together > 1:
            _see_one(batch, options.together)
        if step == start and 0 in sizes:
            held = _borrowed(batch, sizes, options)
        if batch is not _NONE:
            held = batch
        cursor.step, cursor.last = step, last
        cursor.local, cursor.total = sizes[rank], sum(sizes)
        yield held


def _see_one(batch: Any, together: int) -> None:
    """On all ranks: have those that take the same part of a batch the same?"""
    told = messages.exchange(b"" if batch is _NONE else parcel.digest(batch))
    for first in range(0, len(told), together):
        group = told[first : first + together]
        if len(set(group)) > 1:
            raise messages.DistributedOperationException(
                f"ranks {first} to {first + together - 1} take one batch together (tensor or context parallel), and "
                "their datasets, which are split already, give them different batches. Split it by "
                f"accelerator.process_index // {together}"
            )


def _borrowed(batch: Any, sizes: list[int], options: Options) -> Any:
    """On all ranks, when one of them has nothing from the start: the batch of the first one that has some."""
    lender = next(index for index, size in enumerate(sizes) if size) * options.together
    rank = dist.get_rank()
    sent = parcel.pack(batch) if rank == lender else torch.empty(0, dtype=torch.uint8)
    device = messages.message_device()
    size = max(messages.exchange(len(sent)))
    message = sent.to(device) if rank == lender else torch.empty(size, dtype=torch.uint8, device=device)
    with messages.waiting():
        dist.broadcast(message, lender)
    return batch if rank == lender else parcel.unpack(message.cpu())


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


class _Reader:
    """This rank's batches, read ahead, and the messages about them.

    Args:
        batches: (batch, rows) of this rank.
        ranks: how many tell each other.
        together: so many of them in a row take the same.
    """

    def __init__(self, batches: Iterator[tuple[Any, int]], ranks: int, together: int = 1) -> None:
        self._batches, self._ranks, self._together = batches, ranks, together
        self.waiting: deque[tuple[Any, int]] = deque()
        self._ended = False
        self._failure: Exception | None = None
        self._device = messages.message_device() if ranks > 1 else torch.device("cpu")
        self._sent: tuple[Any, ...] | None = None

    def read(self, batches: int) -> None:
        """Have so many waiting, or all that there are."""
        while len(self.waiting) < batches and not self._ended:
            try:
                following = next(self._batches, None)
            except Exception as error:
                self._failure, following = error, None
            if following is None:
                self._ended = True
            else:
                self.waiting.append(following)

    def send(self, ahead: int, steps: int) -> None:
        """Tell the others how many rows each of `steps` steps has, `ahead` steps from the one in hand on."""
        self.read(ahead + steps)
        rows = [rows for _, rows in list(self.waiting)[ahead : ahead + steps]]
        largest = max((_bytes(batch) for batch, _ in self.waiting), default=0)
        wish = -1 if self._failure is not None else max(min(2 * steps, CHUNK, BYTES // max(largest, 1)), 1)
        message = torch.zeros(1 + CHUNK, dtype=torch.int64)
        message[0] = wish
        message[1 : 1 + len(rows)] = torch.tensor(rows, dtype=torch.int64)
        message = message.to(self._device)
        everyone = torch.empty(self._ranks * len(message), dtype=torch.int64, device=self._device)
        work = messages.all_gather(everyone, message, later=True) if self._ranks > 1 else None
        self._sent = (work, message, everyone if work is not None else message, steps)

    def received(self) -> tuple[list[list[int]], int]:
        """By step, each rank's rows; and how many steps the chunk after this one has.

        Raises:
            RuntimeError: another rank's dataset failed.
        """
        assert self._sent is not None
        work, _, everyone, steps = self._sent
        if work is not None:
            work.wait()
        by_rank = everyone.view(self._ranks, 1 + CHUNK).tolist()
        if any(row[0] < 0 for row in by_rank):
            told = messages.exchange(None if self._failure is None else told_of(self._failure))
            if self._failure is not None:
                raise self._failure
            failed = next(rank for rank, text in enumerate(told) if text is not None)
            raise messages.echo(f"the dataset of rank {failed} failed: {told[failed]}")
        table = [[row[1 + step] for row in by_rank[:: self._together]] for step in range(steps)]
        return table, min(row[0] for row in by_rank)


def _exchanged(batches: Iterator[tuple[Any, int]], options: Options) -> Iterator[Step]:
    """The steps of all ranks, told in chunks; see the top of this module."""
    reader = _Reader(batches, options.everyone, options.together)
    reader.send(0, 1)
    table, following = reader.received()
    while any(table[0]):
        count = len(table)
        for step, sizes in enumerate(table):
            if not any(sizes):
                return
            left = count - step
            if any(table[-1]):  # else the end is in this chunk
                if left == min(count, 2):
                    reader.send(left, following)
                elif left > 2:  # bit by bit, and not all at the end
                    reader.read(left + following * (step + 1) // count)
            if left == 1:
                more, following = reader.received()
            after = table[step + 1] if left > 1 else more[0]
            yield reader.waiting.popleft()[0] if reader.waiting else _NONE, sizes, not any(after)
        table = more


def _bytes(value: Any) -> int:
    """Of the tensors in plain nested containers."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
