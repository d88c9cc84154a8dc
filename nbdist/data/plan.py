"""Which samples a rank takes at each step of an epoch, and how many the ranks take together.

Step m takes the samples [m*W*B, (m+1)*W*B) of the order; rank r the r-th part of them. A short last step is split
evenly (sizes differ by one at most, low ranks first). A rank for which nothing is left takes rank 0's samples of the
same step as a stand-in: it has something to run the same code on, and its weight is 0. So every rank makes the same
number of steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbdist.data.sandbox import Sandbox


def known_length(value: Any) -> int | None:
    """`len`, or None where there is none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def shares(rows: int, ranks: int) -> list[int]:
    """`rows` split as evenly as it goes, low ranks first: 5 over 3 ranks is [2, 2, 1]."""
    base, extra = divmod(rows, ranks)
    return [base + (rank < extra) for rank in range(ranks)]


class FlatPlan:
    """The plan for an order of known length.

    Args:
        order: the samples' indices in the epoch's order, anything that slices.
        batch: samples a rank takes at a full step.
        rank, ranks: which part is ours, of how many.
        drop_last: leave a short last step out.
        copies: so many ranks have a plan of their own like this one (the order was sharded before it came here).
    """

    def __init__(
        self, order: Sequence[int] | Any, batch: int, rank: int, ranks: int, drop_last: bool, copies: int = 1
    ) -> None:
        self.order, self.batch, self.rank, self.ranks, self.copies = order, batch, rank, ranks, copies
        self.rows = len(order)
        self.full_steps = self.rows // (batch * ranks)
        left = 0 if drop_last else self.rows - self.full_steps * batch * ranks
        self.tail = shares(left, ranks) if left else []  # each rank's size of the short last step
        self.steps = self.full_steps + bool(left)
        self.ragged = max(min(self.full_steps, self.steps - 1), 0)  # the first step that may be short, or the last

    def batches(self, start: int) -> Iterator[list[int]]:
        """This rank's indices, from step `start` on."""
        order: Any = self.order
        take, batch, stride = self._take, self.batch, self.batch * self.ranks
        end = self.full_steps * stride
        steps = range(start * stride + self.rank * batch, end, stride)
        if hasattr(order, "tolist"):  # written out, as this runs at each step of training
            for at in steps:
                yield order[at : at + batch].tolist()
        else:
            for at in steps:
                yield [*order[at : at + batch]]
        if self.tail and start <= self.full_steps:
            size = self.tail[self.rank]
            if size:
                yield take(end + sum(self.tail[: self.rank]), size)
            else:
                yield take(end, self.tail[0])

    def everyone(self, start: int) -> Iterator[list[int]]:
        """All ranks' indices in turn, from step `start` on, without stand-ins."""
        for step in range(start, self.steps):
            at = step * self.batch * self.ranks
            for size in self.sizes(step):
                if size:
                    yield self._take(at, size)
                at += size

    def sizes(self, step: int) -> list[int]:
        """Each rank's real samples at a step."""
        return [self.batch] * self.ranks if step < self.full_steps else self.tail

    def _take(self, at: int, size: int) -> list[int]:
        part = self.order[at : at + size]
        return part.tolist() if hasattr(part, "tolist") else list(part)

    def counts(self, step: int) -> tuple[int, int]:
        """Real samples of this rank, and of all ranks, at a step."""
        if step < self.full_steps:
            return self.batch, self.batch * self.ranks * self.copies
        return self.tail[self.rank], sum(self.tail) * self.copies

    def is_last(self, step: int) -> bool:
        return step == self.steps - 1

    def total(self, step: int, steps: int) -> int:
        """Real samples of all ranks in so many steps from this one on, or as many as there are."""
        whole = self.batch * self.ranks
        end = self.full_steps * whole + sum(self.tail)
        return (min(end, (step + steps) * whole) - step * whole) * self.copies


