"""The ladder by which a running cell is stopped: from asking at a step boundary to leaving a native call to itself.

Each rung waits a little for the ranks to end the cell; the whole takes 1.6 s at most, whatever they are in. Nothing
is killed here: a rank that is
still in native code is left, and only replaced when the next cell needs it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.launchers.failures import ranks_in_words
from nbdist.shipping.link import Message
from nbdist.shipping.wire import HARD_SIGNAL

if TYPE_CHECKING:
    from nbdist.launchers.cell import CellRun

WHOLE = 1.6  # seconds from the press until the cell is back
AGREED = 0.8  # of these, for the ranks to meet at a step boundary
AT_REST = 0.3  # ... when none of them is in the middle of a step: there may be no more
AFTER_SIGNAL = 0.25
AFTER_CUT = 0.2
AFTER_HARD_SIGNAL = 0.15
FOR_AN_ANSWER = 0.1


def in_step(told: Sequence[Message]) -> bool:
    """Every group stands at the same collective on every rank, with nothing in flight; `told`: their `done`
    messages.
    """
    statuses = [message["status"] for message in told]
    if any(status is None or not status["known"] or status["point to point"] for status in statuses):
        return False
    groups = [status["groups"] for status in statuses]
    if not groups:  # nothing ran
        return True
    return all(one == groups[0] for one in groups) and all(begun == ended for begun, ended in groups[0].values())


def steps_apart(done: Mapping[int, Message]) -> str:
    """What is to be said of ranks whose prepared optimizers have not made the same steps in a cell; "" if they have.

    Args:
        done: {rank: what it told at its end}.
    """
    ran = {rank: message for rank, message in sorted(done.items()) if message["ran"]}
    made: dict[int, list[int]] = {}
    for rank, message in ran.items():
        made.setdefault(message["steps"], []).append(rank)
    inside = [rank for rank, message in ran.items() if message["stepping"] and message["asked"]]
    if len(ran) < 2 or (len(made) < 2 and not inside):
        return ""
    told = []
    if len(made) > 1:
        counts = [f"{steps} on {ranks_in_words(ranks)}" for steps, ranks in made.items()]
        told.append(f"optimizer steps made in this cell: {', '.join(counts)}")
    if inside:
        told.append(f"cut off inside an optimizer step: {ranks_in_words(inside)}")
    return "; ".join(told)


RESYNC = "`%distributed resync` writes rank 0's over the others"


def _idle(status: dict[str, Any] | None) -> bool:
    """No collective was ever begun here; also for a rank that ended by itself, of which nothing is asked."""
    if status is None:
        return True
    groups = status["groups"].values()
    return bool(status["known"]) and not status["point to point"] and not any(begun > 0 for begun, _ in groups)


class Stop:
    """One way down the ladder.

    Attributes:
        rung: what ended the last rank: "agreed", "interrupt", "cut", "store", "trace", or "left" when a rank is
            still running.
        cut: sockets were shut down, so the groups must be healed.
        places: where the ranks were that did not end by the interrupt.
    """

    def __init__(self, run: CellRun, packing: bool = False, gathering: bool = False) -> None:
        """
        Args:
            packing: also ranks whose code has ended; what they were about to send then stays with them.
            gathering: they wait for each other.
        """
        self.run = run
        self._ranks = run.running if packing else run.in_code
        self._packing = packing and not gathering
        self.rung = "left"
        self.cut = False
        self.agreed_on: int | None = None
        self.places: dict[int, dict[str, Any]] = {}
        self._start = time.monotonic()

    def apart(self) -> bool:
        """The ranks may have ended at different steps: they had, or they stand at different collectives."""
        told = [message for message in self.run.done.values() if message["ran"]]
        if not any(message["failure"] for message in told) and not self.run.running():
            return False  # every rank had run the cell to its end
        if steps_apart(self.run.done):
            return True
        if any(message["steps"] for message in told):
            return False  # prepared optimizers count: all ranks have made the same steps, wherever they are now
        if all(_idle(message["status"]) for message in told):
            return False  # no rank has talked to another
        return not in_step(told)

    def _left(self) -> float:
        return WHOLE - (time.monotonic() - self._start)

    def _wait(self, limit: float, rung: str) -> bool:
        self.run.pump(lambda: not self._ranks(), min(limit, max(0.0, self._left())))
        if not self._ranks():
            self.rung = rung
            return True
        return False

    def descend(self, agree: bool) -> None:
        """Args: agree: start with the agreed stop; not when a rank has failed, since there is no step to agree on."""
        run, pool = self.run, self.run.pool
        if not self._ranks():
            self.rung = "interrupt"
            return
        if agree and self._agree():
            return
        pool.signal_groups(self._ranks(), signal.SIGINT)
        if self._wait(AFTER_SIGNAL, "interrupt"):
            return
        self.places = run.where(FOR_AN_ANSWER)
        self._cut(store=False)
        if self._wait(AFTER_CUT, "cut"):
            return
        self._cut(store=True, more=self._between_waiting_ranks(FOR_AN_ANSWER))
        pool.signal_groups(self._ranks(), signal.SIGINT)
        if self._wait(AFTER_SIGNAL, "store"):
            return
        # Again and again: one that meets the rank on its way into a blocking call, or another thread of it, is noted
        # by Python and wakes nobody.
        while self._left() > 0:
            pool.signal(self._ranks(), HARD_SIGNAL)
            if self._wait(AFTER_HARD_SIGNAL, "trace"):
                return

    def once_more(self, limit: float) -> bool:
        """Later: is a rank still there that waits in a collective? Then it is cut from the others again. Python code
        gets the hard signal again.

        Args: limit: seconds for the ranks to answer; on a machine that was too busy, they had not before.
        """
        self.run.pool.signal(self._ranks(), HARD_SIGNAL)
        self.places = self.run.where(limit)
        more = self._between_waiting_ranks(limit)
        if more:
            self._cut(store=True, more=more)
        return bool(more)

    def _cut(self, store: bool, more: frozenset[tuple[int, int]] = frozenset()) -> None:
        if self._packing:  # such a rank waits for nobody, and its groups are whole
            return
        self.cut = True
        self.run.pool.send(self._ranks(), "cut", query=self.run.pool.new_query(), store=store, more=more)

    def _between_waiting_ranks(self, limit: float) -> frozenset[tuple[int, int]]:
        """(local port, remote port) of what connects two ranks of the pool, where one still waits in a collective.

        For connections that the ranks did not note when their groups were made. One of the user's own between two
        ranks is among them, which is why this comes late.
        """
        if self._packing or not any(self.places.get(rank, {}).get("waits") for rank in self._ranks()):
            return frozenset()
        told: dict[int, set[tuple[int, int]]] = self.run.ask(sorted(self.run.pool.alive), "connections", limit)
        return frozenset(
            (local, remote)
            for rank, mine in told.items()
            for local, remote in mine
            if any((remote, local) in theirs for other, theirs in told.items() if other != rank)
        )

    def _agree(self) -> bool:
        run = self.run
        running = self._ranks()
        answers = run.ask(running, "freeze", FOR_AN_ANSWER)
        told = [answers.get(rank, (None, False)) for rank in running]
        steps = [step for step, _ in told]
        if running != run.ranks or any(step is None for step in steps):
            run.pool.send(running, "release", target=None)
            return False
        self.agreed_on = max(step for step in steps if step is not None)
        run.pool.send(running, "release", target=self.agreed_on)
        if self._wait(AGREED if any(coming for _, coming in told) else AT_REST, "agreed"):
            return True
        self.agreed_on = None
        run.pool.send(self._ranks(), "release", target=None)
        return False
