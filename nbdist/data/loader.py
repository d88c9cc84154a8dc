"""A prepared DataLoader: the user's own class and attributes, with only its index stream sharded.

The user's object is not touched. The prepared one is a shallow copy under a subclass of the user's class (public
names only: a copy made from constructor arguments could not know a subclass's own). While an iterator of it runs, a
    `Cursor` tells how many rows of
the batch in hand are real, here and on all ranks; the Accelerator weighs the loss with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from nbdist import state
from nbdist.data import randomness
from nbdist.data.cursor import Cursor, Position
from nbdist.data.move import send_to_device
from nbdist.data.plan import FlatPlan, LazyPlan, by_batch, by_sample
from nbdist.data.stream import ShardedIterable, Tail, TailCollate


class IndexStream:
    """Stands for the user's sampler, or batch sampler, under a prepared loader; its attributes are seen through."""

    def __init__(self, sampler: Any, source: Source, single: bool) -> None:
        self._sampler, self._source, self._single = sampler, source, single
        self.plan: FlatPlan | LazyPlan | None = None

    def __iter__(self) -> Iterator[Any]:
        # The plan is taken now and not at the first item: two iterators of one loader may run side by side.
        plan = self.plan if self.plan is not None else self._source.plan(0)
        batches = plan.batches(0)
        return (batch[0] for batch in batches) if self._single else batches

    def __len__(self) -> int:
        return self._source.steps()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class Source:
    """Makes the plan of each epoch from a map-style loader's samplers.

    Args:
        loader: the user's loader.
        rank, ranks: which part is ours, of how many.
    """

    def __init__(self, loader: DataLoader, rank: int, ranks: int) -> None:
        batches = loader.batch_sampler
        self.own_batches = batches if batches is not None and type(batches) is not BatchSampler else None
        if type(batches) is BatchSampler:
            self.sampler, self.batch, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        else:
            self.sampler, self.batch, self.drop_last = loader.sampler, 1, False
        self.distributed: Any = getattr(batches, "sampler", self.sampler)  # if it is one
        self.sharded = isinstance(self.distributed, DistributedSampler)
        self.rank, self.ranks, self.copies = (0, 1, ranks) if self.sharded else (rank, ranks, 1)
        self._given = randomness.generator_of(self.sampler, batches, self.distributed, loader)

    def seed(self) -> int:
        return state.data_seed() if self._given is None else self._given.initial_seed()

    def plan(self, epoch: int) -> FlatPlan | LazyPlan:
        sampler, own = self.sampler, self.own_batches
        if not self.sharded:  # what is already sharded is the user's, its epochs too
            mine: tuple[Any, ...] = (sampler, own, getattr(own, "sampler", None))
            for one in mine:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
        seed = randomness.mixed(self.seed(), epoch)
        if own is not None:
            sandbox = randomness.Sandbox(seed, own, getattr(own, "sampler", None))
            return LazyPlan(by_batch(lambda: own, self.ranks), sandbox, self.rank, self.copies)
        return self._flat(sampler, seed)

    def _flat(self, sampler: Any, seed: int) -> FlatPlan | LazyPlan:
        order: Any
        if type(sampler) is SequentialSampler:
            order = range(len(sampler))
        elif (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(sampler.num_samples, generator=generator).numpy()
        elif not hasattr(sampler, "__len__"):
            groups = by_sample(lambda: sampler, self.batch, self.ranks, self.drop_last)
            return LazyPlan(groups, randomness.Sandbox(seed, sampler), self.rank, self.copies)
        elif self.sharded:
            order = list(sampler)
        else:
            with randomness.Sandbox(seed, sampler).entered():
                order = list(sampler)
            if all(type(index) is int for index in order[:1]):
                order = numpy.asarray(order)
        return FlatPlan(order, self.batch, self.rank, self.ranks, self.drop_last, self.copies)

    def steps(self) -> int:
        """Batches an epoch, on every rank; TypeError when the user's sampler has no length."""
        if self.own_batches is not None:
            return -(-len(self.own_batches) // self.ranks)
        rows, whole = len(self.sampler), self.batch * self.ranks
        return rows // whole if self.drop_last else -(-rows // whole)


class Prepared:
    """What is put in front of the user's DataLoader class: it delivers. Its private attributes lie in the loader's
    `vars`.
    """

    __slots__ = ()  # an instance layout of its own would not go together with every user class
    _nb: Inside

    def __iter__(self) -> Iterator[Any]:
        inside = self._nb
        cursor = Cursor(inside.position)
        inside.pending.append((inside.position.begin(), cursor))
        return _deliver(super().__iter__(), cursor, inside.live, inside.device)  # type: ignore[misc]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch's. Without it, an iteration that ended or was trained on moves on by one."""
        position = self._nb.position
        position.epoch, position.delivered, position.used = epoch, 0, False
        source: Any = self._nb.source
        if source is not None and source.sharded:
            source.distributed.set_epoch(epoch)


class Counted(DataLoader):
    """Put between the user's class and DataLoader: starts the epoch's plan, and tells the cursor what each batch holds.

    It lies below the user's class, so that an `__iter__` there may drop or change batches and still sees what it
    expects.
    """

    _nb: Inside

    def __iter__(self) -> Iterator[Any]:  # no generator function: workers start at iter(), as they do in torch
        inside = self._nb
        if inside.pending:
            epoch, cursor = inside.pending.pop(0)
        else:  # the user's __iter__ goes through the data once more
            inside.position.epoch += 1
            epoch, cursor = inside.position.epoch, inside.cursor
        inside.cursor = cursor
        if inside.source is not None:
            plan = inside.stream.plan = inside.source.plan(epoch)
            return _planned(super().__iter__(), plan, cursor)
        if hasattr(inside.original.dataset, "set_epoch"):
            inside.original.dataset.set_epoch(epoch)
        if self.num_workers > 0:  # workers seed themselves from this: the same stream on all ranks
            given = inside.original.generator
            seed = state.data_seed() if given is None else given.initial_seed()
            self.__dict__["generator"] = torch.Generator().manual_seed(randomness.mixed(seed, epoch))
        return _streamed(super().__iter__(), self.batch_size or 1, inside.ranks, cursor)


class Inside:
    """What a prepared loader carries: its original, where it is, and the stack of running iterators it reports to."""

    def __init__(
        self, original: DataLoader, ranks: int, live: list[Cursor | None], device: Any, position: Position
    ) -> None:
        self.original, self.ranks, self.live, self.device = original, ranks, live, device
        self.position = position
        self.cursor = Cursor(self.position)
        self.pending: list[tuple[int, Cursor]] = []  # iterations that were begun and whose data were not asked for yet
        self.source: Source | None = None
        self.stream: Any = None
        self.replaced = {"_nb", "_iterator"}  # the prepared loader's attributes that are not the user's


def _planned(inner: Iterator[Any], plan: FlatPlan | LazyPlan, cursor: Cursor) -> Iterator[Any]:
    cursor.plan = plan
    ragged = plan.ragged  # the steps before are alike, and none of them is the last
    if ragged:
        cursor.local, cursor.total = plan.counts(0)
    for step, batch in enumerate(inner):
        cursor.step = step
        if step >= ragged:
            cursor.local, cursor.total = plan.counts(step)
            cursor.last = plan.is_last(step)
        yield batch


def _streamed(inner: Iterator[Any], size: int, ranks: int, cursor: Cursor) -> Iterator[Any]:
    for batch in inner:
        if type(batch) is Tail:
            cursor.local, cursor.total = batch.local, batch.total
            yield batch.value
        else:  # workers end one by one: after a short step a full one may follow
            cursor.local, cursor.total = size, size * ranks
            yield batch


def _deliver(inner: Iterator[Any], cursor: Cursor, live: list[Cursor | None], device: Any) -> Iterator[Any]:
    """The outermost layer. The newest iterator that delivered is the last in `live`; it leaves as soon as nobody
    holds it.
    """
    position = cursor.position
    try:
        for batch in inner:
            position.delivered += 1
            if live[-1] is not cursor:
                if cursor in live:
                    live.remove(cursor)
                live.append(cursor)
            yield batch if device is None else send_to_device(batch, device, non_blocking=True)
        position.epoch += 1
        position.delivered, position.used = 0, False
    finally:
        if cursor in live:
            live.remove(cursor)


def prepare_loader(loader: DataLoader, rank: int, ranks: int, live: list[Cursor | None], device: Any = None) -> Any:
    """The user's loader with its samples split over the ranks; see the top of this module.

    Args:
        loader: any DataLoader. One that is prepared already and reports to `live` comes back as it is; one that reports
            elsewhere gives a new one over the user's own loader, which goes on where the old one is.
        rank, ranks: which part is ours, of how many.
        live: the stack of running iterators, None at its bottom.
        device: where batches are brought; None leaves them where they are.

    Raises:
        NotImplementedError: the dataset is a stream that is already split by rank.
    """
    position = Position()
    later: dict[str, Any] = {}
    if isinstance(loader, Prepared):
        old = loader._nb
        if old.live is live:
            return loader
        later = {name: value for name, value in vars(loader).items() if name not in old.replaced}
        position, loader = old.position, old.original
    user = type(loader)
    bases = (Prepared, Counted) if user is DataLoader else (Prepared, user, Counted)
    prepared: Any = object.__new__(type(user.__name__, bases, {"__module__": user.__module__, "__doc__": user.__doc__}))
    own = vars(prepared)
    own.update(vars(loader))
    own.update(later)  # what the user has set on the prepared one
    own["_iterator"] = None  # persistent workers stay the user's
    inside = own["_nb"] = Inside(loader, ranks, live, device, position)
    if isinstance(loader.dataset, IterableDataset):
        if getattr(loader.dataset, "_distributed", None) is not None:
            raise NotImplementedError(
                "this dataset is already split by rank (split_dataset_by_node), so the ranks do not know how many "
                "samples there are together. Pass it unsplit: prepare() gives each rank its share."
            )
        batched = loader.batch_size is not None
        own["dataset"] = ShardedIterable(
            loader.dataset, loader.batch_size if batched else 1, rank, ranks, loader.drop_last
        )
        own["collate_fn"] = TailCollate(loader.collate_fn, batched)
        inside.replaced |= {"dataset", "collate_fn", "generator", "_IterableDataset_len_called"}
        return prepared
    source = inside.source = Source(loader, rank, ranks)
    if source.sharded and ranks > 1:
        note = "this loader has a DistributedSampler, so it is sharded already: prepare() leaves its samples alone"
        warnings.warn(note, stacklevel=3)
    single = loader.batch_sampler is None
    inside.stream = IndexStream(loader.sampler if single else loader.batch_sampler, source, single)
    replaced = "sampler" if single else "batch_sampler"
    own[replaced] = inside.stream
    inside.replaced.add(replaced)
    return prepared


def user_loader(prepared: Any) -> DataLoader:
    """The very loader that the user prepared."""
    return prepared._nb.original
