"""How far a save or a load is, said by the main process when it takes long."""

from __future__ import annotations

import sys
import time
from typing import Any

_PATIENCE, _EVERY = 3.0, 0.5  # seconds before the first word, and between two


class Progress:
    """Told of bytes; shows how many of all, in one line that is written over.

    Args:
        what: "save_state".
        total: bytes of this rank.
        shown: whether it says anything.
    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._what, self._total, self._shown = what, total, shown
        self._done, self._begun, self._said = 0, time.monotonic(), 0.0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._shown and now - self._begun > _PATIENCE and now - self._said > _EVERY:
            self._say(now)

    def _say(self, now: float) -> None:
        self._said = now
        left = (self._total - self._done) * (now - self._begun) / max(self._done, 1)
        text = f"{self._what}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {max(left, 0):.0f} s left"
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exception: Any) -> None:
        if self._said:
            took = time.monotonic() - self._begun
            text = f"{self._what}: {self._done / 1e9:.1f} GB in {took:.0f} s"
            print(f"\r{text:<60}", file=sys.stderr, flush=True)
