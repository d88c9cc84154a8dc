"""What ranks are doing and what they take: memory measured from outside, the rest told by their control threads.

Nothing here waits for a cell: a rank that does not answer within ANSWER seconds is shown by what its process tells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from nbdist import system
from nbdist.config import gpus
from nbdist.launchers.devices import short_id
from nbdist.launchers.pool import Pool

ANSWER = 0.4  # seconds for the ranks to answer
MEASURE = 0.4  # seconds for measuring; after that only what costs nothing


@dataclass
class RankStatus:
    """One rank; bytes. `own` is freed when the rank ends, `shared` is there for others too (libraries, captured
    tensors). `others` counts the processes that it has started, whose memory is in `own`.
    """

    rank: int
    pid: int
    host: str
    device: str
    state: str
    own: int | None = None
    shared: int | None = None
    others: int = 0
    on_device: dict[str, Any] | None = None
    holds: dict[str, Any] = field(default_factory=dict)


def look(pool: Pool) -> list[RankStatus]:
    """Every rank of a pool that has been started."""
    answers = pool.ask_aside("status", ANSWER)
    children = _children()
    end = time.monotonic() + MEASURE
    rows = []
    for rank, pid in enumerate(list(pool.pids)):
        answer = answers.get(rank)
        below = _below(pid, children)
        own, shared = _memory([pid, *below], time.monotonic() < end)
        rows.append(
            RankStatus(
                rank,
                pid,
                os.uname().nodename,
                _device(pool, rank, answer),
                _state(pool, rank, answer),
                own,
                shared,
                len(below),
                answer["memory"] if answer else None,
                answer["holds"] if answer else {},
            )
        )
    return rows


def _device(pool: Pool, rank: int, answer: dict[str, Any] | None) -> str:
    devices = pool.options.devices
    name = answer["device"] if answer else pool.options.device
    if pool.options.device == "cuda" and rank < len(devices):
        name = f"GPU {short_id(devices[rank])} ({name})"
    return str(name)


def _state(pool: Pool, rank: int, answer: dict[str, Any] | None) -> str:
    if not pool.lives(rank):
        return "ended"
    run = pool.unsettled
    if run is not None and not pool.busy and rank not in run.done and (answer is None or answer["cell"] is not None):
        state = "left running native code"  # a Stop could not reach it there
        return state if answer is None else _at(state, answer)
    if answer is None:
        return "suspended" if _is_suspended(pool.pids[rank]) else "no answer: in native code that holds Python's lock"
    if answer["cell"] is not None:
        return _at(f"running In[{answer['cell']}]" if answer["cell"] else "running", answer)
    if run is not None and not pool.busy and run.stop is not None and run.presses:
        return "idle, stopped"
    return "idle"


def _at(state: str, answer: dict[str, Any]) -> str:
    return f"{state}, line {answer['line']}" if answer["line"] else state


def _is_suspended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


# ---------------------------------------------------------------- memory


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, (parent, state) in system.parents().items():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    return children


def _below(root: int, children: dict[int, list[int]]) -> list[int]:
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _memory(pids: Iterable[int], thorough: bool) -> tuple[int | None, int | None]:
    """(own, shared) bytes of these processes together; own is None when it was not measured."""
    own: int | None = 0 if thorough else None
    shared = 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if own is None:
                shared += process.memory_info().rss
            else:
                info = process.memory_full_info()
                own, shared = own + info.uss, max(shared, info.rss - info.uss)
        except psutil.Error:
            continue
    return own, shared


def footprint(roots: Sequence[int]) -> int:
    """Bytes of real memory that these processes and everything below them take: what several share counts once
    (Linux: PSS; elsewhere what each has of its own).
    """
    children = _children()
    total = 0
    for pid in dict.fromkeys(pid for root in roots for pid in (root, *_below(root, children))):
        try:
            info = psutil.Process(pid).memory_full_info()
        except psutil.Error:
            continue
        total += getattr(info, "pss", info.uss)
    return total


def on_gpus(pools: Iterable[Pool]) -> int | None:
    """Bytes in use on these pools' GPUs, by whomever; None where there are none or nvidia-smi does not tell."""
    names = [name for pool in pools if pool.options.device == "cuda" for name in pool.options.devices]
    if not names:
        return None
    found = gpus.match(names, gpus.gpus(), os.environ)
    return sum(gpu.used for gpu in {gpu.uuid: gpu for gpu in found.values()}.values()) if found else None
