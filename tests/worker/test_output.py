"""What a rank writes arrives whole and in order, whoever writes at the same time."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nbdist.launchers.reader import Event, Reader
from nbdist.shipping.link import Link
from nbdist.shipping.wire import ERR, OUT, PIECE, RECORD
from nbdist.worker.output import RecordStream

MARK = b"\0nbdist" + secrets.token_hex(8).encode() + b"\n"


class Pipes:
    """A reader with the three pipes of one rank; the writing ends are here."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        ends = [os.pipe() for _ in range(3)]
        self.stdout, self.stderr, self.records = (end[1] for end in ends)
        self.link = Link(here)
        self.reader = Reader([self.link], [tuple(end[0] for end in ends)], MARK)  # type: ignore[list-item]
        self.reader.listening = True

    def close(self) -> None:
        for fd in (self.stdout, self.stderr, self.records):
            os.close(fd)
        self.there.close()
        self.reader.end()
        self.reader.thread.join(10)
        assert not self.reader.thread.is_alive()
        self.link.close()

    def events(self) -> list[Event]:
        """Everything, up to the end of the pipes."""
        self.close()
        found = []
        while (event := self.reader.next(0)) is not None:
            found.append(event)
        return found


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    yield Pipes()


def text(events: list[Event], stream: str) -> bytes:
    return b"".join(event.value for event in events if event.what == "text" and event.stream == stream)


def streams(pipes: Pipes) -> tuple[RecordStream, RecordStream]:
    return RecordStream(pipes.records, OUT, sys.__stdout__), RecordStream(pipes.records, ERR, sys.__stderr__)  # type: ignore[arg-type]


def test_stdout_and_stderr_keep_their_order(pipes: Pipes) -> None:
    out, err = streams(pipes)
    for number in range(200):
        print(number, file=out if number % 3 else err)
    order = [line for event in pipes.events() if event.what == "text" for line in event.value.split()]
    assert order == [b"%d" % number for number in range(200)]


def test_threads_and_forks_never_tear(pipes: Pipes) -> None:
    """Lines of 4000 bytes by four threads and two forked children at once, many times the pipe's size together."""
    out, _ = streams(pipes)
    each, size = 50, PIECE - 1

    def write(who: bytes) -> None:
        for _ in range(each):
            out.write((who * size).decode() + "\n")

    children = []
    for who in (b"a", b"b"):
        pid = os.fork()
        if not pid:
            write(who)
            os._exit(0)
        children.append(pid)
    threads = [threading.Thread(target=write, args=(who,)) for who in (b"c", b"d", b"e", b"f")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in children:
        os.waitpid(pid, 0)
    lines = text(pipes.events(), "stdout").splitlines()
    assert len(lines) == 6 * each
    assert all(len(line) == size and len(set(line)) == 1 for line in lines)


def test_long_text_and_every_character(pipes: Pipes) -> None:
    out, _ = streams(pipes)
    whole = "äöü€🙂\ud800" * 5000
    assert out.write(whole) == len(whole)
    out.buffer.write(b"bytes\n")
    assert text(pipes.events(), "stdout") == whole.encode("utf-8", "surrogatepass") + b"bytes\n"


def test_a_mark_in_pieces_is_found(pipes: Pipes) -> None:
    """Reads cut where they like: text around the mark arrives, the mark does not."""
    for data in (b"before" + MARK[:5], MARK[5:] + b"after", b"\0nb", b"dist no mark\n", MARK):
        os.write(pipes.stdout, data)
    os.write(pipes.records, RECORD.pack(OUT, 5, 0) + b"wh")
    os.write(pipes.records, b"ole")
    events = pipes.events()
    assert text(events, "stdout").replace(b"whole", b"") == b"beforeafter\0nbdist no mark\n"
    assert b"whole" in text(events, "stdout")
    assert sum(event.what == "mark" for event in events) == 2


def test_everything_of_a_cell_is_there_before_its_marks(pipes: Pipes) -> None:
    """Python's, C's without a newline, a subprocess's and a forked child's, and a display larger than a pipe."""
    script = """
import ctypes, os, subprocess, sys
from nbdist.worker.output import Output
stdout, stderr, records, mark = *map(int, sys.argv[1:4]), bytes.fromhex(sys.argv[4])
output = Output(stdout, stderr, records)
print("python")
sys.__stdout__.write("native python")
ctypes.CDLL(None).printf(b"printf")
subprocess.run(["echo", "subprocess"])
subprocess.run(["echo", "by fileno"], stdout=sys.stdout)
pid = os.fork()
if not pid:
    print("child")
    os._exit(0)
os.waitpid(pid, 0)
output.display({"data": {"text/plain": "d" * 100_000}})
output.finish(mark)
print("after")
"""
    fds = [pipes.stdout, pipes.stderr, pipes.records]
    arguments = [sys.executable, "-c", script, *map(str, fds), MARK.hex()]
    subprocess.run(arguments, pass_fds=fds, check=True)
    events = pipes.events()
    marks = [index for index, event in enumerate(events) if event.what == "mark"]
    assert len(marks) == 3
    shown = text(events, "stdout")
    for words in (b"python", b"native python", b"printf", b"subprocess", b"by fileno", b"child", b"after"):
        assert words in shown, words
    displays = [event.value for event in events if event.what == "display"]
    assert displays == [{"data": {"text/plain": "d" * 100_000}}]
    after = next(index for index, event in enumerate(events) if event.what == "text" and b"after" in event.value)
    assert sum(mark < after for mark in marks) >= 1
    last = max(i for i, e in enumerate(events) if e.what == "text" and b"subprocess" in e.value)
    assert last < max(marks)


def test_what_a_stream_is_asked(pipes: Pipes) -> None:
    out, err = streams(pipes)
    assert (out.name, err.name) == ("<stdout>", "<stderr>")
    assert out.writable() and not out.isatty() and out.encoding == "utf-8"
    with pytest.raises(TypeError, match="must be str, not bytes"):
        out.write(b"bytes")  # type: ignore[arg-type]
    pipes.close()
