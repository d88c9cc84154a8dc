"""Where is this rank: the cell line it is at, and the collective it waits in. Asked from the control thread while
the main one is stuck.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from nbdist.worker.interrupts import Interrupts

# What to call a wait that torch's flight recorder does not list, by the function at the top of the stack.
_BY_FUNCTION = {"recv", "send", "monitored_barrier", "new_group", "init_process_group", "barrier", "wait"}


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
            name, group = entry.get("profiling_name", "?"), entry.get("process_group", ("?", ""))
            return {
                "name": name.split(":")[-1],
                "number": entry.get("collective_seq_id"),
                "group": group[0] if isinstance(group, list | tuple) else str(group),
            }
    return None


def where(interrupts: Interrupts) -> dict[str, Any]:
    """{"file", "line", "function"} of the innermost frame of a cell (None when there is none), "top": the function
    at the very top,
    "waits": the collective in flight."""
    frame = sys._current_frames().get(interrupts.main_thread or -1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):  # it prints, or asks the Accelerator
        frame = frame.f_back
    top = frame.f_code.co_name if frame is not None else None
    named = None
    place: dict[str, Any] = {"file": None, "line": None, "function": None}
    while frame is not None:
        if named is None and frame.f_code.co_name in _BY_FUNCTION and "torch" in frame.f_code.co_filename:
            named = frame.f_code.co_name
        if interrupts.is_cell_file(frame.f_code.co_filename):
            place = {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name}
            break
        frame = frame.f_back
    waits = in_flight()
    if waits is None and named is not None:
        waits = {"name": named, "number": None, "group": None}
    return {**place, "top": top, "waits": waits, "running": interrupts.running}
