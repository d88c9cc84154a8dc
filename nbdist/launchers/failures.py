"""Which rank failed first, and its exception raised again here: its own type, at its own lines."""

from __future__ import annotations

import builtins
import os
import re
import signal
import threading
import time
import types
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nbdist.launchers.errors import RankExited, RankLost
from nbdist.shipping.raised import Raised
from nbdist.shipping.wire import ENDED, ENDED_AT, FAULT_AT, PLACE

# What a rank raises when another one's sockets close under it. Asked only when a rank has died: its peers are then
# cut off by that, not by us.
_CUT_OFF_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CUT_OFF_TEXTS = ("closed by peer", "gloo", "connection reset", "broken pipe", "timed out waiting", "store")


def read_black_box(fd: int) -> dict[str, Any]:
    """Where a rank was when it died: {"line", "file", "age" in seconds, "fault": faulthandler's text}; line 0 when
    nothing is known.
    """
    when, line, name = PLACE.unpack(os.pread(fd, PLACE.size, 0).ljust(PLACE.size, b"\0"))
    fault = os.pread(fd, 16384, FAULT_AT).split(b"\0", 1)[0].decode("utf-8", "replace")
    return {
        "line": line,
        "file": name.split(b"\0", 1)[0].decode("utf-8", "replace"),
        "age": time.monotonic() - when if when else None,
        "fault": fault,
    }


def code_has_ended(fd: int, cell: int) -> bool:
    """Has a rank's black box said that this cell's code is over? Its results may still be on their way."""
    return ENDED.unpack(os.pread(fd, ENDED.size, ENDED_AT).ljust(ENDED.size, b"\0"))[0] == cell


FrameFacts = tuple[str, int, str, int, str]  # file, line, function, its first line, the names of its arguments


@dataclass
class Failure:
    """What ended a cell.

    Attributes:
        first: the description of the exception of the rank that failed first (see nbdist/worker/failure.py); None
            when it died.
        died: {rank: (exit code or None, what its black box says)}.
        same: other ranks that failed with the same error; also: with another; cut_off: ranks that were only
            interrupted by us.
    """

    first: dict[str, Any] | None
    died: dict[int, tuple[int | None, dict[str, Any]]] = field(default_factory=dict)
    same: list[int] = field(default_factory=list)
    also: list[tuple[int, str]] = field(default_factory=list)
    cut_off: list[int] = field(default_factory=list)

    def note(self) -> str:
        """One line: who failed first, who else, who was only cut off."""
        if self.first is None:
            parts = []
        elif self.same:
            parts = [f"on {ranks_in_words([self.first['rank'], *self.same])}"]
        else:
            parts = [f"rank {self.first['rank']} failed first"]
        if self.also:
            parts.append("also failed: " + ", ".join(f"rank {rank} ({what})" for rank, what in self.also))
        if self.cut_off:
            parts.append(f"cut off by that: {ranks_in_words(self.cut_off)}")
        return "; ".join(parts)


