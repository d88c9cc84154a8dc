"""A pool: a set of live ranks that stay for the next cell."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbdist import system
from nbdist.config.cores import threads_for
from nbdist.launchers import finishing
from nbdist.launchers.client import Supervisor, SupervisorLost
from nbdist.launchers.descriptors import check_descriptors
from nbdist.launchers.devices import PoolOptions, who_is_there
from nbdist.launchers.errors import NotOnTheRanks, StartFailed
from nbdist.launchers.late import LateCells
from nbdist.launchers.reader import Event, Reader
from nbdist.launchers.request import RETURN_LIMIT
from nbdist.launchers.shield import shielded
from nbdist.launchers.starting import make_files, specs_of, surroundings, wait_for_ready
from nbdist.launchers.turn import Turn
from nbdist.shipping import Home, RankedValue, handle_facts
from nbdist.shipping.link import LinkClosed

ANSWER_LIMIT = 30.0  # seconds for an idle rank to answer a question


class Pool:
    """Live ranks, and the notebook's half of what they share.

    Args:
        options: how many ranks, on what.
        namespace: the notebook's; what comes back goes in here.
        supervisor: gives the current supervisor process.
    """

    _numbers = itertools.count(1)

    def __init__(self, options: PoolOptions, namespace: dict[str, Any], supervisor: Callable[[], Supervisor]) -> None:
        self.options, self.namespace = options, namespace
        self.name = f"pool{next(self._numbers)}-{secrets.token_hex(4)}"
        self.size = options.ranks
        self.home = Home(namespace, options.ranks, fetch=self._fetch)
        self.late = LateCells()
        self.threads, self.why_threads = 0, ""  # of each rank
        self.why = ""  # these ranks, on these devices: the reason of the choice
        self.pids: list[int] = []
        self.alive: set[int] = set()
        self.cells = 0  # run by these processes
        self.heals = 0  # of these processes
        self.apart = False  # what they have trained may be a step apart: it was said, and not put right so far
        self.unsettled: Any = None  # the cell after which the ranks must be looked after before the next one
        self.busy = False
        self.last_used = time.monotonic()
        self._supervisor = supervisor
        self._owner: Supervisor | None = None
        self._told: dict[str, Any] | None = None
        self._queries = itertools.count(1)
        self.turn = Turn(self)
        self.reader: Reader | None = None
        self.black_boxes: list[int] = []

    # ---------------------------------------------------------------- start and end

    @property
    def started(self) -> bool:
        return bool(self.pids)

    def start(self) -> None:
        """Fork the ranks and wait until each has said hello and joined the group.

        Raises:
            StartFailed: one could not; the message names it. No process is left behind.
        """
        check_descriptors(self.options)
        for last in (False, True):
            self._forget()
            owner = self._owner = self._supervisor()
            try:
                port = owner.up()["port"]
                with shielded():
                    self._fork(owner, port)
                wait_for_ready(self)
                return
            except BaseException as error:
                with shielded():
                    self.end(now=True)
                if last or not isinstance(error, StartFailed) or not owner.is_ending():
                    if isinstance(error, StartFailed) and (told := who_is_there(self.options)):
                        raise StartFailed(f"{error}{told}") from None
                    raise  # else the supervisor was just ending: another one

    def _fork(self, owner: Supervisor, port: int) -> None:
        self.mark = b"\0nbdist" + secrets.token_hex(8).encode() + b"\n"
        around = surroundings()
        threads, self.why_threads = threads_for(self.size, around["environment"])
        self.threads = threads
        specs = specs_of(self, port, around)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:  # ours are closed too where it fails
            try:
                links, pipes, boxes, files = make_files(self.size, ours, theirs)
                self.pids = owner.request("start", files, pool=self.name, specs=specs)["pids"]
            except (SupervisorLost, OSError) as error:
                raise StartFailed(f"cannot start {self.options}: {error}") from None
            ours.pop_all()
        self.black_boxes = boxes
        self.links = links
        self._handles = [system.Handle(pid) for pid in self.pids]
        self._told, self.cells, self.heals, self.unsettled, self.apart = around, 0, 0, None, False
        self.alive = set(range(self.size))
        self.reader = Reader(links, pipes, self.mark)
        self.reader.late = self.late

    def end(self, now: bool = False) -> None:
        """End every rank of this pool.

        Args:
            now: do not wait for what they have to finish (see `finishing`).
        """
        if not self.started:
            return
        try:
            if not now:
                finishing.finish(self)
        finally:
            self._end()

    def _end(self) -> None:
        if self._owner is not None and self._owner.alive:
            with contextlib.suppress(SupervisorLost):
                self._owner.request("end pool", pool=self.name)
        self._forget()

    def _forget(self) -> None:
        self.kill(range(len(self.pids)))
        if self._owner is not None and not self._owner.alive:  # nobody sweeps up what the ranks had started
            for pid in self.pids:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
        if self.reader is not None:
            self.reader.end()
            self.reader = None
            for link in self.links:
                link.close()
            for handle in self._handles:
                handle.close()
            for fd in self.black_boxes:
                os.close(fd)
        self.late.forget()
        self.pids, self.alive, self.unsettled = [], set(), None
        self.home.forget()

    # ---------------------------------------------------------------- talking to ranks

    def next_event(self, timeout: float) -> Event | None:
        """The next thing a rank says, None when the time is up. KeyboardInterrupt gets through.

        Raises:
            RanksEnded: another thread ends these ranks; once.
        """
        assert self.reader is not None
        event = None if self.turn.ending else self.reader.next(timeout)  # one that was taken is never dropped
        if self.turn.ending and (event is None or event.what == "ending"):
            raise self.turn.over()
        if event is None or event.what == "ending":
            return None
        if event.what == "closed" and event.value == "control":
            self.alive.discard(event.rank)
        return event

    def send(
        self, ranks: Iterable[int], kind: str, blob: bytes = b"", files: Sequence[int] = (), /, **fields: Any
    ) -> None:
        """To each of these ranks; one that is gone is passed over: the reader says so."""
        for rank in ranks:
            try:
                self.links[rank].send(kind, blob, files, **fields)
            except LinkClosed:
                continue

    def new_query(self) -> int:
        return next(self._queries)

    def ask(self, ranks: Iterable[int], kind: str, limit: float = ANSWER_LIMIT, /, **fields: Any) -> dict[int, Any]:
        """Ask idle ranks, and wait for their answers: {rank: message}; ranks that did not answer in time are
        missing.
        """
        assert self.reader is not None
        ranks, query = [rank for rank in ranks if rank in self.alive], self.new_query()
        answers: dict[int, Any] = {}
        self.reader.listening = True
        try:
            with shielded():
                self.send(ranks, kind, query=query, **fields)
            end = time.monotonic() + limit
            while any(rank not in answers and rank in self.alive for rank in ranks):
                event = self.next_event(end - time.monotonic())
                if event is None:
                    break
                if event.what == "control" and event.value.fields.get("query") == query:
                    answers[event.rank] = event.value
                elif event.what in ("text", "display"):
                    self.deliver_late(event)
        finally:
            self.reader.listening = False
        return answers

    def ask_aside(self, kind: str, limit: float) -> dict[int, Any]:
        """Ask the control thread of every rank, from any thread and while a cell runs: {rank: answer} of those that
        answer within `limit` seconds.
        """
        reader, ranks, query = self.reader, sorted(self.alive), self.new_query()
        answers: dict[int, Any] = {}
        if reader is None:
            return answers
        inbox = reader.asides[query] = queue.SimpleQueue()
        # A rank that does not read would hold us up here.
        threading.Thread(target=self.send, args=(ranks, kind), kwargs={"query": query}, daemon=True).start()
        end = time.monotonic() + limit
        try:
            while len(answers) < len(ranks):
                rank, answer = inbox.get(timeout=max(0.0, end - time.monotonic()))
                answers[rank] = answer
        except queue.Empty:
            pass
        finally:
            del reader.asides[query]
        return answers

    def changed_surroundings(self) -> dict[str, Any] | None:
        """The notebook's surroundings when they are not what the ranks were told last, else None."""
        now = surroundings()
        if now == self._told:
            return None
        self._told = now
        return now

    def deliver_late(self, event: Event) -> None:
        """What was taken from the reader, and no cell runs that would show it."""
        self.late(event)

    # ---------------------------------------------------------------- signals

    def lives(self, rank: int) -> bool:
        """Its process has not ended."""
        return not self._handles[rank].ended()

    def notice_ends(self) -> None:
        """A rank whose process has ended is not alive, also when the end of its socket has not been read yet."""
        self.alive = {rank for rank in self.alive if self.lives(rank)}

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """To these processes alone: a number that was given to another process in between is never hit."""
        for rank in ranks:
            self._handles[rank].signal(number)

    def signal_groups(self, ranks: Iterable[int], number: int) -> None:
        """To the process groups of these ranks, as a terminal does: DataLoader workers and `os.system` need that."""
        for rank in ranks:
            if self.lives(rank):
                with contextlib.suppress(OSError):
                    os.killpg(self.pids[rank], number)

    def kill(self, ranks: Iterable[int]) -> None:
        self.signal(ranks, signal.SIGKILL)

    def exit_codes(self) -> list[int | None]:
        """How the ranks ended: None while alive, negative for a signal."""
        if self._owner is None or not self._owner.alive:
            return [None] * self.size
        try:
            return self._owner.request("exit codes", pool=self.name)["codes"]
        except SupervisorLost:
            return [None] * self.size

    # ---------------------------------------------------------------- looking at what ranks hold

    def peek(self, name: str, ranks: Sequence[int], attributes: tuple[str, ...] = ()) -> list[Any]:
        """The value of a name on each of these ranks, as copies.

        Raises:
            NotOnTheRanks: the ranks are gone, or one is busy.
            NameError: a rank has no such name.
        """
        if not self.alive or self.busy:
            state = "a cell is running on them" if self.busy else "they have ended"
            raise NotOnTheRanks(f"cannot read {name!r} from the ranks: {state}")
        what = {"name": name, "attributes": list(attributes)}
        answers = self.ask(ranks, "peek", whole=False, asks=True, **what)
        if any(answer["answer"] is not None for answer in answers.values()):
            answers = self._peek_whole(ranks, what)
        missing = [rank for rank in ranks if rank not in answers]
        if missing:
            raise NotOnTheRanks(
                f"cannot read {name!r}: rank {', '.join(map(str, missing))} did not answer within {ANSWER_LIMIT:.0f} s"
            )
        from nbdist.shipping import Parcel

        return [self.home.unpack(Parcel(answers[rank].blob, answers[rank].files)) for rank in ranks]

    def _peek_whole(self, ranks: Sequence[int], what: dict[str, Any]) -> dict[int, Any]:
        """Of a value that is spread over the ranks: all of it where they have the same and it is not too much."""
        told = self.ask(range(self.size), "peek", whole=False, asks=True, **what)
        reports = [answer["answer"] for answer in told.values() if answer["answer"] is not None]
        alike = len(reports) == self.size and len({report["signature"] for report in reports}) == 1
        in_order = self.unsettled is None or self.unsettled.put_right
        whole = alike and in_order and sum(reports[0]["sizes"]) <= RETURN_LIMIT
        if not whole:
            return self.ask(ranks, "peek", whole=False, asks=False, **what)
        return self.ask(range(self.size), "peek", whole=True, asks=False, **what)

    def _fetch(self, handle: RankedValue, attributes: tuple[str, ...]) -> Any:
        return self.peek(handle_facts(handle).key, [0], attributes)[0]
