"""Framed messages with open files over an inherited Unix socket: what the notebook, the supervisor and the ranks
talk through.

A message is a small picklable tuple, a blob of bytes that is not copied, and any number of file descriptors. Both
ends were made by
`socket.socketpair`, so there is nothing to connect to and nothing listens.
"""

from __future__ import annotations

import array
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_HEAD = struct.Struct("<IQI")  # bytes of the pickled tuple, bytes of the blob, number of descriptors
_FDS_A_MESSAGE = 250  # the kernel refuses more than 253 in one SCM_RIGHTS message


class LinkClosed(ConnectionError):
    """The other end is gone."""


@dataclass
class Message:
    kind: str
    fields: dict[str, Any]
    blob: bytes = b""
    files: list[int] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]


class Link:
    """One end. `send` may be called from several threads; `receive` from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int) -> Link:
        return cls(socket.socket(fileno=fd))

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """This end as a Link, and the socket to hand to another process."""
        here, there = socket.socketpair()
        return cls(here), there

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, kind: str, blob: bytes = b"", files: Sequence[int] = (), /, **fields: Any) -> None:
        """Send one message; the files stay the caller's.

        Raises:
            LinkClosed: the other end is gone.
        """
        small = pickle.dumps((kind, fields), protocol=5)
        try:
            with self._sending:
                self.sock.sendall(_HEAD.pack(len(small), len(blob), len(files)) + small)
                if blob:
                    self.sock.sendall(blob)
                for start in range(0, len(files), _FDS_A_MESSAGE):
                    fds = array.array("i", files[start : start + _FDS_A_MESSAGE])
                    self.sock.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except OSError as error:
            raise LinkClosed(f"the other end is gone ({error})") from error

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            LinkClosed: the other end is gone.
        """
        try:
            size, blob_size, count = _HEAD.unpack(self._exactly(_HEAD.size))
            kind, fields = pickle.loads(self._exactly(size))
            blob = self._exactly(blob_size) if blob_size else b""
            files: list[int] = []
            while len(files) < count:
                want = min(_FDS_A_MESSAGE, count - len(files))
                fds = array.array("i")
                space = socket.CMSG_SPACE(want * fds.itemsize)
                data, ancillary, _, _ = self.sock.recvmsg(1, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
                if not data:
                    raise LinkClosed("the other end is gone")
                for level, type_, raw in ancillary:
                    if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
                        fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                if not fds:
                    raise LinkClosed("descriptors were lost on the way: this process has no room for more open files")
                files.extend(fds)
        except OSError as error:
            raise error if isinstance(error, LinkClosed) else LinkClosed(str(error)) from error
        return Message(kind, fields, blob, files)

    def _exactly(self, size: int) -> bytes:
        if size <= 65536:
            data = self.sock.recv(size, socket.MSG_WAITALL)
            if len(data) == size:
                return data
            if not data:
                raise LinkClosed("the other end is gone")
        else:
            data = b""
        whole = bytearray(size)
        whole[: len(data)] = data
        view, got = memoryview(whole), len(data)
        while got < size:
            n = self.sock.recv_into(view[got:])
            if not n:
                raise LinkClosed("the other end is gone")
            got += n
        return bytes(whole)
