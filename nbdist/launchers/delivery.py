"""A cell with its shipment is handed to the ranks: nothing counts as known until every rank has decoded it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.launchers.errors import NotTakenOver
from nbdist.shipping import Shipment
from nbdist.shipping.link import Message

if TYPE_CHECKING:
    from nbdist.launchers.cell import CellRun


def send(run: CellRun, shipment: Shipment) -> None:
    """To every rank; those that do not run the cell decode what it reads."""
    request, pool = run.request, run.pool
    common = {
        **request.runs,
        "cell": run.number,
        "trivial": shipment.trivial,
        "edited": any(plan.updates for plan in shipment.plans),
        "reads": sorted(shipment.names),
        "stores": sorted(request.stores),
        "cell_files": request.files,
        "lead": run.lead,
        "ranks": tuple(run.ranks),
        "only": request.only,
        "limit": request.limit,
        "environment": dict(request.environment),
        "surroundings": pool.changed_surroundings(),
        "mark": pool.mark,
    }
    assert pool.reader is not None
    pool.late.begin(run.number)
    pool.reader.running = run.number
    try:
        for ranks, parcel in shipment.parcels:
            for rank in ranks:
                pool.send([rank], "cell", parcel.head, parcel.files, runs=rank in run.ranks, **common)
    finally:
        for _, parcel in shipment.parcels:
            parcel.close()
    if shipment.trivial:
        _commit(run, shipment)


def _commit(run: CellRun, shipment: Shipment) -> None:
    run.pool.home.commit(shipment)
    run.committed, run.sees = True, shipment.names


def wait_for_received(run: CellRun, shipment: Shipment, again: bool = False) -> BaseException | None:
    """Two steps: nothing counts as known until every rank has said that it decoded it."""
    if shipment.trivial:
        return None
    everyone = range(run.pool.size)
    run.pump(lambda: all(rank in run.received or rank not in run.pool.alive for rank in everyone), None)
    refused = {rank: error for rank, error in run.received.items() if error is not None}
    if refused or len(run.pool.alive) < run.pool.size:
        call_off(run, shipment)
        run.received.clear()
        if run.missing and len(run.pool.alive) == run.pool.size and not again:
            return _send_more(run, shipment)
        nothing_ran(run)
        if refused:
            rank = min(refused)
            return NotTakenOver(f"rank {rank} could not take over what the cell reads: {refused[rank]}")
        return None
    run.pool.send(everyone, "go", cell=run.number)
    _commit(run, shipment)
    return None


def _send_more(run: CellRun, shipment: Shipment) -> BaseException | None:
    """A rank has other content in an object of which only changes were sent: it gets all of it."""
    run.renumber()
    try:
        more = run.pool.home.again(shipment, run.missing)
    except Exception as error:  # no memory for it, for example
        nothing_ran(run)
        return error
    send(run, more)
    return wait_for_received(run, more, again=True)


def call_off(run: CellRun, shipment: Shipment) -> None:
    """No rank is to run what it was sent."""
    run.pool.send(range(run.pool.size), "cancel", cell=run.number)
    run.pool.home.rollback(shipment)


def nothing_ran(run: CellRun) -> None:
    """There is nothing to wait for: it is as if each rank had said so."""
    for rank in range(run.pool.size):
        run.done.setdefault(rank, _nothing_said())


def _nothing_said() -> Message:
    return Message(
        "done",
        {
            "failure": None,
            "raised": [],
            "reached": None,
            "settings": {},
            "asked": False,
            "handled": False,
            "repaired": False,
            "ran": None,
            "steps": 0,
            "stepping": False,
            "groups": [],
            "group_count": 0,
            "status": None,
        },
    )
