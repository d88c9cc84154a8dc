"""What only some operating systems can do, each with the nearest means where it is missing; docs/platforms.md tells the
difference.

Means are chosen by what is there, never by the system's name. `NBDIST_WITHOUT=pidfd,prctl` makes nbdist do without
these, so that the nearest means can be tried on a machine that has them all.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

LOOK_EVERY = 0.2  # seconds between looks at a process that nobody tells us of

WINDOWS = (
    "nbdist does not run on Windows: it forks ranks, signals them and hands them open files over Unix sockets, and "
    "Windows has none of these. Use WSL 2: run `wsl --install` once, and start Jupyter inside of it"
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def refuse_windows() -> None:
    """Raises:
    OSError: this is Windows; the message says why, and what to do.
    """
    if sys.platform == "win32":
        raise OSError(WINDOWS)


_THERE: dict[str, Callable[[], bool]] = {
    "pidfd": lambda: hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"),
    "kqueue": lambda: hasattr(select, "kqueue"),
    "prctl": lambda: hasattr(ctypes.CDLL(None), "prctl"),
    "memfd": lambda: hasattr(os, "memfd_create"),
    "proc": lambda: os.path.exists("/proc/self/stat"),
}


@functools.cache
def have(means: str) -> bool:
    """Whether this system has it: "pidfd", "kqueue", "prctl", "memfd" or "proc"."""
    return means not in os.environ.get("NBDIST_WITHOUT", "").split(",") and _THERE[means]()


def missing() -> list[str]:
    """What is done by the nearest means here; kqueue is one of these."""
    return [means for means in _THERE if means != "kqueue" and not have(means)]


# ---------------------------------------------------------------- processes


class Handle:
    """One process, and never another one that was given its number later.

    By pidfd; else by the number together with the time at which the process began.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.fd, self._process = pid, -1, None
        if have("pidfd"):
            with suppress(ProcessLookupError):
                self.fd = os.pidfd_open(pid)
        else:
            import psutil

            with suppress(psutil.Error):
                self._process = psutil.Process(pid)

    def ended(self) -> bool:
        if self.fd >= 0:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        if self._process is None:
            return True
        import psutil

        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    def signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        with suppress(OSError):
            if self.fd >= 0:
                signal.pidfd_send_signal(self.fd, number)
            elif not self.ended():
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def wait_for_one(handles: Sequence[Handle]) -> None:
    """Wait until one of these processes has ended: told by pidfd or kqueue, else seen within LOOK_EVERY."""
    if any(handle.ended() for handle in handles):
        return
    if have("pidfd"):
        poll = select.poll()
        for handle in handles:
            poll.register(handle.fd, select.POLLIN)
        poll.poll()
    elif have("kqueue"):
        _wait_by_kqueue([handle.pid for handle in handles])
    else:
        while not any(handle.ended() for handle in handles):
            time.sleep(LOOK_EVERY)


def _wait_by_kqueue(pids: Sequence[int]) -> None:
    kqueue: Any = select  # not in the stubs of a system without it
    queue = kqueue.kqueue()
    try:
        for pid in pids:
            event = kqueue.kevent(
                pid, kqueue.KQ_FILTER_PROC, kqueue.KQ_EV_ADD | kqueue.KQ_EV_ONESHOT, kqueue.KQ_NOTE_EXIT
            )
            try:
                queue.control([event], 0)
            except ProcessLookupError:
                return
        queue.control(None, 1)
    finally:
        queue.close()


def end_with_parent() -> bool:
    """SIGKILL for this process when its parent ends, without any Python having to run. False: must be watched for."""
    return have("prctl") and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0


def adopt_orphans() -> bool:
    """Descendants whose parent ends become children of this process. False: they become init's, and are lost sight
    of.
    """
    return have("prctl") and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def parents() -> dict[int, tuple[int, str]]:
    """Every process of this machine: pid -> (parent's pid, state letter; "Z" for one that has ended)."""
    return _parents_by_proc() if have("proc") else _parents_by_psutil()


def _parents_by_proc() -> dict[int, tuple[int, str]]:
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rsplit(")", 1)[1].split()[:2]
            except OSError:  # it ended while we looked
                continue
            table[int(entry)] = (int(parent), state)
    return table


def _parents_by_psutil() -> dict[int, tuple[int, str]]:
    import psutil

    return {
        process.info["pid"]: (
            process.info["ppid"] or 0,
            "Z" if process.info["status"] == psutil.STATUS_ZOMBIE else "R",
        )
        for process in psutil.process_iter(["pid", "ppid", "status"])
    }


# ---------------------------------------------------------------- memory and network


def memory_file(name: str) -> int:
    """A descriptor of an empty file that has no name in any folder: in memory where that can be had."""
    if have("memfd"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    file, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return file


@functools.cache
def loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def give_memory_back() -> None:
    """What was freed in this process goes back to the system; nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
