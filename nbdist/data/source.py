"""Where a map-style loader's indices come from: the user's samplers, made into a plan for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from nbdist.data import randomness
from nbdist.data.cursor import Cursor
from nbdist.data.move import CopyAhead
from nbdist.data.options import Options
from nbdist.data.plan import FlatPlan, LazyPlan, by_batch, by_part, by_sample, known_length
from nbdist.data.sandbox import Sandbox


def is_usual(batches: Any) -> bool:
    """Whether a batch sampler just cuts its sampler's order: torch's own, or its twin in torchdata."""
    kind = type(batches)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and kind.__module__.startswith("torchdata."))


class IndexStream:
    """Stands for the user's sampler, or batch sampler, under a prepared loader; its attributes are seen through."""

    def __init__(self, sampler: Any, source: Source, single: bool) -> None:
        self._sampler, self._source, self._single = sampler, source, single
        self.plan: FlatPlan | LazyPlan | None = None
        self.start = 0
        self.everyone = False  # rank 0 fetches for all ranks

    def __iter__(self) -> Iterator[Any]:
        # The plan is taken now and not at the first item: two iterators of one loader may run side by side.
        plan = self.plan if self.plan is not None else self._source.plan(0)
        batches = (plan.everyone if self.everyone else plan.batches)(self.start)
        return (batch[0] for batch in batches) if self._single else batches

    def __len__(self) -> int:
        return self._source.steps()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class Source:
    """Feeds a prepared loader from the indices of its samplers.

    Args:
        loader: the user's loader.
        options: how it is prepared.
        seed: gives the loader's seed.
    """

    def __init__(self, loader: DataLoader, options: Options, seed: Callable[[], int]) -> None:
        self._loader, self._options, self._seed = loader, options, seed
        batches = loader.batch_sampler
        usual = is_usual(batches)
        self.own_batches = batches if batches is not None and not usual else None
        if usual:
            self.sampler, size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        else:
            self.sampler, size, self.drop_last = loader.sampler, None, False
        self.distributed: Any = getattr(batches, "sampler", self.sampler)  # if it is one
        self.sharded = isinstance(self.distributed, DistributedSampler)
        self._size = size
        self.batch = options.each(size, whole=self.sharded or self.own_batches is not None)
        rank, ranks = options.rank, options.ranks
        self.rank, self.ranks, self.copies = (0, 1, ranks) if self.sharded else (rank, ranks, 1)
        self.kind = "samples" if self.own_batches is None else "batches"
        single = batches is None
        self.stream = IndexStream(self.sampler if single else batches, self, single)
        self.attributes: dict[str, Any] = {"sampler" if single else "batch_sampler": self.stream}

    @property
    def stride(self) -> int:
        """Samples of all ranks in a full step; of a user's own batches, how many batches."""
        if self.own_batches is None:
            return self.batch * self.ranks * self.copies
        return 1 if self._options.split_batches else self.ranks * self.copies

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks, beside the length."""
        sampler = type(self.sampler if self.own_batches is None else self.own_batches).__name__
        return {"batch_size": self._size, "drop_last": self.drop_last, "sampler": sampler}

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Callable[[int], Iterator[Any]]) -> Iterable[Any]:
        """The batches of an epoch from `start` on; `begin` starts the loader's own iterator, with a seed."""
        plan = self.stream.plan = self.plan(epoch)
        self.stream.start = start
        # Workers draw alike in each run and differently on each rank; what a resumed epoch draws is not drawn again.
        inner = begin(randomness.mixed(self._seed(), epoch, self._options.rank, *([start] if start else [])))
        untouched = type(self._loader).__iter__ is DataLoader.__iter__  # else the user's own may want them as they are
        if self._options.non_blocking and self._options.device is not None and untouched:
            inner = CopyAhead.over(inner, self._options.device)
        return Planned(inner, plan, cursor, start)

    def plan(self, epoch: int) -> FlatPlan | LazyPlan:
        sampler, own = self.sampler, self.own_batches
        if not self.sharded:  # what is already sharded is the user's, its epochs too
            mine: tuple[Any, ...] = (sampler, own, getattr(own, "sampler", None))
            for one in mine:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
        seed = randomness.mixed(self._seed(), epoch)
        if own is not None:
            sandbox = Sandbox(seed, own, getattr(own, "sampler", None))
            cut = by_part if self._options.split_batches and not self.sharded else by_batch
            return LazyPlan(cut(lambda: own, self.ranks), sandbox, self.rank, self.copies)
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
            return LazyPlan(groups, Sandbox(seed, sampler), self.rank, self.copies)
        elif self.sharded:
            order = list(sampler)
        else:
            with Sandbox(seed, sampler):
                order = list(sampler)
            if all(type(index) is int for index in order[:1]):
                order = numpy.asarray(order)
        plan = FlatPlan(order, self.batch, self.rank, self.ranks, self.drop_last, self.copies)
        if self._loader.batch_sampler is None:
            plan.ragged = 0  # an item of the dataset may be anything: each step is counted
        return plan

    def steps(self) -> int:
        """Batches an epoch, on every rank; TypeError when the user's sampler has no length."""
        if self.own_batches is not None:
            each = 1 if self._options.split_batches and not self.sharded else self.ranks
            return -(-self._len() // each)
        rows, whole = self._len(), self.batch * self.ranks
        return rows // whole if self.drop_last else -(-rows // whole)

    def _len(self) -> int:
        return len(self.own_batches if self.own_batches is not None else self.sampler)

    def length(self) -> int | None:
        """Samples an epoch, or batches of a user's own batch sampler; None when it has no length."""
        return known_length(self.own_batches if self.own_batches is not None else self.sampler)


class Planned:
    """The batches of an epoch, and the plan that they follow.

    Going over it sets the cursor to each of them; who takes `batches` themselves does that.

    Attributes:
        batches: from the loader.
        start: the number of the first one.
        ragged: the steps before it are alike, and none of them is the last.
    """

    __slots__ = ("_plan", "batches", "cursor", "ragged", "start")

    def __init__(self, batches: Iterator[Any], plan: FlatPlan | LazyPlan, cursor: Cursor, start: int) -> None:
        self.batches, self.cursor, self.start, self._plan = batches, cursor, start, plan
        cursor.plan, self.ragged = plan, plan.ragged
        if start < self.ragged:
            cursor.local, cursor.total = plan.counts(start)

    def count(self, step: int) -> None:
        """Tell the cursor of a ragged step."""
        self.cursor.local, self.cursor.total = self._plan.counts(step)
        self.cursor.last = self._plan.is_last(step)

    def __iter__(self) -> Iterator[Any]:
        cursor, ragged = self.cursor, self.ragged
        for step, batch in enumerate(self.batches, self.start):
            cursor.step = step
            if step >= ragged:
                self.count(step)
            yield batch
