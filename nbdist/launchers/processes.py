"""Processes below a process: finding them, and ending all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from nbdist import system


def descendants(root: int) -> list[int]:
    """Living processes below `root`, zombies left out."""
    table, found, todo = system.parents(), [], [root]
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    while todo:
        for pid in children.get(todo.pop(), ()):
            todo.append(pid)
            if table[pid][1] != "Z":
                found.append(pid)
    return found


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal_number)


def kill_descendants(root: int, limit: float = 2.0) -> None:
    """SIGKILL everything below `root`. They are stopped first, so that nothing forks while we go through the list."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        below = descendants(root)
        if not below:
            return
        for pid in below:
            kill(pid, signal.SIGSTOP)
        for pid in descendants(root):
            kill(pid)
        time.sleep(0.01)
