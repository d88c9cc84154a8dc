"""`%debug` after a cell that failed on the ranks: pdb on the frames of the rank that failed first.

A rank keeps its exception until its next cell. The commands are typed here and run there; the notebook's own debugger
would only find the frames of the call.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from nbdist.launchers.errors import RanksBusy
from nbdist.launchers.failures import Failure
from nbdist.launchers.pool import Pool
from nbdist.launchers.shield import shielded

FIRST_ANSWER = 5.0  # seconds for an idle rank to say whether it has the frames
SIGNAL_AGAIN = 0.3  # seconds between two interrupts of one command
AFTER_STOP = 1.5  # seconds for a command to end after Stop, before its rank is given up

_HELP = """
Beside pdb's own commands: `rank N` looks at the same moment on another rank, q leaves.
The other ranks are idle: a collective would wait for them in vain (Stop ends it, and with it that rank).
"""


@dataclass
class _Failed:
    """A cell that failed, while its frames may still be there."""

    error: BaseException
    pool: Pool
    pids: list[int]
    cells: int
    ranks: list[int]  # in the order in which they are worth looking at
    died: list[int]


class Debugger:
    """Takes the place of the shell's `debugger`, which `%debug` and `%pdb on` call, for errors from ranks."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._failed: _Failed | None = None
        self._usual: Any = None

    def install(self) -> None:
        self._usual = getattr(self._shell, "debugger", None)
        if self._usual is not None:
            self._shell.debugger = self.debugger

    def remove(self) -> None:
        if vars(self._shell).get("debugger") == self.debugger:
            del self._shell.debugger
        self._failed = None

    def remember(self, error: BaseException, failure: Failure | None, pool: Pool) -> None:
        """This error is raised now; it ended the cell that the pool ran last."""
        ranks: list[int] = []
        if failure is not None:
            first = [failure.first["rank"]] if failure.first is not None else []
            ranks = [*first, *failure.same, *(rank for rank, _ in failure.also), *failure.cut_off]
        died = sorted(failure.died) if failure is not None else []
        ranks = [rank for rank in ranks if rank not in died]
        self._failed = _Failed(error, pool, list(pool.pids), pool.cells, ranks, died)

    def debugger(self, force: bool = False) -> None:
        """As the shell's."""
        failed = self._failed
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if failed is None or value is not failed.error:
            self._usual(force=force)
        elif force or self._shell.call_pdb:
            sys.stdout.flush()
            try:
                with failed.pool.turn.take():
                    _Session(failed).run()
            except RanksBusy as error:
                print(f"nbdist: %debug: {error}", file=sys.stderr)


class _Session:
    """One `%debug`, from its first answer to q."""

    def __init__(self, failed: _Failed) -> None:
        self._failed, self._pool = failed, failed.pool
        self._rank = -1

    def run(self) -> None:
        why = self._nothing_left() or self._open()
        if why:
            print(f"nbdist: %debug: {why}. The traceback (`%tb` shows it again) is what there is", file=sys.stderr)
            return
        while True:
            try:
                line = input(f"rank {self._rank}> ").strip()
            except EOFError:
                return
            except RuntimeError:  # StdinNotImplementedError: nobody can type here
                print("(this frontend has no keyboard for %debug: the stack, and the arguments)")
                for command in ("w", "a"):
                    self._command(command)
                return
            except KeyboardInterrupt:
                print("--KeyboardInterrupt--")
                continue
            if line in ("q", "quit", "exit", "EOF"):
                return
            try:
                if not self._do(line):
                    return
            except KeyboardInterrupt:  # a moment before the command was sent, or after its answer
                print("--KeyboardInterrupt--")

    def _do(self, line: str) -> bool:
        """What was typed, for us or for pdb; False ends the session."""
        if match := re.fullmatch(r"rank\s+(\d+)", line):
            self._show(int(match[1]))
            return True
        goes_on = self._command(line)
        if line in ("h", "help", "?"):
            print(_HELP)
        return goes_on

    def _nothing_left(self) -> str:
        failed = self._failed
        if not self._pool.pids or self._pool.pids != failed.pids:
            return "the ranks of that cell have ended, and their frames with them"
        if self._pool.cells != failed.cells:
            return "another cell has run on these ranks since, and the frames of the one that failed are gone"
        if not failed.ranks:
            return "no rank has frames of it" if not failed.died else _ended(failed.died)
        return ""

    def _open(self) -> str:
        """Begin at the first rank that has frames; else returns why there is none."""
        reasons: list[str] = []
        for rank in self._failed.ranks:
            answer = self._ask(rank, None, FIRST_ANSWER)
            if "gone" in answer:
                reasons.append(f"rank {rank}: {answer['gone']}")
                continue
            self._rank = rank
            others = [str(other) for other in range(self._pool.size) if other != rank]
            died = f"{_ended(self._failed.died)}; " if self._failed.died else ""
            print(
                f"{died}rank {rank} as it was when the cell ended; `h` lists the commands, "
                + (f"`rank {others[0]}` looks at another rank, " if others else "")
                + "`q` leaves"
            )
            print(answer["text"], end="")
            return ""
        return "; ".join(reasons)

    def _show(self, rank: int) -> None:
        if rank >= self._pool.size:
            print(f"*** there is no rank {rank}: these are ranks 0 to {self._pool.size - 1}")
            return
        answer = self._ask(rank, None, FIRST_ANSWER)
        if "gone" in answer:
            print(f"*** rank {rank}: {answer['gone']}")
            return
        self._rank = rank
        print(answer["text"], end="")

    def _command(self, line: str) -> bool:
        """Run it there; False ends the session."""
        answer = self._ask(self._rank, line, None)
        if "gone" in answer:
            print(f"nbdist: %debug: rank {self._rank}: {answer['gone']}", file=sys.stderr)
            return False
        print(answer["text"], end="")
        return not answer["over"]

    def _ask(self, rank: int, command: str | None, limit: float | None) -> dict[str, Any]:
        pool = self._pool
        if rank not in pool.alive or pool.reader is None:
            return {"gone": "it has ended"}
        query, end = pool.new_query(), None if limit is None else time.monotonic() + limit
        pressed, again = False, 0.0
        pool.reader.listening = True
        try:
            with shielded():
                pool.send([rank], "debug", query=query, command=command)
            while end is None or time.monotonic() < end:
                try:
                    event = pool.next_event(0.1)
                except KeyboardInterrupt:
                    if not pressed:
                        pressed, end = True, time.monotonic() + AFTER_STOP
                    event = None
                if pressed and time.monotonic() >= again:  # the first may meet a rank that has not begun
                    pool.signal_groups([rank], signal.SIGINT)
                    again = time.monotonic() + SIGNAL_AGAIN
                if event is None:
                    continue
                if event.what == "control" and event.value.fields.get("query") == query:
                    return event.value["answer"]
                if event.what in ("text", "display"):
                    pool.deliver_late(event)
                elif event.what == "closed" and event.value == "control" and event.rank == rank:
                    return {"gone": "it has ended"}
                elif pool.unsettled is not None:
                    pool.unsettled.handle(event)  # a rank that ends the failed cell only now
        finally:
            if pool.reader is not None:
                pool.reader.listening = False
        if not pressed:
            return {"gone": f"it does not answer within {limit:g} s: it is still in native code"}
        pool.kill([rank])
        return {"gone": "the command could not be interrupted, so this rank was ended; the next cell starts new ranks"}


def _ended(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) + " ended, and its frames with it"
