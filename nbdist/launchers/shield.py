"""Ctrl-C (Jupyter's stop button) while we are at work: told at a place of our choosing, never in the middle of
something.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_press(pressed: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGINT calls `pressed` and raises nothing. Only the main thread gets signals; elsewhere this does
    nothing.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pressed())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """SIGINT that comes inside is handled at the end: KeyboardInterrupt, or noted by another of these around it."""
    came: list[bool] = []
    with on_press(lambda: came.append(True)):
        yield
    handler = signal.getsignal(signal.SIGINT)
    if came and callable(handler):
        handler(signal.SIGINT, None)
