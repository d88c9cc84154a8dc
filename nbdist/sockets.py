"""The TCP sockets of gloo and of the store: noted when they appear, shut down to free a rank that waits in them.

SIGINT does not free a thread from a gloo collective, nor does `abort()`. Shutting its sockets down does, within 10
ms, and leaves the process alone.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import NamedTuple

from nbdist import system

ESTABLISHED = "01"


class Connection(NamedTuple):
    local: int  # ports
    remote: int
    state: str


def connections() -> dict[int, Connection]:
    """File descriptor -> connection, for the TCP sockets of this process (by /proc, else by asking each
    descriptor).
    """
    if not system.have("proc"):
        return _connections_by_asking()
    inodes: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes[target[8:-1]] = int(fd)
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}") as file:
                next(file)
                for line in file:
                    part = line.split()
                    if part[9] in inodes:
                        local, remote = (int(address.rsplit(":", 1)[1], 16) for address in part[1:3])
                        found[inodes[part[9]]] = Connection(local, remote, part[3])
        except OSError:
            continue
    return found


def _connections_by_asking() -> dict[int, Connection]:
    found = {}
    for fd in (int(name) for name in os.listdir("/dev/fd") if name.isdigit()):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # a copy of a user's file that is closed drops its locks
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    found[fd] = Connection(sock.getsockname()[1], sock.getpeername()[1], ESTABLISHED)
        except OSError:
            continue
    return found


def shut_down(fd: int, noted: Connection) -> bool:
    """Shut this connection down, if the descriptor still is it.

    Duplicate first, compare on the duplicate, then shut down: gloo closes the descriptor by itself when its peer
        goes, and the number may
    belong to a file of the user's by the time we act on it.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    try:
        duplicate = socket.socket(fileno=copy)
    except OSError:  # a file: it says so by an error, and leaves the copy open
        os.close(copy)
        return False
    with duplicate:
        try:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if (duplicate.getsockname()[1], duplicate.getpeername()[1]) == noted[:2]:
                duplicate.shutdown(socket.SHUT_RDWR)
                return True
        except OSError:
            pass
    return False
