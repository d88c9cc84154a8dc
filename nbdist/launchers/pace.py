"""Which ranks write a lot just now."""

from __future__ import annotations

WINDOW = 0.2  # seconds over which it is measured
FLOOD = 16 << 10  # letters in that time; those who write less are not worth waiting for


class Pace:
    """Of one stream. Times are given by the caller, in seconds of one clock."""

    def __init__(self) -> None:
        self._windows: dict[int, tuple[float, int, int]] = {}  # its start, letters in it, letters in the one before

    def add(self, rank: int, letters: int, now: float) -> None:
        start, count, before = self._windows.get(rank, (now, 0, 0))
        if now - start > WINDOW:
            start, count, before = now, 0, count if now - start < 2 * WINDOW else 0
        self._windows[rank] = start, count + letters, before

    def floods(self, rank: int, now: float) -> bool:
        start, count, before = self._windows.get(rank, (now, 0, 0))
        return now - start < 2 * WINDOW and max(count, before) >= FLOOD
