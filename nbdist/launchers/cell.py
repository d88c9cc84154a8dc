"""One cell on a pool: sent, run, watched, stopped when need be, and its results put where they belong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbdist.launchers import delivery, failures, gathering, stalls
from nbdist.launchers.errors import CellTimeout, RanksEnded, RanksWaitForEachOther
from nbdist.launchers.left import Left
from nbdist.launchers.packing import PACKING, PACKING_PRESSED, let_them_pack
from nbdist.launchers.pool import Pool
from nbdist.launchers.reader import Event
from nbdist.launchers.request import Request, Result, Screen
from nbdist.launchers.shield import on_press
from nbdist.launchers.stopping import RESYNC, Stop, steps_apart
from nbdist.shipping import Arrival, Parcel, Shipment
from nbdist.shipping.link import Message

GRACE_AFTER_FAILURE = 0.3  # seconds for the other ranks to fail by themselves, before they are interrupted
MARKS = 3  # pipes of a rank, each with a mark at the end of a cell
OUTPUT_LIMIT = 1.0  # seconds without any output for the marks to come, after the last rank is done
DROPPED_TOLD = 4096  # bytes of dropped text above which that is worth a word
DRAIN = 0.05  # seconds for what had come before a limit


class CellRun:
    """A running cell. Use `run_cell`."""

    _numbers = itertools.count(1)

    def __init__(self, pool: Pool, request: Request, screen: Screen) -> None:
        self.pool, self.request, self.screen = pool, request, screen
        self.renumber()
        self.ranks = list(range(pool.size)) if request.ranks is None else list(request.ranks)
        self.lead = min(self.ranks)
        self.received: dict[int, str | None] = {}
        self.missing: dict[Any, str] = {}  # what ranks need more than the shipment has
        self.done: dict[int, Message] = {}
        self.owing: set[int] = set()  # of these, those that are giving back what they have not yet
        self.left_there = False  # what it made, or a part of it: Stop came while it was on its way
        self.put_right = False  # the groups, after a Stop or a failure
        self.raised: dict[int, list[Parcel]] = {}  # the exceptions of the ranks that failed
        self.marks: dict[int, int] = {}
        self.died_at: dict[int, float] = {}
        self.answers: dict[int, dict[int, Any]] = {}
        self.stop: Stop | None = None
        self.sees: frozenset[str] = frozenset()  # names whose values it was sent, or has from before
        self.arrival: Arrival | None = None
        self.committed = False
        self.shown = 0  # pieces of text
        self.dropped = 0  # bytes of text that are not shown
        self.presses = 0  # of the stop button
        self.stoppable = True
        self.accepted = False
        self.over = False

    def renumber(self) -> None:
        """What ranks say of it from here on has another number than what they said before."""
        self.number = next(self._numbers)

    # ---------------------------------------------------------------- what has happened

    def running(self) -> list[int]:
        return [rank for rank in self.ranks if self._owes(rank) and rank in self.pool.alive]

    def _owes(self, rank: int) -> bool:
        return rank not in self.done or rank in self.owing

    def in_code(self) -> list[int]:
        """Ranks that still run the cell's code, or have not begun."""
        return [rank for rank in self.running() if not self._code_has_ended(rank)]

    def packing(self) -> list[int]:
        """Ranks whose code has ended, and whose results are still on their way."""
        return [rank for rank in self.running() if self._code_has_ended(rank)]

    def _code_has_ended(self, rank: int) -> bool:
        return failures.code_has_ended(self.pool.black_boxes[rank], self.number)

    def _outstanding(self) -> list[int]:
        """All ranks that owe a `done`, those that only decode included."""
        return [rank for rank in range(self.pool.size) if self._owes(rank) and rank in self.pool.alive]

    def _someone_failed(self) -> bool:
        return bool(self.died_at) or any(message["failure"] for message in self.done.values())

    def handle(self, event: Event) -> None:
        if event.what == "text":
            self.shown += 1
            self.screen.text(event.rank, event.stream, event.value)
        elif event.what == "control":
            self._handle_message(event.rank, event.value)
        elif event.what == "display":
            self.screen.display(event.rank, event.value)
        elif event.what == "mark":
            self.marks[event.rank] = self.marks.get(event.rank, 0) + 1
        elif event.what == "dropped":
            self.dropped += event.value
        elif event.what == "pressed":
            if self.stoppable:
                self.stoppable = False
                raise KeyboardInterrupt
        elif event.what == "closed" and event.value == "control":
            self.died_at.setdefault(event.rank, time.monotonic())

    def _handle_message(self, rank: int, message: Message) -> None:
        kind = message.kind
        if kind == "received" and message["cell"] == self.number:
            self.received[rank] = message["error"]
            self.missing.update(message["missing"])
        elif kind == "done" and message["cell"] == self.number:
            self.done[rank] = message
            self._take_raised(rank, message)
        elif kind == "given" and message["cell"] == self.number:
            self._take_given(rank, message)
        elif "query" in message.fields:
            self.answers.setdefault(message["query"], {})[rank] = message["answer"]
        elif kind == "trouble":
            self.screen.notice(f"a fault of nbdist itself on rank {rank}, please report it:\n{message['whole']}")

    def _take_given(self, rank: int, message: Message) -> None:
        """What it made, in the place of nothing; how the cell went it had told before."""
        first = self.done[rank].fields
        own = {"raised": message["raised"], "settings": message["settings"], "reached": None}
        self.done[rank] = Message("done", {**first, **own}, message.blob, message.files)
        self.owing.discard(rank)
        self._take_raised(rank, self.done[rank])

    def _take_raised(self, rank: int, message: Message) -> None:
        for head, count in reversed(message["raised"]):
            files = [message.files.pop() for _ in range(count)][::-1]
            self.raised.setdefault(rank, []).insert(0, Parcel(head, files))
        if self.over:
            self._close_raised()

    def _close_raised(self) -> None:
        for parcels in self.raised.values():
            for parcel in parcels:
                parcel.close()
        self.raised.clear()

    def pump(self, until: Callable[[], bool], limit: float | None) -> bool:
        """Handle what the ranks say until the condition holds (True) or the time is up (False)."""
        end = None if limit is None else time.monotonic() + limit
        while not until():
            wait = 0.1 if end is None else min(0.1, end - time.monotonic())
            if wait <= 0:
                # What is there already still counts, but not for ever: a flood of output has no end.
                event = self.pool.next_event(0) if end is None or time.monotonic() < end + DRAIN else None
                if event is None:
                    return until()
                self.handle(event)
                continue
            event = self.pool.next_event(wait)
            if event is not None:
                self.handle(event)
            else:
                self.screen.tick()
            if self.pool.reader is not None:
                self.pool.reader.hold(self.screen.ahead)
        return True

    def ask(self, ranks: Sequence[int], kind: str, limit: float, /, **fields: Any) -> dict[int, Any]:
        """Ask ranks whose main thread may be stuck; {rank: answer} of those that answered in time."""
        query = self.pool.new_query()
        self.pool.send(ranks, kind, query=query, **fields)
        self.pump(lambda: all(rank in self.answers.get(query, ()) for rank in ranks), limit)
        return self.answers.pop(query, {})

    def where(self, limit: float, others: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
        """Where the running ranks are, and others. One that does not answer is in native code that holds the
        interpreter.
        """
        asked = [*self.running(), *others]
        answers = self.ask(asked, "where", limit)
        return {rank: answers.get(rank, {"line": None, "waits": None, "silent": True}) for rank in asked}

    # ---------------------------------------------------------------- running

    def run(self, shipment: Shipment) -> Result:
        pool = self.pool
        assert pool.reader is not None
        interrupted, trouble = False, None
        pool.reader.dropping = False
        pool.reader.listening, pool.busy = True, True
        try:
            with on_press(self._pressed):
                try:
                    delivery.send(self, shipment)
                    trouble = delivery.wait_for_received(self, shipment)
                    if trouble is None:
                        trouble = self._wait_for_done()
                except KeyboardInterrupt:
                    interrupted = True
                except RanksEnded as error:
                    trouble = error.with_traceback(None)  # where it met us says nothing
                self.stoppable = False
                pool.turn.keep_ending_to_yourself()
                result = self._end(shipment, interrupted, trouble)
            if self.presses and not (result.interrupted or result.handled) and result.error is None:
                result.interrupted = result.had_ended = True  # Run All stops all the same
                result.left_there = self.left_there
            return result
        finally:
            pool.busy = False
            pool.cells += 1
            if pool.reader is not None:
                pool.reader.listening, pool.reader.running = False, 0
                pool.reader.hold(frozenset())
                self._pass_on()
            pool.last_used = time.monotonic()

    def _pressed(self) -> None:
        """The stop button, in a signal handler: what it does may be done there, and wakes `pump`."""
        self.presses += 1
        if self.pool.reader is not None:
            self.pool.reader.drop_what_is_too_much()
            self.pool.reader.put_urgent(Event(-1, "pressed"))

    def _pass_on(self) -> None:
        """What came between the last look and the end: nobody would see it before the next cell."""
        while (event := self.pool.next_event(0)) is not None:
            if event.what in ("text", "display"):
                self.pool.deliver_late(event)
            else:
                self.handle(event)

    def _wait_for_done(self) -> BaseException | None:
        request = self.request
        end = time.monotonic() + request.timeout if request.timeout else None
        watch, left = stalls.Watch(request.stall_limit), Left()
        while True:
            gone = len(self.done)
            limit = min(watch.next_look(), left.next_look(bool(gone)))
            limit = limit if end is None else min(limit, end - time.monotonic())
            self.pump(partial(self._has_news, gone), max(0.0, limit))
            if not self._outstanding() or self._someone_failed():
                break
            if end is not None and time.monotonic() >= end:
                places = self.where(0.2)
                self._stop(agree=True)
                return CellTimeout(f"stopped after its --timeout of {request.timeout:g} s: {stalls.tell(places)}")
            if self.done and not left.next_look(True):
                hopeless = self._waits_in_vain(left)
                if hopeless:
                    self._stop(agree=False)
                    return RanksWaitForEachOther(hopeless)
            if watch.next_look():
                continue
            verdict = watch.look(self.where(0.3), self.done)
            if verdict.hopeless:
                self._stop(agree=False)
                return RanksWaitForEachOther(verdict.line)
            if verdict.line:
                self.screen.notice(verdict.line)
        if self._outstanding():  # one failed: the others may wait for it for ever
            self.pump(lambda: not self._outstanding(), GRACE_AFTER_FAILURE)
            self.stoppable = False  # the error is raised, whatever is pressed from here on
            if self.in_code():
                self._stop(agree=False)
            else:
                let_them_pack(self, None)
        return None

    def _has_news(self, gone: int) -> bool:
        """Whether it is over, or more ranks than these have left."""
        return not self._outstanding() or self._someone_failed() or len(self.done) > gone

    def _waits_in_vain(self, left: Left) -> str:
        """What to say when ranks wait for one that has left the cell; usually nothing."""
        gone = [rank for rank in self.done if rank in self.pool.alive]
        places = self.where(0.3, gone)
        running = {rank: place for rank, place in places.items() if rank not in self.done}
        groups: dict[str, set[int]] = {}
        for message in self.done.values():
            for name, members in message["groups"]:
                groups.setdefault(name, set()).update(members)
        missed = left.look(running, {rank: place for rank, place in places.items() if rank in gone}, groups)
        return stalls.cannot_go_on(running, missed, self.ranks) if missed else ""

    def _stop(self, agree: bool) -> None:
        self.stoppable = False
        patience = PACKING if self.in_code() else PACKING_PRESSED
        self.stop = Stop(self)
        if self.pool.reader is not None:
            self.pool.reader.drop_what_is_too_much()
        self.stop.descend(agree)
        let_them_pack(self, patience)
        self.pump(lambda: not self._outstanding(), 0.0)

    # ---------------------------------------------------------------- the end

    def _end(self, shipment: Shipment, interrupted: bool, trouble: BaseException | None) -> Result:
        pool = self.pool
        ended = isinstance(trouble, RanksEnded)
        if interrupted or ended:
            if not self.committed:
                delivery.call_off(self, shipment)
                delivery.nothing_ran(self)
                self.stop = Stop(self)
                self.stop.rung = "interrupt"
            elif self.stop is None:
                self._stop(agree=not self._someone_failed())
        self._show_the_rest(patient=not self._outstanding() and self.stop is None)
        gathering.gather(self, stopped=interrupted or trouble is not None or self._someone_failed())
        self.screen.finish()
        if self.dropped > DROPPED_TOLD:
            self.screen.notice(f"stopped: {self.dropped / 1e6:.1f} MB that the ranks had written are not shown")
        self.accept()
        failure = self._failure(interrupted)
        cut = self.stop is not None and self.stop.cut
        if self._outstanding() or failure is not None or interrupted or trouble is not None or self.died_at or cut:
            pool.unsettled = self
        notes = [*shipment.notes, *(self.arrival.notes if self.arrival is not None else ())]
        error = trouble
        if error is None and failure is not None and not interrupted:
            first = self.raised.pop(failure.first["rank"], []) if failure.first is not None else []
            error = failures.raisable(failure, self.request.files, pool.home.raised(first) if first else None)
        apart = steps_apart(self.done)
        if error is not None and apart:
            error.add_note(f"{apart}, so what they trained may be a step apart: {RESYNC}")
        pool.apart = pool.apart or bool(apart) or (interrupted and self.stop is not None and self.stop.apart())
        self.over = True
        self._close_raised()
        if ended and self.arrival is not None and error is not None:
            error.add_note("what rank 0 had made until then is in the notebook")
        settings = self.done[self.lead]["settings"] if self.lead in self.done else {}
        result = Result(self.arrival, error, failure, self.stop, notes, dict(shipment.left_out), interrupted, settings)
        if interrupted and failure is None and len(self.handled()) == len(self.ranks):
            result.interrupted, result.handled = False, True
            if apart := steps_apart(self.done):
                notes.append(f"Stop: the cell handled it and ran to its end on every rank; {apart}: {RESYNC}")
        return result

    def handled(self) -> list[int]:
        """Ranks on which the code was run to its end; none where no rank had heard of a Stop by then."""
        ended = {rank: message for rank, message in self.done.items() if message["ran"] and not message["failure"]}
        return sorted(ended) if any(message["handled"] for message in ended.values()) else []

    def _show_the_rest(self, patient: bool) -> None:
        """Show what the ranks wrote, up to the marks that end it. After a Stop there is no time for all of it."""
        ended = [rank for rank in self.done if self.done[rank]["ran"] is not None]

        def complete() -> bool:
            return all(self.marks.get(rank, 0) >= MARKS for rank in ended if rank in self.pool.alive)

        if not patient:
            if not self.pump(complete, 0.1):
                self._drop_the_rest()
            return
        seen = -1
        while not self.pump(complete, OUTPUT_LIMIT) and seen != self.shown:
            seen = self.shown  # as long as something comes

    def _drop_the_rest(self) -> None:
        while (event := self.pool.next_event(0)) is not None:
            if event.what == "text":
                self.dropped += len(event.value)
            elif event.what != "display":
                self.handle(event)

    def accept(self) -> None:
        """Put the results in place, once the lead rank has sent them."""
        message = self.done.get(self.lead)
        if self.accepted or message is None or message["ran"] is None or message["reached"] is not None:
            return
        self.accepted = True
        if not self.keeps_what_was_made():
            return
        reports = {
            rank: other.blob
            for rank, other in self.done.items()
            if rank != self.lead and other["ran"] is not None and other["reached"] is None
        }
        self.arrival = self.pool.home.accept(Parcel(message.blob, message.files), reports, lead=self.lead)

    def keeps_what_was_made(self) -> bool:
        return self.request.keep_after_error or bool(self.presses) or not self._someone_failed()

    def _failure(self, interrupted: bool) -> failures.Failure | None:
        told = [message["failure"] for message in self.done.values() if message["failure"]]
        died: dict[int, tuple[int | None, dict[str, Any]]] = {}
        if self.died_at:
            codes = self._exit_codes()
            for rank in self.died_at:
                died[rank] = (codes[rank], failures.read_black_box(self.pool.black_boxes[rank]))
        return failures.choose(told, died, self.died_at)

    def _exit_codes(self) -> list[int | None]:
        """A process that closed its socket is ending: wait a moment for the code."""
        end = time.monotonic() + 0.5
        while True:
            codes = self.pool.exit_codes()
            if all(codes[rank] is not None for rank in self.died_at) or time.monotonic() > end:
                return codes
            time.sleep(0.02)


def run_cell(pool: Pool, request: Request, screen: Screen) -> Result:
    """Run one cell on a pool that is settled.

    Raises:
        CannotShip, NotEnoughMemory: before anything started. What went wrong on the ranks is in the result.
    """
    shipment = pool.home.ship(
        request.reads, maybe=request.maybe, deletes=request.deletes, running=request.ranks, extra=request.extra
    )
    return CellRun(pool, request, screen).run(shipment)
