"""An exception on a rank, as data: its type, text, frames, causes and notes. The object itself travels beside it."""

from __future__ import annotations

import inspect
import os
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

_DEEPEST_CHAIN = 10
# What stands between a call and a function that has no Python lines of its own.
_OURS = frozenset(
    os.path.join(os.path.dirname(__file__), name) for name in ("main.py", "one_cell.py", "calls.py", "keyboard.py")
)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"<its __str__ raised {type(second).__name__}: {second}>"


def _arguments(code: types.CodeType) -> str:
    """The names of a function's arguments, as a traceback shows them: `a, b, *rest`."""
    names, rest, keywords = inspect.getargs(code)
    told = [*names, *([f"*{rest}"] if rest else ()), *([f"**{keywords}"] if keywords else ())]
    return ", ".join(told) if all(name.lstrip("*").isidentifier() for name in told) else ""  # `.0` of a comprehension


def _one(error: BaseException, is_cell_file: Callable[[str], bool]) -> dict[str, Any]:
    frames = [
        (f.f_code.co_filename, line, f.f_code.co_name, f.f_code.co_firstlineno, _arguments(f.f_code))
        for f, line in traceback.walk_tb(error.__traceback__)
    ]
    start = next((i for i, frame in enumerate(frames) if is_cell_file(frame[0])), None)
    kind = type(error)
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "bases": [base.__name__ for base in kind.__mro__],
        "text": _text(error),
        "args": [repr(argument)[:200] for argument in error.args] if isinstance(error.args, tuple) else [],
        "frames": [frame for frame in frames[start or 0 :] if frame[0] not in _OURS],
        "notes": [str(note) for note in getattr(error, "__notes__", ())],
    }


def describe(error: BaseException, rank: int, ours: bool, is_cell_file: Callable[[str], bool]) -> dict[str, Any]:
    """The exception that ended a cell on this rank.

    Args:
        ours: the rank was asked to stop before (by a signal, a cut, an agreed step): this is a consequence and not
            a cause.
        is_cell_file: tells the cell's own frames from ours; frames before the first of them are left out.
    """
    told = {
        **_one(error, is_cell_file),
        "rank": rank,
        "time": time.monotonic(),  # one clock for all processes of a host: tells who was first
        "ours": ours,
        "echo": hasattr(error, "_nbdist_echo"),  # it only tells of another rank's: see nbdist.messages.echo
        "whole": "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if _printable(error)
        else "",
        "chain": [],
    }
    seen, link = {id(error)}, error
    for _ in range(_DEEPEST_CHAIN):
        kind = "cause" if link.__cause__ is not None else "context"
        following = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if following is None or id(following) in seen:
            break
        seen.add(id(following))
        told["chain"].append((kind, _one(following, is_cell_file)))
        link = following
    return told


def _printable(error: BaseException) -> bool:
    try:
        str(error)
    except Exception:
        return False
    return True
