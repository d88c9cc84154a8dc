"""After a cell has failed on this rank: its frames, looked at with pdb's commands from the notebook.

The exception is kept, with the values in its frames, until the next cell begins.
"""

from __future__ import annotations

import contextlib
import io
import os
import pdb
from collections.abc import Callable
from types import TracebackType
from typing import Any

_OURS = frozenset(os.path.join(os.path.dirname(__file__), name) for name in ("interrupts.py", "keyboard.py"))
MOST = 200_000  # characters of one answer


class _Debugger(pdb.Pdb):
    """pdb without a terminal: a command comes as text, and what it prints is the answer."""

    def __init__(self, out: io.StringIO) -> None:
        super().__init__(stdin=io.StringIO(), stdout=out, nosigint=True, readrc=False)

    def begin(self, frames: TracebackType) -> None:
        """Look at the innermost frame that is not ours (of an interrupt, of `input()`)."""
        self.reset()
        self.setup(None, frames)
        while len(self.stack) > 1 and self.stack[-1][0].f_code.co_filename in _OURS:
            self.stack.pop()
        self.curindex = len(self.stack) - 1
        self.curframe = self.stack[self.curindex][0]
        self.curframe_locals = self.curframe.f_locals

    def command(self, line: str) -> bool:
        """Returns whether this ends the debugging."""
        self.cmdqueue = [line]
        while self.cmdqueue:
            line = self.precmd(self.cmdqueue.pop(0))
            if self.postcmd(self.onecmd(line), line):
                return True
        return False


class Postmortem:
    """What is left of the cell that failed last.

    Args:
        is_cell_file: tells the cell's own frames from ours, which stand before the first of them.
    """

    def __init__(self, is_cell_file: Callable[[str], bool]) -> None:
        self._is_cell_file = is_cell_file
        self._error: BaseException | None = None
        self._out = io.StringIO()
        self._debugger: _Debugger | None = None

    def keep(self, error: BaseException) -> None:
        self._error = error

    def drop(self) -> None:
        """A new cell begins: what the frames hold is freed."""
        self._error = self._debugger = None

    def _frames(self) -> TracebackType | None:
        whole = self._error.__traceback__ if self._error is not None else None
        part = whole
        while part is not None and not self._is_cell_file(part.tb_frame.f_code.co_filename):
            part = part.tb_next
        return part or whole

    def answer(self, command: str | None) -> dict[str, Any]:
        """Run one command of pdb; None begins anew at the innermost frame.

        Returns {"text", "over"}, or {"gone"} with the reason when there are no frames.
        """
        if self._error is None or (frames := self._frames()) is None:
            return {"gone": "the cell did not fail there"}
        self._out.seek(0)
        self._out.truncate()
        over = False
        with contextlib.redirect_stdout(self._out), contextlib.redirect_stderr(self._out):
            try:
                if command is None or self._debugger is None:
                    self._debugger = _Debugger(self._out)
                    self._debugger.begin(frames)
                    self._debugger.print_stack_entry(self._debugger.stack[self._debugger.curindex])
                if command is not None:
                    over = self._debugger.command(command)
            except BaseException as error:
                print(f"*** {type(error).__name__}: {error}", file=self._out)
        text = self._out.getvalue()
        if len(text) > MOST:
            text = f"{text[:MOST]}\n... ({len(text) - MOST} more characters)\n"
        return {"text": text, "over": over}
