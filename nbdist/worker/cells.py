"""Which cell the code that writes something belongs to: a thread writes for the cell that started it, also later.

Threads, and those that they start, inherit their cell; so do tasks of asyncio, which copy the context, and forked
processes. The main thread belongs to the cell that runs. A `ThreadPoolExecutor` works for the cell that gave it the
work, since one pool serves many cells.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_KEY = "nbdist_cell"  # in a thread's __dict__
_cell: ContextVar[int] = ContextVar(_KEY)
_running = 0


def current() -> int:
    """The number of the cell for which this code runs; 0 before the first."""
    return _cell.get(0) or _of_this_thread()


def _of_this_thread() -> int:
    """The first time in a thread, and in native threads that no Python started: those work for the cell that runs."""
    number = vars(threading.current_thread()).get(_KEY, 0)
    if number:
        _cell.set(number)
    return number or _running


def begin(number: int) -> None:
    """The main thread is about to run this cell."""
    global _running
    _running = number
    _cell.set(number)


def install() -> None:
    """Once a process, before any user code: new threads know who started them."""
    start: Any = threading.Thread.start
    submit: Any = ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_for_this_cell(self: threading.Thread) -> None:
        # Not by a context or a `run` around its own: the thread's frames and variables stay what they would be.
        vars(self)[_KEY] = current()
        start(self)

    @functools.wraps(submit)
    def submit_for_this_cell(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        work: Future[Any] = submit(self, _work, current(), fn, args, kwargs)
        return work

    threading.Thread.start = start_for_this_cell  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_for_this_cell  # type: ignore[assignment,method-assign]


def _work(number: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = _cell.set(number)
    try:
        return function(*args, **kwargs)
    finally:
        _cell.reset(before)
