"""`--output tabs`: each rank's output in a place of its own, which the saved notebook keeps as plain HTML."""

from __future__ import annotations

import codecs
import collections
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nbdist.launchers.rows import Rows
from nbdist.magics import html
from nbdist.magics.output import Beneath, publish

EVERY = 0.4  # seconds between updates while it runs
LIVE_LINES = 60  # of all ranks together, while it runs
LIVE_WIDTH = 400  # letters of a line, while it runs
MOST_LINES, MOST_LETTERS = 20_000, 2_000_000  # of one rank that are kept (docs/output.md says so)
ALL_LETTERS = 8_000_000  # ... of all ranks together: they are one message, and in the notebook's file
MOST_SHOWN = 16 << 20  # bytes of one rank's displays that are kept


@dataclass
class _Part:
    """Text of one stream without anything between, or one display."""

    stream: str
    lines: collections.deque[str] = field(default_factory=collections.deque)
    rows: Rows = field(default_factory=Rows)
    message: dict[str, Any] | None = None
    size: int = 0

    def all_lines(self) -> list[str]:
        return [*self.lines, *self.rows.open()]


class Tab:
    """What one rank has shown."""

    def __init__(self, letters: int = MOST_LETTERS) -> None:
        """Args: letters: that are kept."""
        self._most_letters = letters
        self.parts: collections.deque[_Part] = collections.deque()
        self.dropped = self.dropped_displays = 0
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._lines = self._letters = self._bytes = 0
        self._named: dict[str, _Part] = {}
        self._clear = False  # with the next thing that comes

    def text(self, stream: str, data: bytes) -> None:
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if not text:
            return
        self._clear_now()
        part = self.parts[-1] if self.parts else None
        if part is None or part.stream != stream:
            part = _Part(stream)
            self.parts.append(part)
        for line in part.rows.feed(text):
            part.lines.append(line)
            self._lines += 1
            self._letters += len(line)
        self._bound()

    def display(self, message: dict[str, Any]) -> bool:
        """False: it updates a display that is not here."""
        if message["msg_type"] == "clear_output":
            self._clear = True
            if not message["wait"]:
                self._clear_now()
            return True
        name = message["transient"].get("display_id")
        size = sum(len(value) for value in message["data"].values() if isinstance(value, str | bytes))
        if message["msg_type"] == "update_display_data":
            part = self._named.get(name)
            if part is None:
                return False
            self._bytes += size - part.size
            part.message, part.size = message, size
        else:
            self._clear_now()
            part = _Part("", message=message, size=size)
            self.parts.append(part)
            self._bytes += size
            if name is not None:
                self._named[name] = part
        self._bound()
        return True

    def _clear_now(self) -> None:
        if self._clear:
            self._clear = False
            self.parts.clear()
            self._named.clear()
            self._lines = self._letters = self._bytes = 0

    def _bound(self) -> None:
        while (self._lines > MOST_LINES or self._letters > self._most_letters) and self._lines > 1:
            part = next(part for part in self.parts if part.lines)
            line = part.lines.popleft()
            self.dropped += 1
            self._lines -= 1
            self._letters -= len(line)
            if not part.lines and part is not self.parts[-1] and not part.rows.open():
                self.parts.remove(part)
        while self._bytes > MOST_SHOWN and sum(part.message is not None for part in self.parts) > 1:
            part = next(part for part in self.parts if part.message is not None)
            self.parts.remove(part)
            self.dropped_displays += 1
            self._bytes -= part.size

    @property
    def held(self) -> int:
        """Letters of text and bytes of displays that are kept."""
        return self._letters + self._bytes

    def last(self, count: int) -> list[str]:
        """So many last lines, displays in words."""
        lines: list[str] = []
        for part in reversed(self.parts):
            if part.message is not None:
                told = str(part.message["data"].get("text/plain", "")).splitlines()
            else:
                told = list(itertools.islice(reversed(part.lines), count))[::-1] + part.rows.open()
            lines = [*told[-count:], *lines]
            if len(lines) >= count:
                break
        return [line[:LIVE_WIDTH] for line in lines[-count:]]

    def gone(self) -> str:
        """What is no longer here, in words."""
        parts = []
        if self.dropped:
            parts.append(f"{self.dropped:,} earlier {'line' if self.dropped == 1 else 'lines'}")
        if self.dropped_displays:
            parts.append(f"{self.dropped_displays:,} earlier displays")
        if not parts:
            return ""
        return (
            f"{' and '.join(parts)} not kept: a tab holds the last {MOST_LINES:,} lines, {self._most_letters:,} "
            f"letters and {MOST_SHOWN >> 20} MiB of displays; --output merged shows all that rank 0 writes, all every "
            "rank's"
        )

    def html(self) -> str:
        gone = self.gone()
        pieces = [html.block([f"({gone})"])] if gone else []
        for part in self.parts:
            if part.message is not None:
                pieces.append(html.rich(part.message["data"], part.message.get("metadata") or {}))
            elif lines := part.all_lines():
                pieces.append(html.block(lines, part.stream))
        return "".join(pieces) or html.block(["(no output)"])

    def plain(self) -> str:
        gone = self.gone()
        lines = [f"({gone})"] if gone else []
        for part in self.parts:
            if part.message is not None:
                lines.append(str(part.message["data"].get("text/plain", "")))
            else:
                lines += part.all_lines()
        return html.uncoloured("\n".join(lines)) or "(no output)"


