"""How the output of N ranks becomes one: rank 0 as if it ran here, lines of the others with their rank in front."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from typing import Any

MODES = ("merged", "rank0", "none")
HELD = 0.2  # seconds that another rank's line waits for rank 0 to finish its own


class MergedScreen:
    """Takes bytes from ranks, writes text.

    Args:
        mode: "merged" (all ranks), "rank0" (rank 0 alone), "none" (errors only).
        lead: the rank that counts as rank 0: the lowest that runs.
        write: gets (stream, text), stream being "stdout" or "stderr"; by default this process's own.
        show: gets a display message of the lead rank; by default its text is written.
        patience: seconds that another rank's line waits for rank 0 to finish its own.
    """

    def __init__(
        self,
        mode: str = "merged",
        lead: int = 0,
        write: Callable[[str, str], None] | None = None,
        show: Callable[[dict[str, Any]], None] | None = None,
        patience: float = HELD,
    ) -> None:
        self.mode, self.lead, self._patience = mode, lead, patience
        self._write_to = write or _write_here
        self._show = show
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._lines: dict[tuple[int, str], str] = {}  # what other ranks have begun
        self._held: dict[str, list[str]] = {"stdout": [], "stderr": []}  # whole lines of other ranks
        self._held_since = 0.0
        self._at_start = {"stdout": True, "stderr": True}  # rank 0's cursor is at the start of a line

    def text(self, rank: int, stream: str, data: bytes) -> None:
        if self.mode == "none" or (self.mode == "rank0" and rank != self.lead):
            return
        decoder = self._decoders.get((rank, stream))
        if decoder is None:
            decoder = self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if not text:
            return
        if rank == self.lead:
            self._lead_text(stream, text)
        else:
            self._other_text(rank, stream, text)

    def _lead_text(self, stream: str, text: str) -> None:
        if self._held[stream]:
            # finish rank 0's line first, then the others', then what is left
            line, newline, rest = text.partition("\n")
            if newline:
                self._write(stream, line + newline)
                self._at_start[stream] = True
                self._release(stream)
                text = rest
            elif self._at_start[stream]:
                self._release(stream)
            if not text:
                return
        self._write(stream, text)
        self._at_start[stream] = text.endswith("\n")

    def _other_text(self, rank: int, stream: str, text: str) -> None:
        text = self._lines.pop((rank, stream), "") + text
        *whole, rest = text.split("\n")
        if rest:
            # of a progress bar only its newest state is kept
            self._lines[rank, stream] = rest.rsplit("\r", 1)[-1] if not rest.endswith("\r") else rest[-4096:]
        for line in whole:
            shown = line.rstrip("\r").rsplit("\r", 1)[-1]
            if not self._held["stdout"] and not self._held["stderr"]:
                self._held_since = time.monotonic()
            self._held[stream].append(f"[rank {rank}] {shown}\n")
        if self._at_start[stream]:
            self._release(stream)

    def _release(self, stream: str) -> None:
        if self._held[stream]:
            lines, self._held[stream] = self._held[stream], []
            if not self._at_start[stream]:
                lines.insert(0, "\n")
                self._at_start[stream] = True
            self._write(stream, "".join(lines))

    def _write(self, stream: str, text: str) -> None:
        self._write_to(stream, text)

    def display(self, rank: int, message: dict[str, Any]) -> None:
        if self.mode == "none" or (self.mode == "rank0" and rank != self.lead):
            return
        text = message.get("data", {}).get("text/plain", "")
        if rank != self.lead:
            if message.get("msg_type", "display_data") == "display_data":
                self.text(rank, "stdout", (text + "\n").encode("utf-8", "replace"))
        elif self._show is not None:
            for stream in ("stdout", "stderr"):
                self._release(stream)
            self._show(message)
        elif text:
            self._write("stdout", text + "\n")

    def notice(self, line: str) -> None:
        """A line of our own."""
        self._release("stderr")
        start = "" if self._at_start["stderr"] else "\n"
        self._write("stderr", f"{start}nbdist: {line}\n")
        self._at_start["stderr"] = True

    def tick(self) -> None:
        """Nothing came for a while: lines that waited for rank 0 to finish its own wait no longer."""
        if (self._held["stdout"] or self._held["stderr"]) and time.monotonic() - self._held_since >= self._patience:
            for stream in ("stdout", "stderr"):
                self._release(stream)

    def finish(self) -> None:
        """The cell is over: unfinished lines are shown as well."""
        for (rank, stream), rest in sorted(self._lines.items()):
            shown = rest.rstrip("\r").rsplit("\r", 1)[-1]
            if shown:
                self._held[stream].append(f"[rank {rank}] {shown}\n")
        self._lines.clear()
        for stream in ("stdout", "stderr"):
            self._release(stream)


def _write_here(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()
