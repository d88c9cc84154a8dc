"""Where the rank was when it died: a small file in memory that the notebook holds too, and reads afterwards.

A killed process can say nothing any more, so its place is written down before: a few times a second by a thread, at
    once when it calls
`os._exit`, `os.abort` or `os.kill`, and by faulthandler on a fatal signal.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nbdist.shipping.wire import BLACK_BOX_SIZE, ENDED, ENDED_AT, FAULT_AT, PLACE

FIRST_LOOKS = (0.002, 0.01, 0.04)  # seconds; then every EVERY
EVERY = 0.2


class BlackBox:
    """The writing end, in the rank; nbdist/launchers/failures.py reads."""

    def __init__(self, fd: int, is_cell_file: Callable[[str], bool], main_thread: int | None) -> None:
        self._fd, self._is_cell_file, self._main = fd, is_cell_file, main_thread
        self._pid = os.getpid()
        self._started = threading.Event()
        os.ftruncate(fd, BLACK_BOX_SIZE)
        os.lseek(fd, FAULT_AT, os.SEEK_SET)
        faulthandler.enable(file=fd, all_threads=False)
        threading.Thread(target=self._look, daemon=True, name="nbdist-place").start()
        for name in ("_exit", "abort", "kill"):
            self._before(name)

    def _before(self, name: str) -> None:
        really = getattr(os, name)

        @functools.wraps(really)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid and threading.get_ident() == self._main:
                self.write(sys._getframe(1))
            return really(*args, **kwargs)

        setattr(os, name, noting)

    def begin(self) -> None:
        """A cell starts: the place of the last one is forgotten."""
        os.pwrite(self._fd, PLACE.pack(0.0, 0, b""), 0)
        self._started.set()

    def end(self, cell: int) -> None:
        """The cell's code has ended, and what it made is packed from here on: nobody else is needed for that."""
        self._started.clear()
        os.pwrite(self._fd, ENDED.pack(cell), ENDED_AT)

    def write(self, frame: FrameType | None) -> None:
        while frame is not None:
            if self._is_cell_file(frame.f_code.co_filename):
                name = frame.f_code.co_filename.encode()[-200:]
                os.pwrite(self._fd, PLACE.pack(time.monotonic(), frame.f_lineno, name), 0)
                return
            frame = frame.f_back

    def _look(self) -> None:
        while True:
            self._started.wait()
            for pause in FIRST_LOOKS:
                time.sleep(pause)
                self._look_once()
            while self._started.is_set():
                time.sleep(EVERY)
                self._look_once()

    def _look_once(self) -> None:
        if self._started.is_set():
            self.write(sys._current_frames().get(self._main or -1))
