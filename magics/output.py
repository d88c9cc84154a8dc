"""The notebook's output area as a screen for ranks, and what comes after its cell has ended."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nbdist.launchers.reader import Event
from nbdist.launchers.request import Screen
from nbdist.launchers.screen import MODES as TEXT_MODES
from nbdist.launchers.screen import MergedScreen

MODES = (*TEXT_MODES, "tabs")
EACH = "run with --output tabs to see each"
SETTLE = 0.3
GATHERED = 1 << 16  # letters of late text that are sent at once


class NotebookScreen(MergedScreen):
    """Shows in the running cell's output area."""

    def __init__(self, shell: Any, mode: str, lead: int, ranks: Iterable[int] | None = None, each: str = EACH) -> None:
        super().__init__(mode, lead, write=_write, show=self._display, ranks=ranks, each=each)
        self._shell = shell

    def _display(self, message: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        publish(self._shell, message)


def publish(shell: Any, message: dict[str, Any]) -> None:
    """Show a rank's display in the running cell."""
    publisher = shell.display_pub
    if message["msg_type"] == "clear_output":
        publisher.clear_output(wait=message["wait"])
        return
    publisher.publish(
        data=message["data"],
        metadata=message["metadata"],
        transient=message["transient"],
        update=message["msg_type"] == "update_display_data",
    )


def _write(stream: str, text: str) -> None:
    """Without a flush: the kernel gathers what comes within 0.2 s into one message, as it does for an ordinary cell."""
    (sys.stdout if stream == "stdout" else sys.stderr).write(text)


class Beneath:
    """Sends to the output area of the cell that is running when this is made, also when another one runs by then.

    A plain print from a thread would land in whatever cell is running now (ipykernel 7).
    """

    def __init__(self, shell: Any) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        get_parent = getattr(shell, "get_parent", None)
        self._parent = get_parent() if get_parent is not None else None
        self._gathered: list[tuple[str, str]] = []
        self._letters = 0

    def text(self, stream: str, text: str) -> None:
        """Waits for `flush`, a display or more of it: a message for each line is more than a front end takes."""
        if self._kernel is None:  # a terminal
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
            return
        self._gathered.append((stream, text))
        self._letters += len(text)
        if self._letters > GATHERED:
            self.flush()

    def flush(self) -> None:
        """Send the text that has come."""
        gathered, self._gathered, self._letters = self._gathered, [], 0
        for stream, pieces in itertools.groupby(gathered, lambda piece: piece[0]):
            self._send("stream", {"name": stream, "text": "".join(text for _, text in pieces)})

    def display(self, message: dict[str, Any]) -> None:
        if self._kernel is not None and message["msg_type"] != "clear_output":
            self.flush()
            self._send(message["msg_type"], {key: message[key] for key in ("data", "metadata", "transient")})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self._kernel.session.send(self._kernel.iopub_socket, kind, content, parent=self._parent)


class LateScreen(Screen, Protocol):
    """A screen that says how much it keeps."""

    @property
    def held(self) -> int: ...


class LateOutput:
    """What ranks write for a cell that is over, shown under that cell.

    Called by the thread that reads; what waits for other ranks is let go by a timer.

    Args:
        screen: where it goes.
        flush: sends what the screen has written.
        settle: seconds without anything new after which what waits for more is shown.
        at_most: seconds after which it is shown also while more comes.
    """

    def __init__(
        self,
        screen: LateScreen,
        flush: Callable[[], None] | None = None,
        settle: float = SETTLE,
        at_most: float = math.inf,
    ) -> None:
        self._screen, self._flush, self._seconds, self._at_most = screen, flush, settle, at_most
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._since = self._heard = 0.0

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.what == "text":
                self._screen.text(event.rank, event.stream, event.value)
            elif event.what == "display":
                self._screen.display(event.rank, event.value)
            self._heard = time.monotonic()
            if self._timer is None:
                self._since = self._heard
                self._wait()

    def _wait(self) -> None:
        self._timer = threading.Timer(self._seconds, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            now = time.monotonic()
            over = now - self._heard >= self._seconds * 0.9 or now - self._since >= self._at_most
            self._show(over)
            if not over:
                self._wait()

    def settle(self) -> None:
        """Show what waits."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._show(over=True)

    def _show(self, over: bool) -> None:
        if over:
            self._timer = None
            self._screen.finish()
        else:
            self._screen.tick()
        if self._flush is not None:
            self._flush()

    @property
    def held(self) -> int:
        return self._screen.held
