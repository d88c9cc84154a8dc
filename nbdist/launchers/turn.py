"""Whose turn it is on a pool's ranks, and how another thread takes it over to end them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbdist.launchers.errors import RanksBusy, RanksEnded
from nbdist.launchers.reader import Event

if TYPE_CHECKING:
    from nbdist.launchers.pool import Pool

# seconds for another thread's cell to end when it is told, and once more when its ranks are killed
TAKE_OVER_LIMIT = 10.0


class Turn:
    """Of one pool.

    Attributes:
        ending: by what another thread ends these ranks, until that is told to who has the turn.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self.ending = ""

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """One cell at a time.

        Raises:
            RanksBusy: another thread has its turn.
        """
        if not self._lock.acquire(blocking=False):
            raise RanksBusy(
                f"another thread runs a cell on these {self._pool.options}: wait for it, or use another number of ranks"
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def take_over(self, by: str) -> Iterator[None]:
        """The turn, also where another thread has it: what it runs is stopped as by Stop, and ends with RanksEnded.

        Args:
            by: what does this, for that error's message.

        Raises:
            RanksBusy: the other thread does not come back, though its ranks were killed.
        """
        if not self._lock.acquire(blocking=False):
            self.ending = by
            try:
                if (reader := self._pool.reader) is not None:
                    reader.put_urgent(Event(-1, "ending"))
                if not self._lock.acquire(timeout=TAKE_OVER_LIMIT):
                    self._pool.kill(range(len(self._pool.pids)))
                    if not self._lock.acquire(timeout=TAKE_OVER_LIMIT):
                        raise RanksBusy(
                            f"the {self._pool.options} were killed, and the thread that runs a cell on them does not "
                            "end it"
                        )
            finally:
                self.ending = ""
        try:
            yield
        finally:
            self._lock.release()

    def keep_ending_to_yourself(self) -> None:
        """Who has the turn ends by itself now, and must not be disturbed: no RanksEnded from here on."""
        self.ending = ""

    def over(self) -> RanksEnded:
        """What who has the turn is told; once."""
        by, self.ending = self.ending, ""
        return RanksEnded(f"the {self._pool.options} were ended by {by} in another thread")
