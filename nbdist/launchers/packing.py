"""Waiting for ranks whose code has ended, and which pack and send what it made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.launchers.stopping import Stop

if TYPE_CHECKING:
    from nbdist.launchers.cell import CellRun

PACKING = 10.0  # seconds after a Stop for ranks whose code has ended to send what it made
PACKING_PRESSED = 1.2  # ... when they were at it already as Stop was pressed
LEFT = (
    "what the cell made was left on the ranks: Stop came while it was on its way. The next cell finds it there, and "
    "`%distributed pull NAME` brings a name home"
)
PACKING_TOLD = 1.5  # seconds after which the user is told what is waited for


def let_them_pack(run: CellRun, patience: float | None) -> None:
    """Ranks whose code has ended send what it made. When Stop is pressed (again), or after so many seconds, it is
    left with them.
    """
    presses, told, end = run.presses, False, None if patience is None else time.monotonic() + patience
    while run.packing() and run.presses == presses:
        left = PACKING_TOLD if end is None else min(PACKING_TOLD, end - time.monotonic())
        if left <= 0:
            break
        done = run.pump(lambda: not run.packing() or run.presses > presses, left)
        if not done and not told and left == PACKING_TOLD:
            told = True
            run.screen.notice("the cell's code has ended, and what it made is on its way; Stop leaves it there")
    packing = run.packing()
    if packing:
        run.pool.send(packing, "abandon")
        Stop(run, packing=True).descend(agree=False)
        if run.lead in packing:
            run.left_there = True
            run.screen.notice(LEFT)
