"""How the output of N ranks becomes one: rank 0 as if it ran here, and of the others what rank 0 did not write."""

from __future__ import annotations

import codecs
import hashlib
import pickle
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from nbdist.launchers import alike
from nbdist.launchers.folding import DISPLAY, END, Folded, Folder, Shown
from nbdist.launchers.pace import Pace
from nbdist.launchers.rows import Rows

MODES = ("merged", "all", "rank0", "none")
HELD = 0.2  # seconds that another rank's line waits for rank 0 to finish its own
STREAMS = ("stdout", "stderr")
RICH = 20  # displays of its own that another rank shows as they are in one cell; more of them are their text
# What matplotlib writes anew into each SVG: when it was drawn, and random names.
_OF_ONE_DRAWING = re.compile(r"<dc:date>[^<]*</dc:date>|\b[a-z]?[0-9a-f]{10}\b")


class MergedScreen:
    """Takes bytes from ranks, writes text.

    Args:
        mode: "merged" (rank 0 as it comes, the others where they differ), "all" (every line with its ranks in front),
            "rank0" (rank 0 alone), "none" (errors only).
        lead: the rank that counts as rank 0: the lowest that runs.
        write: gets (stream, text), stream being "stdout" or "stderr"; by default this process's own.
        show: gets a display message; by default its text is written.
        patience: seconds that another rank's line waits for rank 0 to finish its own.
        ranks: those that run; None when not known.
        each: what shows every rank's own lines, for the line that says what was folded.
    """

    def __init__(
        self,
        mode: str = "merged",
        lead: int = 0,
        write: Callable[[str, str], None] | None = None,
        show: Callable[[dict[str, Any]], None] | None = None,
        patience: float = HELD,
        ranks: Iterable[int] | None = None,
        each: str = "",
    ) -> None:
        self.mode, self.lead, self._patience, self._each = mode, lead, patience, each
        self._write_to = write or _write_here
        self._show = show
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._rows: dict[tuple[int, str], Rows] = {}
        known = None if ranks is None else tuple(ranks)
        self._alone = known is not None and len(known) == 1
        self._folders = {stream: Folder(lead, known, hold_lead=mode == "all") for stream in STREAMS}
        self._pace = {stream: Pace() for stream in STREAMS}
        self._at_start = {"stdout": True, "stderr": True}  # rank 0's cursor is at the start of a line
        self._rich: dict[int, int] = {}  # how many displays of its own a rank had
        self._clears: set[int] = set()  # other ranks that cleared the output: their next display replaces their last
        self._places: dict[tuple[int, ...], str] = {}  # the name of the last display that is shown of these ranks alone
        self._named: dict[str, dict[str, Any]] = {}  # another rank's display that may be updated, by its name here
        self._since: dict[str, float] = {}  # lines of others wait for rank 0 to finish its own, since then

    def text(self, rank: int, stream: str, data: bytes) -> None:
        if self.mode == "none" or (self.mode == "rank0" and rank != self.lead):
            return
        decoder = self._decoders.get((rank, stream))
        if decoder is None:
            decoder = self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if not text:
            return
        if rank == self.lead and self.mode != "all":
            self._lead_text(stream, text)
        if self.mode == "rank0" or self._alone:
            return
        rows = self._rows.get((rank, stream))
        if rows is None:
            rows = self._rows[rank, stream] = Rows()
        now = time.monotonic()
        folder = self._folders[stream]
        self._pace[stream].add(rank, len(text), now)
        folder.add(rank, rows.feed(text), now, rows.moved)
        if folder.waiting:
            self._release(stream, now)

    def _lead_text(self, stream: str, text: str) -> None:
        """Straight through; but where lines of others wait for rank 0 to finish its own, they come right behind it."""
        if not self._at_start[stream]:
            line, newline, rest = text.partition("\n")
            self._write(stream, line + newline)
            self._at_start[stream] = bool(newline)
            if not newline:
                return
            if self._folders[stream].waiting:
                self._release(stream, time.monotonic())
            text = rest
            if not text:
                return
        self._write(stream, text)
        self._at_start[stream] = text.endswith("\n")

    def _release(self, stream: str, now: float, force: bool = False) -> None:
        """Write what is ready, unless rank 0 is in the middle of a line."""
        waits = not self._at_start[stream] and not force
        if waits and now - self._since.setdefault(stream, now) < self._patience:
            return
        self._since.pop(stream, None)
        shown = self._folders[stream].ready(now, force)
        pieces = []
        for one in shown:
            if one.what is not None and self._replace(one):
                continue
            pieces.append(self._words(one))
            if one.what is not None and self._show is not None:
                self._write_lines(stream, "".join(pieces))
                pieces = []
                self._show(one.what)
                one.what["shown"] = True
        self._write_lines(stream, "".join(pieces))

    def _replace(self, one: Shown) -> bool:
        """After a `clear_output` of other ranks than the lead: their display takes the place of their last one."""
        if "clears" not in one.what or self._show is None:
            return False
        name = self._places.get(one.ranks) if one.what["clears"] else None
        if name is None:
            self._places[one.ranks] = one.what["transient"]["display_id"]
            return False
        one.what["transient"] = {**one.what["transient"], "display_id": name}
        self._show({**one.what, "msg_type": "update_display_data"})
        one.what["shown"] = True
        return True

    def _words(self, one: Shown) -> str:
        name = f"[{spans(one.ranks)}]"
        if one.what is None:
            return "".join(f"{name} {line}\n" for line in one.text.split("\n"))
        if one.what["msg_type"] != "display_data":
            return ""
        return f"{name}\n" if self._show is not None else f"{name} {one.text}\n"

    def _write_lines(self, stream: str, text: str) -> None:
        if text:
            self._write(stream, text if self._at_start[stream] else "\n" + text)
            self._at_start[stream] = True

    def _write(self, stream: str, text: str) -> None:
        self._write_to(stream, text)

    # ---------------------------------------------------------------- displays

    def display(self, rank: int, message: dict[str, Any]) -> None:
        if self.mode == "none" or (self.mode == "rank0" and rank != self.lead):
            return
        now = time.monotonic()
        kind = message.get("msg_type", "display_data")
        last = kind == "execute_result"  # of a cell: the notebook shows rank 0's
        if last:
            kind = "display_data"
        if kind == "clear_output":
            if rank == self.lead:
                for stream in STREAMS:
                    self._release(stream, now, force=self.mode == "all")
                self._show_or_write(message)
                self._places.clear()
                self._rich.clear()
            else:
                self._clears.add(rank)
                self._rich.pop(rank, None)
            return
        if self.mode == "all":
            self._display_in_all(rank, message, kind, now, in_words=last)
            return
        if rank == self.lead:
            for stream in STREAMS:
                self._release(stream, now)
            if not last:
                self._show_or_write(message)
        if kind == "display_data" and self.mode == "merged" and not self._alone:
            text = message.get("data", {}).get("text/plain", "").rstrip("\n")
            what = None
            if rank != self.lead and self._show is not None and not message.get("data", {}).keys() <= {"text/plain"}:
                what, text = self._of_its_own(rank, message, text)
            self._folders["stdout"].add(rank, [text], now, key=_key(message), what=what)
            if rank != self.lead:
                self._release("stdout", now)
        elif kind == "update_display_data" and rank != self.lead and self.mode == "merged":
            self._update(rank, message)

    def _of_its_own(self, rank: int, message: dict[str, Any], text: str) -> tuple[dict[str, Any] | None, str]:
        """What is shown of another rank's display where rank 0 has none like it, and its text."""
        self._rich[rank] = self._rich.get(rank, 0) + 1
        if self._rich[rank] > RICH:
            return None, f"{text} (more than {RICH} displays: run with --output all to see it)"
        own = f"nbdist-{uuid.uuid4().hex}"
        what = {"metadata": {}, **message, "msg_type": "display_data", "transient": {"display_id": own}}
        what["clears"] = rank in self._clears
        self._clears.discard(rank)
        name = message.get("transient", {}).get("display_id")
        if name is not None:
            what["transient"] = {**message["transient"], "display_id": f"{name}-rank{rank}"}
            self._named[f"{name}-rank{rank}"] = what
        return what, text

    def _update(self, rank: int, message: dict[str, Any]) -> None:
        what = self._named.get(f"{message.get('transient', {}).get('display_id')}-rank{rank}")
        if what is None:
            return
        what["data"], what["metadata"] = message.get("data", {}), message.get("metadata", {})
        if what.get("shown") and self._show is not None:
            self._show({**what, "msg_type": "update_display_data"})

    def _display_in_all(self, rank: int, message: dict[str, Any], kind: str, now: float, in_words: bool) -> None:
        message = {**message, "msg_type": kind}
        name = message.get("transient", {}).get("display_id")
        if name is not None and rank != self.lead:  # each rank's is a display of its own
            message["transient"] = {**message["transient"], "display_id": f"{name}-rank{rank}"}
        text = message.get("data", {}).get("text/plain", "")
        # What may be updated later is not one with the others'.
        key = _key(message) + (f"r{rank}r" if name is not None or kind != "display_data" else "")
        what = None if in_words and message.get("data", {}).keys() <= {"text/plain"} else message
        self._folders["stdout"].add(rank, [text], now, key=key, what=what)
        self._release("stdout", now)

    def _show_or_write(self, message: dict[str, Any]) -> None:
        if self._show is not None:
            self._show(message)
        else:
            text = message.get("data", {}).get("text/plain", "")
            if text:
                self._write("stdout", text + "\n")
                self._at_start["stdout"] = True

    # ---------------------------------------------------------------- ours

    def notice(self, line: str) -> None:
        """A line of our own."""
        self._release("stderr", time.monotonic())
        self._write_lines("stderr", f"nbdist: {line}\n")

    def tick(self) -> None:
        """Nothing came for a while: lines that waited for rank 0 to finish its own wait no longer."""
        now = time.monotonic()
        for stream, folder in self._folders.items():
            if folder.waiting:
                self._release(stream, now)

    def finish(self) -> None:
        """No more comes, for now: unfinished lines are shown as well, and what was folded is told."""
        now = time.monotonic()
        for rank, stream in sorted(self._rows, key=lambda one: (one[0] != self.lead, one)):
            rows = self._rows[rank, stream]
            self._folders[stream].add(rank, rows.rest(), now, rows.moved)
        for stream in STREAMS:
            self._release(stream, now, force=True)
        self._rich.clear()
        told = folded(self._folders.values(), self._each)
        if told:
            self._write_lines("stdout", told + "\n")

    @property
    def ahead(self) -> frozenset[int]:
        """Ranks that are far ahead of others that write the same: their text had better wait."""
        now = time.monotonic()
        far = [folder.ahead(partial(self._pace[stream].floods, now=now)) for stream, folder in self._folders.items()]
        return frozenset().union(*far)

    @property
    def held(self) -> int:
        """Letters that are kept."""
        return sum(folder.held for folder in self._folders.values())

    @property
    def waiting(self) -> bool:
        """Whether something is held back that `tick` will let go in time."""
        return any(folder.waiting for folder in self._folders.values())


