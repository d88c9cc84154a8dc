"""The notebook's output area as a screen for ranks, and what comes after its cell has ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from nbdist.launchers.cell import Screen
from nbdist.launchers.reader import Event
from nbdist.launchers.screen import MODES as TEXT_MODES
from nbdist.launchers.screen import MergedScreen

MODES = (*TEXT_MODES, "tabs")
EACH = "--output tabs shows each"
SETTLE = 0.3


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

    def text(self, stream: str, text: str) -> None:
        if self._kernel is None:  # a terminal
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
        else:
            self._send("stream", {"name": stream, "text": text})

    def display(self, message: dict[str, Any]) -> None:
        if self._kernel is not None and message["msg_type"] != "clear_output":
            self._send(message["msg_type"], {key: message[key] for key in ("data", "metadata", "transient")})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self._kernel.session.send(self._kernel.iopub_socket, kind, content, parent=self._parent)


class LateOutput:
    """What ranks write when no cell is running, shown under the cell that ran last.

    Called by the thread that reads; what waits for other ranks is let go by a timer.

    Args:
        screen: where it goes.
        settle: seconds after which what has come is shown, with what waited for more.
    """

    def __init__(self, screen: Screen, settle: float = SETTLE) -> None:
        self._screen, self._seconds = screen, settle
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.what == "text":
                self._screen.text(event.rank, event.stream, event.value)
            elif event.what == "display":
                self._screen.display(event.rank, event.value)
            if self._timer is None and not self._closed:
                self._timer = threading.Timer(self._seconds, self._settle)
                self._timer.daemon = True
                self._timer.start()

    def _settle(self) -> None:
        with self._lock:
            self._timer = None
            self._screen.finish()

    def close(self) -> None:
        """Another cell takes over: show what waits."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._screen.finish()
