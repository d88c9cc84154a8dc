"""Everything the ranks of a pool say, read by one thread, always, so that no rank ever waits for the notebook.

Control messages and text come out in one queue while a cell is running; text that comes when none is, or that an
earlier cell's threads wrote, goes to `late`.
"""

from __future__ import annotations

import collections
import os
import pickle
import queue
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbdist.shipping.link import Link, LinkClosed, Message
from nbdist.shipping.wire import DISPLAY, ERR, MARK, OUT, RECORD

# Bytes of text that may wait for the notebook to show them; past that the middle is dropped, and it is said.
MOST_PENDING = 64 << 20


@dataclass
class Event:
    """`what`: "control" (message), "text" (stream "stdout" or "stderr", data), "display" (message), "mark",
    "closed" (a pipe), "dropped". `cell` is the number of the cell that wrote a text or display, 0 where nobody knows.
    """

    rank: int
    what: str
    value: Any = None
    stream: str = ""
    cell: int = 0


_WAKE = Event(-1, "wake")


class Reader:
    """The reading thread of one pool.

    Args:
        links: control links, one a rank.
        pipes: (stdout, stderr, records) descriptors, one triple a rank; owned and closed by the reader.
        mark: the bytes that end a cell's output on each pipe.
    """

    def __init__(self, links: list[Link], pipes: list[tuple[int, int, int]], mark: bytes) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._urgent: collections.deque[Event] = collections.deque()  # what must not wait behind a flood of text
        self.listening = False  # a cell is running, and its runner takes the events
        self.running = 0  # the number of that cell; what another one wrote does not go to the runner
        self.late: Callable[[Event], None] | None = None
        # Answers to these queries go here, past the runner of a cell: asked by another thread.
        self.asides: dict[int, queue.SimpleQueue[tuple[int, Any]]] = {}
        self._mark = mark
        self._put_bytes = 0  # written by the reading thread only
        self._taken_bytes = 0  # and this by the taking one
        self._dropped = 0
        self._rest: dict[int, bytes] = {}
        self._displays: dict[tuple[int, bytes], list[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        for rank, link in enumerate(links):
            self._selector.register(link, selectors.EVENT_READ, (rank, "control"))
        for rank, (stdout, stderr, records) in enumerate(pipes):
            for fd, kind in ((stdout, "stdout"), (stderr, "stderr"), (records, "records")):
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ, (rank, kind))
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, (-1, "end"))
        self.thread = threading.Thread(target=self._read, daemon=True, name="nbdist-reader")
        self.thread.start()

    def end(self) -> None:
        """Stop reading; what is in the pipes by now has been read."""
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self.thread:
            self.thread.join(2)

    def next(self, timeout: float) -> Event | None:
        """The next event, None when there is none within so many seconds. Messages and the stop button come first."""
        end = time.monotonic() + timeout
        while True:
            if self._urgent:
                return self._urgent.popleft()
            try:
                left = end - time.monotonic()
                event = self._events.get(timeout=left) if left > 0 else self._events.get_nowait()
            except queue.Empty:
                return self._urgent.popleft() if self._urgent else None
            if event is not _WAKE:
                return event

    def put_urgent(self, event: Event) -> None:
        """May be called in a signal handler: both puts are reentrant."""
        self._urgent.append(event)
        self._events.put(_WAKE)

    def taken(self, event: Event) -> None:
        """The runner has shown this text."""
        if event.what == "text":
            self._taken_bytes += len(event.value)

    def _put(self, event: Event) -> None:
        shows = event.what in ("text", "display")
        if shows and self.late is not None and (not self.listening or event.cell not in (0, self.running)):
            self.late(event)
            return
        if event.what == "text":
            if self._put_bytes - self._taken_bytes > MOST_PENDING:
                self._dropped += len(event.value)
                return
            self._put_bytes += len(event.value)
        elif event.what in ("control", "closed"):
            aside = self.asides.get(event.value.fields.get("query")) if event.what == "control" else None
            if aside is not None:
                aside.put((event.rank, event.value["answer"]))
            else:
                self.put_urgent(event)
            return
        self._tell_dropped(event.rank)  # also where nothing follows: at the end of a cell
        self._events.put(event)

    def _tell_dropped(self, rank: int) -> None:
        if self._dropped:
            self._events.put(Event(rank, "dropped", self._dropped))
            self._dropped = 0

    def _read(self) -> None:
        ended = False
        while self._selector.get_map():
            ready = self._selector.select(0 if ended else None)
            if ended and not ready:
                break
            for key, _ in ready:
                rank, kind = key.data
                if kind == "end":
                    ended = True
                    self._selector.unregister(key.fileobj)
                elif kind == "control":
                    self._read_control(key.fileobj, rank)
                else:
                    self._read_pipe(key.fd, rank, kind)
        for key in list(self._selector.get_map().values()):
            if key.data[1] not in ("control", "end"):
                os.close(key.fd)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read_control(self, link: Any, rank: int) -> None:
        try:
            message: Message = link.receive()
        except LinkClosed:
            self._selector.unregister(link)
            self._put(Event(rank, "closed", "control"))
            return
        self._put(Event(rank, "control", message))

    def _read_pipe(self, fd: int, rank: int, kind: str) -> None:
        try:
            data = os.read(fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
            rest = self._rest.pop(fd, b"")
            if rest and kind != "records":
                self._put(Event(rank, "text", rest, kind))
            self._put(Event(rank, "closed", kind))
            return
        data = self._rest.pop(fd, b"") + data
        rest = self._records(rank, data) if kind == "records" else self._native(rank, kind, data)
        if rest:
            self._rest[fd] = rest

    def _native(self, rank: int, stream: str, data: bytes) -> bytes:
        mark = self._mark
        while (found := data.find(mark)) >= 0:
            if found:
                self._put(Event(rank, "text", data[:found], stream))
            self._put(Event(rank, "mark"))
            data = data[found + len(mark) :]
        for size in range(min(len(mark) - 1, len(data)), 0, -1):  # a mark may be cut in two by a read
            if data.endswith(mark[:size]):
                if data[:-size]:
                    self._put(Event(rank, "text", data[:-size], stream))
                return data[-size:]
        if data:
            self._put(Event(rank, "text", data, stream))
        return b""

    def _records(self, rank: int, data: bytes) -> bytes:
        at, end = 0, len(data)
        # A cell that prints in a loop makes thousands of records in one read: they are one event.
        texts: list[bytes] = []
        now: tuple[bytes, int] = (b"", 0)  # their kind and cell

        def flush() -> None:
            if texts:
                self._put(Event(rank, "text", b"".join(texts), "stdout" if now[0] == OUT else "stderr", now[1]))
                texts.clear()

        while end - at >= RECORD.size:
            kind, size, cell = RECORD.unpack_from(data, at)
            if end - at < RECORD.size + size:
                break
            body = data[at + RECORD.size : at + RECORD.size + size]
            at += RECORD.size + size
            if kind in (OUT, ERR):
                if (kind, cell) != now:
                    flush()
                    now = (kind, cell)
                texts.append(body)
                continue
            flush()
            if kind == MARK:
                self._put(Event(rank, "mark"))
            else:
                parts = self._displays.setdefault((rank, body[:8]), [])
                parts.append(body[8:])
                if kind == DISPLAY:
                    del self._displays[rank, body[:8]]
                    self._put(Event(rank, "display", pickle.loads(b"".join(parts)), cell=cell))
        flush()
        return data[at:]
