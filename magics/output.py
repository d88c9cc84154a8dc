"""The notebook's output area as a screen for ranks, and what comes after its cell has ended."""

from __future__ import annotations

import sys
from typing import Any

from nbdist.launchers.reader import Event
from nbdist.launchers.screen import MergedScreen


class NotebookScreen(MergedScreen):
    """Shows in the running cell's output area."""

    def __init__(self, shell: Any, mode: str, lead: int) -> None:
        super().__init__(mode, lead, write=_write, show=self._display)
        self._shell = shell

    def _display(self, message: dict[str, Any]) -> None:
        publisher = self._shell.display_pub
        sys.stdout.flush()
        sys.stderr.flush()
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


class LateOutput(MergedScreen):
    """What a rank writes when no cell is running lands under the cell that ran last: it is sent with that cell's
    message as its parent.

    A plain print from a thread would land in whatever cell is running now (ipykernel 7).
    """

    def __init__(self, shell: Any, mode: str, lead: int) -> None:
        super().__init__(mode, lead, write=self._text, show=self._display)
        self._shell = shell
        get_parent = getattr(shell, "get_parent", None)
        self._parent = get_parent() if get_parent is not None else None

    def __call__(self, event: Event) -> None:
        if event.what == "text":
            self.text(event.rank, event.stream, event.value)
        elif event.what == "display":
            self.display(event.rank, event.value)

    def _text(self, stream: str, text: str) -> None:
        if getattr(self._shell, "kernel", None) is None:
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
        else:
            self._send("stream", {"name": stream, "text": text})

    def _display(self, message: dict[str, Any]) -> None:
        if getattr(self._shell, "kernel", None) is not None and message["msg_type"] != "clear_output":
            self._send(message["msg_type"], {key: message[key] for key in ("data", "metadata", "transient")})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel = self._shell.kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent)