def ranks_in_words(ranks: list[int]) -> str:
    """rank 3; ranks 1, 2."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _looks_cut_off(told: dict[str, Any]) -> bool:
    text = told["text"].lower()
    return told["type"] in _CUT_OFF_TYPES and any(word in text for word in _CUT_OFF_TEXTS)


def choose(
    told: list[dict[str, Any]],
    died: dict[int, tuple[int | None, dict[str, Any]]],
    died_at: dict[int, float],
) -> Failure | None:
    """Find the cause among what the ranks told, by what we did to them and one clock, not by message texts.

    Args:
        told: descriptions of exceptions; "ours" marks those of ranks that we had interrupted or cut before, "echo"
            those that only tell of another rank's.
        died: ranks whose process ended.
        died_at: when, by time.monotonic().
    """
    if not told and not died:
        return None
    causes = sorted((one for one in told if not (one["ours"] or one.get("echo"))), key=lambda one: one["time"])
    if died:
        first_death = min(died_at.values())
        before = [one for one in causes if one["time"] < first_death and not _looks_cut_off(one)]
        if not before:
            after = [one for one in causes if not _looks_cut_off(one)]
            cut = [one["rank"] for one in told if one not in after]
            return Failure(None, died, [], [(one["rank"], in_short(one)) for one in after], cut)
        causes = before + [one for one in causes if one not in before and not _looks_cut_off(one)]
    if not causes:
        causes = sorted(told, key=lambda one: (bool(one.get("echo")), one["time"]))[:1]
    first = causes[0]
    equal = [one for one in causes if in_short(one) == in_short(first)]
    first = min(equal, key=lambda one: one["rank"])  # what the lead rank raised is about the notebook's own objects
    same = [one["rank"] for one in equal if one is not first]
    also = [(one["rank"], in_short(one)) for one in causes if one not in equal]
    named = {first["rank"], *same, *(rank for rank, _ in also)}
    return Failure(first, died, same, also, [one["rank"] for one in told if one["rank"] not in named])


def in_short(one: dict[str, Any]) -> str:
    """The type of what a rank told of, and its first line."""
    text = one["text"].splitlines()[0] if one["text"] else ""
    return f"{one['type']}: {text}"[:200] if text else one["type"]


def cell_line(frames: list[FrameFacts], cell_files: Collection[str]) -> int | None:
    """The line of the cell at which an exception left it."""
    return next((line for file, line, *_ in frames if file in cell_files), None)


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name} (signal {-code})"
    return f"exited with code {code}"


def lost(failure: Failure, cell_files: Collection[str] = ()) -> RankLost:
    """The exception for ranks whose process ended."""
    parts: list[str] = []
    faults: list[str] = []
    for rank, (code, box) in sorted(failure.died.items()):
        fault, line = _of_fault(box.get("fault", ""), cell_files)
        faults.append(fault)
        line = line or box.get("line")
        place = f" at cell line {line}" if line else ""
        if place and not fault and (box.get("age") or 0) > 1.5:
            place += f" (last seen there {box['age']:.1f} s before it was read)"
        parts.append(f"rank {rank} {how_it_ended(code)}{place}")
    hint = ""
    if any(code == -signal.SIGKILL for code, _ in failure.died.values()):
        hint = ". A SIGKILL that you did not send is most often the machine out of memory"
    text = "; ".join(parts) + hint + ". The next cell or launch starts fresh ranks."
    told = next(filter(None, faults), "")
    return RankLost(text + (f"\n{told}" if told else ""))


def _of_fault(text: str, cell_files: Collection[str]) -> tuple[str, int | None]:
    """faulthandler's text down to the cell's own frames, and the cell line in it."""
    kept, line, last = [], None, 0
    for number, one in enumerate(text.split("\n\nExtension modules")[0].splitlines()):
        kept.append(one)
        match = re.match(r'\s*File "(.*)", line (\d+) in ', one)
        if match and match[1] in cell_files:
            line, last = line or int(match[2]), number + 1
    return "\n".join(kept[: last or None]).strip(), line


def rebuild(told: dict[str, Any], raised: Raised | None = None, cell_files: Collection[str] = ()) -> BaseException:
    """The rank's exception as it came, or, when it could not, one of a class with the same name and nearest builtin
    base, which says so.
    """
    if told["type"] == "SystemExit" and told["module"] == "builtins":
        code = told["args"][0] if told["args"] else "None"
        line = cell_line(told["frames"], cell_files)
        place = f" at cell line {line}" if line else ""
        return RankExited(f"rank {told['rank']} exited with code {0 if code == 'None' else code}{place} (SystemExit)")
    if raised is None:
        return stand_in(told)
    error = raised.error
    if error is not None and type(error).__qualname__ == told["type"]:
        if raised.left_out:
            error.add_note(f"left on rank {told['rank']}: {', '.join(raised.left_out)}")
        try:
            str(error)
            return error
        except Exception:  # who shows it asks for its text
            return stand_in(told, type(error))
    error = stand_in(told)
    error.add_note(f"this {told['type']} has the text alone, and is of another class than the rank's: {raised.reason}")
    return error


def stand_in(told: dict[str, Any], of: type[BaseException] | None = None) -> BaseException:
    """An exception that `except ValueError` catches and that prints as the rank's did; `of`: of this class."""
    base: type[BaseException] = of or Exception
    for name in told["bases"] if of is None else ():
        candidate = getattr(builtins, name, None)
        if (
            isinstance(candidate, type)
            and issubclass(candidate, BaseException)
            and not issubclass(candidate, BaseExceptionGroup)
        ):
            base = candidate
            break
    text = told["text"]
    body = {"__module__": told["module"], "__str__": lambda self: text, "__init__": lambda self, *arguments: None}
    try:
        return types.new_class(told["type"].rsplit(".", 1)[-1], (base,), {}, lambda space: space.update(body))()
    except Exception:
        return RuntimeError(f"{told['type']}: {text}")


