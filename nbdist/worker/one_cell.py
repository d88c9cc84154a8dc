"""One cell on a rank: what it reads is decoded, its code is run, and what it made is given back."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist import state
from nbdist.shipping import NeedsMore, Parcel, Unforeseen
from nbdist.shipping.link import Message
from nbdist.shipping.reaching import RANK_LOST
from nbdist.worker import failure, keyboard

if TYPE_CHECKING:
    from nbdist.worker.main import Rank


def run_cell(rank: Rank, message: Message) -> None:
    """From the parcel that came to the `done` that goes; what goes wrong is told in there."""
    cell = message.fields
    rank.agreed = rank.repaired = False
    rank.pending = None
    rank.postmortem.drop()
    rank.interrupts.begin()
    state.step_boundary.reset()
    rank.surroundings.told(cell["surroundings"])
    trouble = rank.surroundings.restore(cell["environment"])  # decoding imports what it finds on sys.path
    rank.interrupts.files.update(cell["cell_files"])
    received, extra = _receive(rank, message)
    if not received:
        return
    try:
        rank.away.commit()
    except Exception as error:  # this rank's own objects cannot take a change; the others run already
        _give_up(rank, cell, error)
        return
    if cell["edited"]:
        rank.call(state.edit_hooks)
    if not cell["runs"]:
        rank.away.begin((), (), lead=False)
        _done(rank, cell, None, rank.away.give(lead=False, ran=False))
        return
    value, ended, told = _run(rank, cell, extra, [trouble] if trouble else [])
    reached = _reach(rank, cell, value)
    parcel = None
    if reached is None:
        try:
            parcel = _give(rank, cell, value)
        except Unforeseen:
            reached = _reach(rank, cell, value)
    if parcel is None:
        # To bring together what is spread over the ranks, all must be there: the notebook says when.
        rank.pending = Pending(cell, value, ended)
        _done(rank, cell, told, Parcel(b""), reached=reached or {})
        return
    _end(rank, Pending(cell, value, ended), told, parcel)


@dataclass
class Pending:
    """A cell whose code has ended: what it was, what it returned, and what it raised."""

    cell: dict[str, Any]
    value: Any
    ended: BaseException | None


def give_what_is_pending(rank: Rank, message: Message) -> None:
    """The notebook has heard all ranks: what it names is brought together, and what the cell made is given back."""
    pending, rank.pending = rank.pending, None
    if pending is None or pending.cell["cell"] != message["cell"]:
        return
    cell, lead = pending.cell, rank.number == pending.cell["lead"]
    rank.interrupts.abandoned = False
    try:
        try:
            rank.interrupts.running = rank.interrupts.packing = True
            rank.away.gather(message["which"], message["left"], message["replaced"], message["tokens"], lead=lead)
        finally:
            rank.interrupts.pause()
    except BaseException as error:
        rank.away.leave(message["which"], _why_not_gathered(rank, error))
    _end(rank, pending, None, _give(rank, cell, pending.value), kind="given")


def _why_not_gathered(rank: Rank, error: BaseException) -> str:
    """In words. Between ranks of which one was lost or cut off the backend's own say little."""
    if rank.interrupts.abandoned or isinstance(error, KeyboardInterrupt):
        return "Stop came while it was brought together"
    import torch.distributed as dist

    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
        return RANK_LOST
    return f"{type(error).__name__}: {error}"


def _end(rank: Rank, pending: Pending, told: dict[str, Any] | None, parcel: Parcel, *, kind: str = "done") -> None:
    settings = rank.runner.settings()
    raised = _raised(rank, pending.cell, pending.ended) if pending.ended is not None else []
    pending.ended = None  # its traceback holds all that the cell's frames hold
    rank.runner.finish(pending.value)
    _done(rank, pending.cell, told, parcel, raised, settings, kind=kind)


def _reach(rank: Rank, cell: dict[str, Any], value: Any) -> dict[str, Any] | None:
    """What the cell has reached that is spread over the ranks."""
    try:
        try:
            rank.interrupts.running = rank.interrupts.packing = True
            lead = rank.number == cell["lead"]
            return rank.away.reach(lead=lead, only=cell["only"], hide=rank.runner.injected, extra=value)
        finally:
            rank.interrupts.pause()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        return None


def _receive(rank: Rank, message: Message) -> tuple[bool, Any]:
    """Decode what came, and wait until every rank has said that it could."""
    cell, extra = message.fields, None
    try:
        try:
            rank.interrupts.running = True
            extra = rank.away.receive(message.blob, message.files)
        finally:
            rank.interrupts.pause()
    except BaseException as error:
        rank.away.rollback()
        reason = "it was stopped" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        more = error.missing if isinstance(error, NeedsMore) else {}
        rank.link.send("received", cell=cell["cell"], error=reason, missing=more, whole=traceback.format_exc())
        if cell["trivial"]:  # nobody waits to hear it: the others run already
            _give_up(rank, cell, error)
        else:
            _wait_for_verdict(rank, cell)
        return False, None
    rank.link.send("received", cell=cell["cell"], error=None, missing={})
    if not cell["trivial"] and not _wait_for_verdict(rank, cell):
        rank.away.rollback()
        return False, None
    return True, extra