class TabsScreen:
    """A screen with a tab for each rank.

    While the cell runs its display is updated a few times a second with every rank's last lines; at the end it holds
    all that was kept, as `<details>` that open without a script.

    Args:
        lead: the rank whose tab is open at the end, and whose updates of other cells' displays count.
        ranks: those that run.
    """

    def __init__(self, shell: Any, lead: int, ranks: Iterable[int]) -> None:
        self.lead = lead
        self._shell = shell
        ranks = list(ranks)
        self._letters = min(MOST_LETTERS, ALL_LETTERS // max(1, len(ranks)))
        self._tabs = {rank: Tab(self._letters) for rank in ranks}
        self._name = f"nbdist-{uuid.uuid4().hex}"
        self._beneath = Beneath(shell)
        self._live = getattr(shell, "kernel", None) is not None  # a terminal prints each update anew
        self._show: Callable[[dict[str, Any]], None] = lambda message: publish(shell, message)
        self._is_shown = self._is_new = False
        self._last = time.monotonic() - EVERY / 2  # the first when every rank had the time to begin

    def text(self, rank: int, stream: str, data: bytes) -> None:
        self._tab(rank).text(stream, data)
        self._is_new = True
        self.tick()

    def display(self, rank: int, message: dict[str, Any]) -> None:
        message = {"msg_type": "display_data", "transient": {}, **message}
        if self._tab(rank).display(message):
            self._is_new = True
            self.tick()
        elif rank == self.lead:
            self._show(message)

    def _tab(self, rank: int) -> Tab:
        return self._tabs.setdefault(rank, Tab(self._letters))

    def notice(self, line: str) -> None:
        """A line of our own: below the tabs."""
        print(f"nbdist: {line}", file=sys.stderr)

    def tick(self) -> None:
        """Show what has come, a few times a second."""
        now = time.monotonic()
        if self._is_new and self._live and now - self._last >= EVERY:
            self._last, self._is_new = now, False
            count = max(2, min(12, LIVE_LINES // max(1, len(self._tabs))))
            tabs = {rank: html.block(tab.last(count)) for rank, tab in sorted(self._tabs.items())}
            page = "".join(f"<div><b>rank {rank}</b>{tab}</div>" for rank, tab in tabs.items())
            words = "\n".join(f"rank {rank}: {''.join(tab.last(1))}" for rank, tab in sorted(self._tabs.items()))
            self._put(page, words)

    @property
    def ahead(self) -> frozenset[int]:
        """No rank waits for another: they are not compared."""
        return frozenset()

    @property
    def held(self) -> int:
        """Letters and bytes that are kept."""
        return sum(tab.held for tab in list(self._tabs.values()))

    def finish(self) -> None:
        """The cell is over: everything that was kept."""
        if self._is_new or self._is_shown:
            pages, words = [], []
            for rank, tab in sorted(self._tabs.items()):
                start = " open" if rank == self.lead else ""
                name = f"<summary><b>rank {rank}</b></summary>"
                pages.append(f'<details{start} style="margin-bottom:2px;">{name}{tab.html()}</details>')
                words.append(f"rank {rank}\n{tab.plain()}")
            self._put("<div>" + "".join(pages) + "</div>", "\n\n".join(words))
        self._is_new = self._live = False
        self._show = self._beneath.display  # what comes now comes late

    def _put(self, page: str, words: str) -> None:
        self._show(
            {
                "msg_type": "update_display_data" if self._is_shown else "display_data",
                "data": {"text/html": page, "text/plain": words},
                "metadata": {},
                "transient": {"display_id": self._name},
            }
        )
        self._is_shown = True
