"""What a rank writes, on its way to the notebook: ordered, complete, and in whole pieces.

Three pipes, read by the notebook: file descriptors 1 and 2 carry what native code and subprocesses write; the third
carries *records*, in which Python's stdout, stderr and displays keep their order. A record is one write of at most
PIPE_BUF bytes, which the kernel keeps in one piece, so threads and forked workers (DataLoader) cannot tear each
other's. A record says which cell wrote it; what comes by descriptors 1 and 2 cannot, and counts as the running cell's.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import itertools
import os
import pickle
import struct
import sys
from typing import Any

from nbdist.shipping.wire import DISPLAY, DISPLAY_PART, ERR, MARK, OUT, PIECE, RECORD
from nbdist.worker import cells
from nbdist.worker.keyboard import NoKeyboard


def record(fd: int, kind: bytes, body: bytes) -> None:
    os.write(fd, RECORD.pack(kind, len(body), cells.current()) + body)


class RecordStream(io.TextIOBase):
    """Stands for sys.stdout or sys.stderr; `fileno()` is the native descriptor, so subprocesses may inherit it."""

    encoding = "utf-8"
    errors = "surrogatepass"

    def __init__(self, fd: int, kind: bytes, native: io.TextIOBase) -> None:
        self._fd, self._kind, self._native = fd, kind, native
        self._buffer = _Bytes(self)

    @property
    def name(self) -> str:
        return "<stdout>" if self._kind == OUT else "<stderr>"

    @property
    def buffer(self) -> Any:
        """For code that writes bytes: they go out as text, in order."""
        return self._buffer

    def fileno(self) -> int:
        return self._native.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        body = text.encode("utf-8", "surrogatepass")
        if len(body) <= PIECE:
            if body:
                record(self._fd, self._kind, body)
        else:
            start = 0
            while start < len(body):  # never in the middle of a letter: another thread's may come between
                end = start + PIECE
                while end < len(body) and body[end] & 0xC0 == 0x80:
                    end -= 1
                record(self._fd, self._kind, body[start:end])
                start = end
        return len(text)

    def flush(self) -> None:
        pass  # every write is on its way already


class _Bytes(io.RawIOBase):
    def __init__(self, stream: RecordStream) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        body = bytes(data)
        self._stream.write(self._decoder.decode(body))
        return len(body)


class Output:
    """The three pipes of this rank."""

    def __init__(self, stdout: int, stderr: int, records: int) -> None:
        self.records = records
        self._libc = ctypes.CDLL(None)
        self._numbers = itertools.count()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdin = NoKeyboard(open(0, "rb", closefd=False))  # noqa: SIM115
        native_out = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
        native_err = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        vars(sys).update(__stdin__=sys.stdin, __stdout__=native_out, __stderr__=native_err)
        self._native = (native_out, native_err)
        self.stdout = RecordStream(records, OUT, native_out)
        self.stderr = RecordStream(records, ERR, native_err)
        self.install()

    def install(self) -> None:
        """At the start of each cell: a cell may have put something else in their place."""
        sys.stdout, sys.stderr = self.stdout, self.stderr

    def display(self, message: dict[str, Any]) -> None:
        """Send a display (data, metadata, transient ...) in as many pieces as it takes."""
        body, number = pickle.dumps(message, protocol=5), struct.pack("<Q", next(self._numbers))
        pieces = [body[start : start + PIECE - 8] for start in range(0, len(body), PIECE - 8)]
        for piece in pieces[:-1]:
            record(self.records, DISPLAY_PART, number + piece)
        record(self.records, DISPLAY, number + pieces[-1])

    def finish(self, mark: bytes) -> None:
        """Everything written so far is in the pipes, and behind it the mark by which the notebook knows."""
        for stream in self._native:
            stream.flush()
        self._libc.fflush(None)
        os.write(1, mark)
        os.write(2, mark)
        record(self.records, MARK, mark)