class LazyPlan:
    """The plan for a sampler that can only be asked for the next one: it may be endless, or decide as it goes.

    Args:
        groups: gives, step by step, every rank's indices; a rank with nothing has an empty list.
        sandbox: the random state in which the sampler draws.
        rank: which of a group is ours.
        copies: so many ranks have a plan of their own like this one.
    """

    AT_ONCE = 16  # groups pulled each time: going in and out of the sandbox costs some 5 us

    def __init__(self, groups: Iterator[list[list[int]]], sandbox: Sandbox, rank: int, copies: int = 1) -> None:
        self._groups, self._sandbox, self._rank, self._copies = groups, sandbox, rank, copies
        self._sizes: dict[int, list[int]] = {}  # of the step in hand, and of those pulled ahead of it
        self._waiting: deque[list[list[int]]] = deque()  # the groups that were pulled and not given out
        self._pulled = 0
        self._ended = False
        self._error: Exception | None = None  # the sampler's: raised where its step would be
        self.ragged = 0  # no step is known to be like the others

    def _reach(self, step: int) -> bool:
        """Whether there is such a step; pulls as far as that."""
        while self._pulled <= step and not self._ended:
            aim = self._pulled + self.AT_ONCE
            try:
                with self._sandbox:
                    for group in itertools.islice(self._groups, self.AT_ONCE):
                        self._sizes[self._pulled] = [len(part) for part in group]
                        self._waiting.append(group)
                        self._pulled += 1
            except Exception as error:
                self._error = error
            self._ended = self._pulled < aim
        return step < self._pulled

    def batches(self, start: int) -> Iterator[list[int]]:
        """This rank's indices, from step `start` on."""
        rank = self._rank
        return (group[rank] or group[0] for group in self._groups_from(start))

    def everyone(self, start: int) -> Iterator[list[int]]:
        """All ranks' indices in turn, from step `start` on, without stand-ins."""
        return (part for group in self._groups_from(start) for part in group if part)

    def _groups_from(self, start: int) -> Iterator[list[list[int]]]:
        for step in itertools.count():
            if not self._reach(step):
                if self._error is not None:
                    raise self._error
                return
            group = self._waiting.popleft()
            if step >= start:
                yield group
            else:
                del self._sizes[step]

    def counts(self, step: int) -> tuple[int, int]:
        """Real samples of this rank, and of all ranks, at a step; the one before is forgotten."""
        sizes = self.sizes(step)
        return sizes[self._rank], sum(sizes) * self._copies

    def sizes(self, step: int) -> list[int]:
        """Each rank's real samples at a step; the one before is forgotten."""
        self._sizes.pop(step - 1, None)
        return self._sizes[step]

    def is_last(self, step: int) -> bool:
        return not self._reach(step + 1) and self._error is None

    def total(self, step: int, steps: int) -> int:
        """Real samples of all ranks in so many steps from this one on, or as many as there are."""
        self._reach(step + steps - 1)
        steps_known = range(step, min(step + steps, self._pulled))
        return sum(sum(self._sizes[at]) for at in steps_known) * self._copies


def by_batch(batches: Callable[[], Iterable[Sequence[int]]], ranks: int) -> Iterator[list[list[int]]]:
    """Groups from a user's own batch sampler: its batches stay whole and go round robin over the ranks."""
    source = iter(batches())
    while group := [list(batch) for batch in itertools.islice(source, ranks)]:
        yield group + [[]] * (ranks - len(group))


def by_part(batches: Callable[[], Iterable[Sequence[int]]], ranks: int) -> Iterator[list[list[int]]]:
    """Groups from a user's own batch sampler: each of its batches is split evenly over the ranks."""
    for batch in batches():
        yield parted(list(batch), ranks)


def parted(rows: list[Any], ranks: int) -> list[list[Any]]:
    """`rows` cut into each rank's consecutive share."""
    ends = list(itertools.accumulate(shares(len(rows), ranks)))
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def by_sample(
    samples: Callable[[], Iterable[int]], batch: int, ranks: int, drop_last: bool
) -> Iterator[list[list[int]]]:
    """Groups from a sampler without a length."""
    source = iter(samples())
    while rows := list(itertools.islice(source, batch * ranks)):
        if len(rows) < batch * ranks and drop_last:
            return
        yield parted(rows, ranks)