def spans(ranks: Iterable[int]) -> str:
    """(0, 1, 2, 5) as 0-2,5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def folded(folders: Iterable[Folder], each: str = "") -> str:
    """One line on lines that were taken as equal and are not quite, since the last time; empty when there are none."""
    sums: dict[int, Folded] = {}
    for folder in folders:
        for rank, one in folder.folded.items():
            total = sums.setdefault(rank, Folded())
            total.lines += one.lines
            total.why |= one.why
        folder.folded.clear()
    if not sums:
        return ""
    why = " and ".join(sorted(set().union(*(one.why for one in sums.values())))) or "spaces"
    counts = sorted({one.lines for one in sums.values()})
    lines = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    word = "line" if counts[-1] == 1 else "lines"
    return f"[{spans(sums)}] the same {lines} {word} but for {why}" + (f" ({each})" if each else "")


def _key(message: dict[str, Any]) -> str:
    """By what displays are compared: all that they show."""
    data = message.get("data", {})
    start = DISPLAY + alike.key(data.get("text/plain", "")[:200], of_display=True) + END
    if data.keys() <= {"text/plain"}:
        return start + data.get("text/plain", "")[200:]
    page = data.get("text/html")
    if data.keys() <= {"text/plain", "text/html"} and isinstance(page, str) and len(page) <= alike.LONGEST // 2:
        return start + alike.key(page, of_display=True)
    if isinstance(picture := data.get("image/svg+xml"), str):
        data = {**data, "image/svg+xml": _OF_ONE_DRAWING.sub("", picture)}
    return start + hashlib.blake2b(pickle.dumps(sorted(data.items()), 5), digest_size=16).hexdigest()


def _write_here(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()
