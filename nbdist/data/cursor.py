"""Where a running iterator of a prepared loader is: what the Accelerator weighs and ends its windows by."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    """A plan as a cursor reads it: what is known of the batches to come."""

    def total(self, step: int, steps: int) -> int | None:
        """Real samples of all ranks in `steps` batches from `step` on (as far as there are any); None: not known."""


class Position:
    """Where a prepared loader is, over all its iterators.

    `delivered` counts batches that reached the user in this epoch, not those fetched ahead. `start` is where the next
    iteration of this epoch begins: 0, but for an epoch that was loaded from a state. `used` says that training took
    one of them: then a `break` moves on to the next epoch; a mere peek uses nothing up. `seed` is a loaded state's;
    None: the loader's own. `number` is that of the loader (`numbers`).
    """

    __slots__ = ("__weakref__", "delivered", "epoch", "number", "seed", "start", "used")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.epoch = self.delivered = self.start = 0
        self.used = False
        self.seed: int | None = None

    def begin(self) -> tuple[int, int]:
        """A new iteration starts; returns its epoch, and the batches of it that it passes over."""
        if self.used and self.delivered:
            self.epoch, self.start = self.epoch + 1, 0
        self.delivered, self.used = self.start, False
        return self.epoch, self.start

    def resume(self, epoch: int, delivered: int) -> None:
        """The next iteration is the rest of this epoch, behind so many batches."""
        self.epoch, self.delivered, self.start, self.used = epoch, delivered, delivered, False

    def end(self) -> None:
        """An iteration has delivered its last batch."""
        self.resume(self.epoch + 1, 0)


class Cursor:
    """The batch in hand of one running iterator.

    `local` and `total`: its real rows on this rank, and on all ranks; a total of 0 is not known. `step`: its number
    in the epoch, from 0. `last`: it is known to be the last one; all ranks know the same. `above`: the iterator whose
    batch was in hand when this one was made.
    """

    __slots__ = ("above", "last", "local", "plan", "position", "step", "total")

    def __init__(self, position: Position) -> None:
        self.position = position
        self.local = self.total = 0
        self.step, self.last = -1, False
        self.plan: Counts | None = None
        self.above: Cursor | None = None

    def ahead(self, steps: int) -> int | None:
        """Real samples of all ranks in this batch and the next, `steps` in all or as many as there are; None: not
        known.
        """
        return None if self.plan is None else self.plan.total(self.step, steps)


class Live(list[Cursor | None]):
    """The running iterators that an Accelerator has, the newest last; None at the bottom.

    Attributes:
        stand_ins: of the iteration that ended last, where this rank's last batch was none of its own: how many rows
            this rank has seen, and how many of them were real.
    """

    stand_ins: tuple[int, int] | None = None