def _give_up(rank: Rank, cell: dict[str, Any], error: BaseException) -> None:
    """The cell ends on this rank before it has begun."""
    lead = rank.number == cell["lead"]
    told = failure.describe(error, rank.number, rank.interrupts.asked, rank.interrupts.is_cell_file)
    rank.away.begin((), (), lead=lead)
    # A rank that says it did not run gets everything anew.
    parcel = _give_nothing(rank, lead, ran=False)
    _done(rank, cell, told, parcel, _raised(rank, cell, error))


def _wait_for_verdict(rank: Rank, cell: dict[str, Any]) -> bool:
    while True:
        verdict = rank.inbox.get()
        if verdict.kind in ("go", "cancel") and verdict["cell"] == cell["cell"]:
            return verdict.kind == "go"


def _run(
    rank: Rank, cell: dict[str, Any], extra: Any, troubles: list[str]
) -> tuple[Any, BaseException | None, dict[str, Any] | None]:
    """What it returned, or what it raised and that in words."""
    rank.default_group.reopen()
    rank.output.install()
    keyboard.take_away()
    for line in [*troubles, *rank.away.troubles]:
        print(f"nbdist: rank {rank.number}: {line}", file=sys.stderr)
    rank.runner.prepare(cell)
    rank.away.begin(
        cell["stores"],
        [*cell["reads"], *cell.get("inject", ())],
        lead=rank.number == cell["lead"],
        again=cell.get("pull", ()),
    )
    value, told = None, None
    raised: BaseException | None = None
    rank.black_box.begin()
    try:
        try:
            rank.interrupts.start()
            value = rank.runner.run(cell, extra)
            rank.interrupts.handled = rank.interrupts.asked
        finally:
            rank.interrupts.end()
    except BaseException as error:
        rank.interrupts.end()
        raised = error
        told = failure.describe(error, rank.number, rank.interrupts.asked, rank.interrupts.is_cell_file)
        rank.postmortem.keep(error)
        if not rank.agreed:
            rank.repair()
    rank.call(state.cell_hooks)
    rank.black_box.end(cell["cell"])
    try:
        return value, raised, told
    finally:
        raised = None  # its traceback holds this frame: a circle, and with it all that the cell's frames hold


def _give(rank: Rank, cell: dict[str, Any], value: Any) -> Parcel:
    """What goes back; user code may run here (`__reduce__`), so it can be stopped, and may not end the rank."""
    lead = rank.number == cell["lead"]
    only, hide = cell["only"], rank.runner.injected
    try:
        try:
            rank.interrupts.running = rank.interrupts.packing = True
            return rank.away.give(lead=lead, limit=cell["limit"], only=only, hide=hide, extra=value)
        finally:
            rank.interrupts.pause()
    except Unforeseen:
        raise
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # the notebook tells of a Stop
            print(f"nbdist: rank {rank.number} gives nothing back: {error}", file=sys.stderr)
        if not isinstance(error, KeyboardInterrupt | MemoryError):
            traceback.print_exc()
        # Neither of these runs the user's code again.
        return _give_nothing(rank, lead, ran=True)


def _give_nothing(rank: Rank, lead: bool, ran: bool) -> Parcel:
    if not lead:
        return rank.away.give(lead=False, ran=ran, looks=False)
    return rank.away.give(lead=True, only=frozenset(), hide=rank.runner.injected)


def _raised(rank: Rank, cell: dict[str, Any], error: BaseException) -> list[Parcel]:
    """What ended the run, packed; the user's code may run here too."""
    try:
        try:
            rank.interrupts.running = rank.interrupts.packing = True
            return rank.away.raised(error, lead=rank.number == cell["lead"], limit=cell["limit"])
        finally:
            rank.interrupts.pause()
    except BaseException:  # the notebook has it in words
        return []


def _done(
    rank: Rank,
    cell: dict[str, Any],
    told: dict[str, Any] | None,
    parcel: Parcel,
    raised: Sequence[Parcel] = (),
    settings: Any = None,
    *,
    reached: dict[str, Any] | None = None,
    kind: str = "done",
) -> None:
    if kind == "done":
        rank.output.finish(cell["mark"])
    try:
        rank.link.send(
            kind,
            parcel.head,
            [*parcel.files, *(file for one in raised for file in one.files)],
            cell=cell["cell"],
            failure=told,
            reached=reached,
            raised=[(one.head, len(one.files)) for one in raised],
            settings=settings or {},
            asked=rank.interrupts.asked,
            handled=rank.interrupts.handled,
            repaired=rank.repaired,
            ran=cell["runs"],
            steps=state.step_boundary.made,
            stepping=state.step_boundary.stepping,
            groups=[tuple(group) for group in rank.groups.known()],  # plain: the notebook may not have torch
            group_count=rank.groups.count(),
            status=rank.groups.status() if told or rank.interrupts.asked else None,
        )
    finally:
        for one in (parcel, *raised):
            one.close()
