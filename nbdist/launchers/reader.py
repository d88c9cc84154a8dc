"""Everything the ranks of a pool say, read by one thread. Control messages are read always; text as far as there is
room for it: a rank that floods waits in its `print` until the notebook has shown what came before, as with a pipe to
a slow reader, and nothing is lost. It does not wait once Stop was pressed, or the cell has failed.

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

# What may wait of one rank's text and displays for the notebook to show it; past that the rank waits, or, after a Stop,
# the text is dropped, and it is said. In bytes, and as many for each line.
MOST_PENDING, A_LINE = 4 << 20, 40
A_LOOK = 0.01  # seconds between looks whether there is room again


@dataclass
class Event:
    """`what`: "control" (message), "text" (stream "stdout" or "stderr", data), "display" (message), "mark",
    "closed" (a pipe), "dropped" (bytes of text). `cell` is the number of the cell that wrote a text or display, 0 where
    nobody knows; `cost` is what it takes of MOST_PENDING.
    """

    rank: int
    what: str
    value: Any = None
    stream: str = ""
    cell: int = 0
    cost: int = 0


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
        self._put_cost = [0] * len(links)  # of each rank; written by the reading thread only
        self._taken_cost = [0] * len(links)  # and this by the taking one
        self._pipes = pipes
        self._closed: set[int] = set()  # pipes
        self._paused: set[int] = set()  # ranks whose pipes are not read for now
        self.held: frozenset[int] = frozenset()  # ranks that are ahead of others, and wait for them
        self.dropping = False  # nobody waits: what there is no room for is dropped
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
                if event.cost:
                    self._taken_cost[event.rank] += event.cost
                return event

    def hold(self, ranks: frozenset[int]) -> None:
        """The text of these ranks is left in their pipes until this is called without them."""
        if ranks != self.held:
            self.held = ranks
            os.write(self._wake_write, b"h")

    def drop_what_is_too_much(self) -> None:
        """From here on no rank waits for the notebook. May be called in a signal handler."""
        self.dropping = True

    def put_urgent(self, event: Event) -> None:
        """May be called in a signal handler: both puts are reentrant."""
        self._urgent.append(event)
        self._events.put(_WAKE)

    def _put(self, event: Event) -> None:
        shows = event.what in ("text", "display")
        if shows and self.late is not None and (not self.listening or event.cell not in (0, self.running)):
            self.late(event)
            return
        if shows:
            if event.what == "text":
                if self.dropping and self._full(event.rank):
                    self._dropped += len(event.value)
                    return
                event.cost = len(event.value) + A_LINE * event.value.count(b"\n")
            self._put_cost[event.rank] += event.cost
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
            ready = self._selector.select(0 if ended else A_LOOK if self._paused else None)
            if ended and not ready:
                break
            for key, _ in ready:
                rank, kind = key.data
                if kind == "end":
                    if b"x" in os.read(key.fd, 4096):
                        ended = True
                        self._selector.unregister(key.fileobj)
                elif kind == "control":
                    self._read_control(key.fileobj, rank)
                else:
                    self._read_pipe(key.fd, rank, kind)
            self._pause_and_go_on()
        for fd in [fd for rank in self._paused for fd in self._pipes[rank] if fd not in self._closed]:
            os.close(fd)
        for key in list(self._selector.get_map().values()):
            if key.data[1] not in ("control", "end"):
                os.close(key.fd)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _full(self, rank: int) -> bool:
        return self._put_cost[rank] - self._taken_cost[rank] > MOST_PENDING

    def _pause_and_go_on(self) -> None:
        """Leave alone the pipes of ranks for whose text there is no room, or that are far ahead of others."""
        wait = set()
        if self.listening and not self.dropping:
            wait = {rank for rank in range(len(self._pipes)) if rank in self.held or self._full(rank)}
        for rank in wait ^ self._paused:
            for fd, kind in zip(self._pipes[rank], ("stdout", "stderr", "records"), strict=True):
                if fd not in self._closed:
                    if rank in wait:
                        self._selector.unregister(fd)
                    else:
                        self._selector.register(fd, selectors.EVENT_READ, (rank, kind))
        self._paused = wait

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
            self._closed.add(fd)
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
                    body = b"".join(parts)
                    self._put(Event(rank, "display", pickle.loads(body), cell=cell, cost=len(body)))
        flush()
        return data[at:]
