"""A rank has no keyboard: what asks for one says so, where it stands in the cell, and what to do instead."""

from __future__ import annotations

import builtins
import getpass
import io
import pdb
import sys
from typing import Any, NoReturn

_ASK = "ask in an ordinary cell, and use the answer here"
_LOOK = (
    "look at values with print() or ranks['name'], let the cell fail and use %debug after it, or run the code in an "
    "ordinary cell"
)


class NoKeyboard(io.TextIOWrapper):
    """Stands for sys.stdin."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise EOFError(f"a rank has no keyboard: {_ASK}")


def take_away() -> None:
    """At the start of each cell: a cell may have put something else in place of what asks."""
    sys.breakpointhook = _breakpoint
    vars(builtins)["input"] = _input
    vars(getpass)["getpass"] = _getpass
    vars(pdb)["set_trace"] = _set_trace


def _where(what: str) -> str:
    """The same words on every rank: who it was is told beside the error."""
    return f"{what} in line {sys._getframe(2).f_lineno}: a rank has no keyboard"


def _input(prompt: object = "", /) -> NoReturn:
    raise EOFError(f"{_where('input()')}; {_ASK}")


def _getpass(prompt: str = "Password: ", stream: Any = None, **more: Any) -> NoReturn:
    raise EOFError(f"{_where('getpass()')}; {_ASK}")


def _breakpoint(*arguments: Any, **more: Any) -> NoReturn:
    raise RuntimeError(f"{_where('breakpoint()')}; {_LOOK}")


def _set_trace(*arguments: Any, **more: Any) -> NoReturn:
    raise RuntimeError(f"{_where('pdb.set_trace()')}; {_LOOK}")
