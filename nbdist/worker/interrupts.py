"""How a running cell is interrupted from outside: the signal a terminal would send, and one for code that swallows
it.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from nbdist.shipping.wire import HARD_SIGNAL


class Interrupts:
    """KeyboardInterrupt in user code only: a late signal must not end the rank's own loop."""

    def __init__(self) -> None:
        self.running = False  # user code is on the main thread's stack
        self.coming = False  # a cell has been received, and its code is about to run
        self.packing = False  # the code has ended, and what it made is packed: Stop is not for that, unless ...
        self.abandoned = False  # ... the notebook has said so
        self.asked = False  # this cell was asked to stop, by a signal, a cut or an agreed step
        self.handled = False  # ... and its code ended all the same as if it had not been
        self.files: set[str] = set()  # file names of cells
        self.main_thread = threading.main_thread().ident

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(HARD_SIGNAL, self._on_hard_signal)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def is_cell_file(self, name: str) -> bool:
        return name in self.files

    def begin(self) -> None:
        """A cell was received; handlers are put back, since a cell may have set its own."""
        self.asked, self.coming = False, True
        self.handled = False
        self.packing = self.abandoned = False
        self.install()

    def start(self) -> None:
        """Its code runs from here on. Raises KeyboardInterrupt when Stop came before."""
        self.coming, self.running = False, True
        if self.asked:
            raise KeyboardInterrupt

    def pause(self) -> None:
        """What may be interrupted is over for now; a trace that a hard signal has set goes with it."""
        self.running = self.packing = False
        sys.settrace(None)

    def end(self) -> None:
        self.coming = self.running = False
        sys.settrace(None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.packing and not self.abandoned:
            return  # it was meant for the code, which has just ended
        if self.running:
            self.asked = True
            raise KeyboardInterrupt
        if self.coming:
            self.asked = True

    def _on_hard_signal(self, number: int, frame: FrameType | None) -> None:
        if self.running and (self.abandoned or not self.packing):
            self.asked = True
            self._trace_every_line(frame)
            raise KeyboardInterrupt

    def _trace_every_line(self, frame: FrameType | None) -> None:
        """Raise at each line the cell still runs, its except bodies included.

        On 'line' events only: raising on an 'exception' event makes Python switch tracing off, inside the very try.
        It breaks `finally` bodies too, which is why it comes after everything else.
        """

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and self.running and self.is_cell_file(frame.f_code.co_filename):
                raise KeyboardInterrupt
            return trace

        while frame is not None:
            if self.is_cell_file(frame.f_code.co_filename):
                frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(trace)
