"""Saves behind a training loop: one at a time, in a thread of its own.

The thread runs no collective, so it meets no one in them, and a Stop, an error or the end of the cell that began the
save leave it alone. It works for that cell: what it prints is shown there.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdist import state
from nbdist.checkpoint.staging import Staging


class Background:
    """The last save that was given to it, and the memory with the copies that it writes.

    Where a script ends, its last save is finished first; ranks of a notebook that are to end get some time for it.
    """

    def __init__(self) -> None:
        self._staging = Staging()
        self._last: _Save | None = None

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """The tensors' values as they are now: see `Staging.copy`. Waits for the last save, whose copies are written
        over; its failure is raised by `join`, not here.
        """
        if self._last is not None:
            self._last.done.wait()
        return self._staging.copy(tensors)

    def start(self, what: str, work: Callable[[], None], aloud: bool = True) -> None:
        """Begin a save: `work` is called in a thread. There is none under way: `join` before.

        Args:
            what: the checkpoint's name, for the line that says that it is done.
            aloud: whether that line is printed.
        """
        self._last = _Save(what, work, aloud)
        state.unfinished.add(self._last)  # also where nobody holds the Accelerator any more
        self._last.thread.start()

    @property
    def what(self) -> str | None:
        """The name of the last save, until its end was waited for."""
        return None if self._last is None else self._last.what

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._last is not None and not self._last.done.is_set()

    def join(self, limit: float | None = None) -> BaseException | None:
        """Wait for the last save, and forget how it went.

        Args:
            limit: at most so many seconds. Default: to its end.

        Returns:
            Its failure, once; None when it is done and well.

        Raises:
            TimeoutError: it is still under way.
        """
        last = self._last
        if last is None:
            return None
        if not last.done.wait(limit):
            raise TimeoutError(f"the checkpoint {last.what} is still being saved after {limit:g} s")
        self._last, last.told = None, True
        return last.error

    def forget(self) -> None:
        """Give the memory of the copies back, if it is not in use."""
        if not self.busy:
            self._staging.forget()


class _Save:
    """One save, and the thread that does it."""

    def __init__(self, what: str, work: Callable[[], None], aloud: bool) -> None:
        self.what, self.aloud = what, aloud
        self._work: Callable[[], None] | None = work
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.told = False
        # No daemon: where the interpreter ends, it waits for the save.
        self.thread = threading.Thread(target=self._run, name="nbdist-save", daemon=False)

    def _run(self) -> None:
        began = time.monotonic()
        work, self._work = self._work, None
        try:
            assert work is not None
            work()
        except BaseException as error:
            self.error = error
            _untold.add(self)
            # Now, and not only when somebody asks: that may be hours later, or never.
            print(
                f"nbdist: {self.what} could not be saved: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
        else:
            if self.aloud:
                print(f"saved {self.what} in {time.monotonic() - began:.1f} s", flush=True)
        finally:
            work = None  # it holds the copies
            self.done.set()
            state.unfinished.discard(self)

    def finish(self, limit: float | None = None) -> bool:
        """Wait, at most so many seconds; returns whether it is over."""
        return self.done.wait(limit)


_untold: weakref.WeakSet[_Save] = weakref.WeakSet()


@atexit.register
def _tell() -> None:
    """A script whose last save failed, and that has not asked, says so as the last thing."""
    for save in [save for save in _untold if not save.told]:
        print(f"nbdist: the last save, {save.what}, failed: {save.error}", file=sys.stderr, flush=True)