def traceback_of(frames: list[FrameFacts]) -> types.TracebackType | None:
    """Real traceback objects for frames of another process, so that whatever prints tracebacks shows files, lines
    and functions as its own.

    They are made in a thread: a frame holds on to those that called it, and with them to all that the cell shipped.
    """
    made: list[types.TracebackType | None] = []
    thread = threading.Thread(target=lambda: made.append(_chain(frames)))
    thread.start()
    thread.join()
    return made[0]


def _chain(frames: list[FrameFacts]) -> types.TracebackType | None:
    chain: types.TracebackType | None = None
    for frame in reversed(frames):
        error, line = _raised_at(*frame), frame[1]
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is not None:
            chain = types.TracebackType(chain, last.tb_frame, last.tb_lasti, line)
    return chain


class _OnTheRank:
    """Stands for the value of an argument, for who shows those too."""

    def __repr__(self) -> str:
        return "<on the rank>"


def _raised_at(file: str, line: int, function: str, first: int, arguments: str) -> ValueError:
    """An exception from a frame that looks like that of a function at this place: what prints source looks at its
    first line too.
    """
    blank, inside = "\n" * (line - 1), "raise _stand_in"
    if function == "<module>" or not 0 < first <= line:
        code = compile(blank + inside, file, "exec").replace(co_name=function, co_qualname=function)
    else:
        text = "\n" * (first - 1) + f"def _({arguments}):" + "\n" * (line - first) + " " + inside
        outer = compile(text, file, "exec")
        inner = next(constant for constant in outer.co_consts if isinstance(constant, types.CodeType))
        code = inner.replace(co_name=function, co_qualname=function)
    try:
        types.FunctionType(code, {"_stand_in": ValueError()})(*[_OnTheRank()] * code.co_argcount)
    except ValueError as error:
        return error
    raise AssertionError("it was raised")


def with_causes(error: BaseException, told: dict[str, Any]) -> BaseException:
    """Give causes and contexts their tracebacks; what stands for those that did not come is hung on."""
    link = error
    for kind, description in told["chain"]:
        following = link.__cause__ if kind == "cause" else link.__context__
        if following is None:
            following = rebuild({**description, "rank": told["rank"]})
        following.__traceback__ = traceback_of(description["frames"])
        if kind == "cause":
            link.__cause__ = following
        else:
            link.__context__ = following
        link = following
    return error


def raisable(failure: Failure, cell_files: Collection[str] = (), raised: Raised | None = None) -> BaseException:
    """The exception that ends the cell here, with the traceback of the rank that failed first and a note on the
    others; `raised` is what came of it.
    """
    if failure.first is None:
        error: BaseException = lost(failure, cell_files)
    else:
        error = with_causes(rebuild(failure.first, raised, cell_files), failure.first)
        error.__traceback__ = traceback_of(failure.first["frames"])
        for note in failure.first["notes"]:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
    note = failure.note()
    if note:
        error.add_note(note)
    return error
