"""The end of a cell that has reached what is spread over the ranks: it is brought together, and then comes home.

That takes all ranks at once, so each first says what it has (`nbdist.shipping.reaching`) and waits. When all have ended
the cell, their groups are put right if it was stopped or has failed, and each is told what is gathered. Where that
cannot be, the notebook keeps what it had, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.launchers import settling
from nbdist.launchers.failures import ranks_in_words
from nbdist.launchers.packing import LEFT, PACKING, PACKING_TOLD
from nbdist.launchers.stopping import Stop
from nbdist.shipping.errors import in_words
from nbdist.shipping.reaching import RANK_LOST

if TYPE_CHECKING:
    from nbdist.launchers.cell import CellRun


def gather(run: CellRun, stopped: bool) -> None:
    """Have the ranks that wait for it give back what the cell made. Nothing where none waits.

    Args:
        stopped: the cell was stopped or has failed.
    """
    waiting = [rank for rank, message in run.done.items() if message["reached"] is not None and rank in run.pool.alive]
    if not waiting:
        return
    which, left = _choose(run, waiting, stopped)
    run.owing.update(waiting)
    replaced = run.done[run.lead]["reached"].get("stand_for", ()) if run.lead in waiting else ()
    tokens = run.done[run.lead]["reached"]["tokens"] if which else []
    run.pool.send(waiting, "give", cell=run.number, which=which, left=left, replaced=replaced, tokens=tokens)
    _wait(run, bool(which), stopped)


def _choose(run: CellRun, waiting: list[int], stopped: bool) -> tuple[list[int], dict[int, str]]:
    """What is gathered, and why the rest of what has changed is not; by its place in what each rank told."""
    told = run.done[run.lead]["reached"] if run.lead in waiting else None
    if not told or not run.keeps_what_was_made():
        return [], {}
    reports = {rank: run.done[rank]["reached"] for rank in waiting}
    alike = [report for report in reports.values() if _alike(report, told)]
    changed = [place for place in range(len(told["sizes"])) if any(report["changed"][place] for report in alike)]
    if not changed:
        return [], {}
    reason = _obstacle(run, reports, len(alike)) or (settling.put_right(run, run.screen) if stopped else "")
    if reason:
        return [], dict.fromkeys(changed, reason)
    which: list[int] = []
    left: dict[int, str] = {}
    room = run.request.limit
    for parameters in (True, False):
        part = [place for place in changed if bool(told["parameters"][place]) is parameters]
        size = sum(told["sizes"][place] for place in part)
        if size <= room:
            which += part
            room -= size
        else:
            left.update(
                dict.fromkeys(part, f"{in_words(size)}, over the return limit of {in_words(run.request.limit)}")
            )
    return sorted(which), left


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Have two ranks the same tensors? One that was made anew on a rank, or whose token was lost, is taken for the
    other's in its place.
    """
    if one.get("signature") != other.get("signature"):
        return False
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    return all(mine == theirs or mine is None or theirs is None for mine, theirs in pairs)


def _obstacle(run: CellRun, reports: dict[int, dict[str, Any]], alike: int) -> str:
    size = run.pool.size
    if len(run.pool.alive) < size:
        return RANK_LOST
    out = [rank for rank in range(size) if rank not in run.done]
    if out:
        return f"{ranks_in_words(out)} {'is' if len(out) == 1 else 'are'} still busy"
    idle = [rank for rank in range(size) if rank not in run.ranks]
    if idle:
        return f"{ranks_in_words(idle)} did not run the cell"
    if len(reports) < size or alike < size:
        return "the ranks have not the same tensors"
    return ""


def _wait(run: CellRun, gathers: bool, stopped: bool) -> None:
    """Until all have given it. Stop leaves it with them."""
    presses, told = run.presses, False
    end_told = PACKING_TOLD

    def over() -> bool:
        return not run.owing & run.pool.alive or run.presses > presses

    if not run.pump(over, end_told) and not told:
        run.screen.notice("the cell's code has ended, and what it made is on its way; Stop leaves it there")
        run.pump(over, PACKING if stopped else None)
    if run.owing & run.pool.alive:
        waiting = sorted(run.owing & run.pool.alive)
        run.pool.send(waiting, "abandon")
        stop = Stop(run, packing=True, gathering=gathers)
        stop.descend(agree=False)
        if stop.cut:
            run.stop, run.put_right = stop, False
        run.left_there = True
        if run.lead in run.owing & run.pool.alive:  # else it tells what it has left
            run.screen.notice(LEFT)
