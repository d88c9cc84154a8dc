"""Where is this rank: the cell line it is at, and the collective it waits in. Asked from the control thread while
the main one is stuck.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

from nbdist.worker.interrupts import Interrupts

# What to call a wait that torch's flight recorder does not list, by the function at the top of the stack.
_BY_FUNCTION = {"recv", "send", "monitored_barrier", "new_group", "init_process_group", "barrier", "wait"}


_WORKER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(_WORKER)) + os.sep


def flight_recorder(status_only: bool = False) -> dict[str, Any]:
    """torch's own record of collectives, without stacks: with them the first dump takes a second and a full ring
    two.
    """
    from torch._C import _distributed_c10d as c10d  # private: guarded

    if not hasattr(c10d, "_dump_fr_trace"):
        return {}
    try:
        return pickle.loads(c10d._dump_fr_trace(not status_only, False, False))
    except Exception:
        return {}


def in_flight() -> dict[str, Any] | None:
    """The oldest collective that this rank has started and not finished."""
    for entry in flight_recorder().get("entries", ()):
        if not entry.get("retired"):
            name = entry.get("profiling_name", "?")
            between_two = entry.get("is_p2p")
            return {
                "name": name.split(":")[-1],
                "number": None if between_two else entry.get("collective_seq_id"),
                "group": None if between_two else _name_of(entry),
            }
    return None


def _name_of(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", ("?", ""))
    return group[0] if isinstance(group, list | tuple) else str(group)


def reached(dead: Collection[str]) -> tuple[dict[str, int], bool] | None:
    """{group: number of the newest collective that this rank has begun in it}, and whether a group that is not there
    has had none; None where nothing is known.

    Args:
        dead: ids of the backends that groups had before they were healed; numbers begin anew then.
    """
    dump = flight_recorder()
    if not dump:
        return None
    found: dict[str, int] = {}
    entries = dump.get("entries", ())
    for entry in entries:
        if not entry.get("is_p2p") and str(entry.get("pg_id")) not in dead:
            name = _name_of(entry)
            found[name] = max(found.get(name, 0), entry.get("collective_seq_id") or 0)
    oldest = entries[0] if entries else {}  # the record is a ring: what is before it was overwritten
    return found, oldest.get("record_id", 0) == 0 or str(oldest.get("pg_id")) in dead


def where(interrupts: Interrupts) -> dict[str, Any]:
    """{"file", "line", "function"} of the innermost frame of a cell (None when there is none), "top": the function
    at the very top,
    "call": what the cell has called of this package, "waits": the collective in flight,
    "at": what stays the same as long as it stands still, "threads": others of the user's may run."""
    frame = sys._current_frames().get(interrupts.main_thread or -1)
    at = (id(frame), frame.f_lasti) if frame is not None else None
    call = None
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):  # it prints, or asks the Accelerator
        call = _public(frame) or call
        frame = frame.f_back
    top = frame.f_code.co_name if frame is not None else None
    named = None
    place: dict[str, Any] = {"file": None, "line": None, "function": None}
    while frame is not None:
        if named is None and frame.f_code.co_name in _BY_FUNCTION and "torch" in frame.f_code.co_filename:
            named = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(_OURS):
            call = _public(frame) or call
        if interrupts.is_cell_file(frame.f_code.co_filename):
            place = {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name}
            break
        frame = frame.f_back
    waits = in_flight()
    if waits is None and named is not None:
        waits = {"name": named, "number": None, "group": None}
    more = {"call": call if place["line"] else None, "at": at, "threads": _threads_of_the_user()}
    return {**place, **more, "top": top, "waits": waits, "running": interrupts.running}


def _public(frame: FrameType) -> str | None:
    """What the user knows this function of the package by; None for inner ones."""
    code = frame.f_code
    inner = code.co_name.startswith(("_", "<")) or "<locals>" in code.co_qualname
    return None if inner or code.co_filename.startswith(_WORKER) else code.co_name


# Code that begins no collective by itself: Python's own, bars, data loaders.
_HARMLESS = (os.path.dirname(os.__file__) + os.sep, _OURS)
_HARMLESS_PACKAGES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("tqdm", "torch", "IPython"))
_COLLECTIVES = os.path.join("torch", "distributed") + os.sep


def _threads_of_the_user() -> bool:
    """Whether another thread than the main one may still begin a collective."""
    frames = sys._current_frames()
    try:
        return any(
            isinstance(one, threading.Timer) or _may_begin_one(frames.get(one.ident or -1))
            for one in threading.enumerate()
            if one is not threading.main_thread()
        )
    finally:
        frames.clear()  # this very frame is among them: a circle, which would keep what the main thread's frames hold


def _may_begin_one(frame: FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        known = any(name in file for name in _HARMLESS_PACKAGES) and _COLLECTIVES not in file
        own = file.startswith(_HARMLESS) and f"{os.sep}site-packages{os.sep}" not in file
        if not (known or own or file.startswith("<")):
            return True
        frame = frame.f_back
    return False
