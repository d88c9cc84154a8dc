"""Where output goes whose cell is over: to that cell, also while another one runs on the same ranks."""

from __future__ import annotations

import collections
import threading
from typing import Protocol

from nbdist.launchers.reader import Event

MOST_CELLS = 64  # that are remembered; of a cell before those it lands under the last one
MOST_HELD = 64 << 20  # letters and bytes that their screens keep, all together


class Late(Protocol):
    """Shows what a cell's ranks write after its end. Called by the thread that reads."""

    def __call__(self, event: Event) -> None: ...
    def settle(self) -> None:
        """Show what waits for more, now."""

    @property
    def held(self) -> int:
        """Letters and bytes that it keeps."""


class LateCells:
    """The late output of one pool's cells: a cell that was heard of least recently is forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: collections.OrderedDict[int, Late] = collections.OrderedDict()
        self._last: Late | None = None

    def follow(self, late: Late) -> None:
        """The cells that begin from now on have this one."""
        before, self._last = self._last, late
        if before is not None:
            before.settle()

    def begin(self, number: int) -> None:
        """A cell begins, with this number in what it writes."""
        if self._last is None:
            return
        gone = []
        with self._lock:
            self._cells[number] = self._last
            held = sum(late.held for late in self._cells.values())
            while len(self._cells) > MOST_CELLS or (held > MOST_HELD and len(self._cells) > 1):
                late = self._cells.popitem(last=False)[1]
                held -= late.held
                gone.append(late)
        for late in gone:
            late.settle()

    def __call__(self, event: Event) -> None:
        with self._lock:
            late = self._cells.get(event.cell, self._last)
            if event.cell in self._cells:
                self._cells.move_to_end(event.cell)
        if late is not None:
            late(event)

    def forget(self) -> None:
        """The ranks have ended: nothing more will come."""
        with self._lock:
            self._cells.clear()
