"""Who am I: rank, world size, device, the step boundary at which ranks can agree to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet


class StepBoundary:
    """Where all ranks of a training loop are in the same state: just after an optimizer step.

    The Accelerator calls `passed` there; when nobody wants to stop that is an addition and a test (0.1 us). To stop, the worker's
    control thread calls `freeze` on every rank, takes the largest answer, and `release`s every rank to it: all of
    them run on to that very step and raise KeyboardInterrupt there, so that replicas stay equal.
    """

    def __init__(self) -> None:
        self.steps = 0  # boundaries passed in this cell
        self._frozen = False
        self._target: int | None = None
        self._cancelled = False
        self._changed = threading.Condition()

    def passed(self) -> None:
        """Count a step; when a stop is being agreed on, wait for its target and raise KeyboardInterrupt there."""
        self.steps += 1
        if self._frozen:
            self._meet()

    def _meet(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None or self._cancelled)
            if self._cancelled:
                return
            reached = self._target is not None and self.steps >= self._target
        if reached:
            raise KeyboardInterrupt

    def reset(self) -> None:
        """A new cell starts."""
        with self._changed:
            self.steps, self._frozen, self._target, self._cancelled = 0, False, None, False

    def freeze(self) -> int | None:
        """Hold this rank at its next boundary. Returns the step it will be held at, None when it has passed none in this cell."""
        with self._changed:
            if not self.steps:
                return None
            self._frozen = True
            return self.steps + 1

    def release(self, target: int | None) -> None:
        """Run on to step `target` and stop there; None gives the stop up (the rest of the ladder takes over)."""
        with self._changed:
            self._target, self._cancelled = target, target is None
            self._changed.notify_all()


step_boundary = StepBoundary()

# Called on a rank after a cell was interrupted, before anything else runs: strategies repair their wrappers here.
# Held weakly, so that a dropped model does not stay: keep the object that owns the method alive.
interrupt_hooks: WeakSet[Callable[[], None]] = WeakSet()
