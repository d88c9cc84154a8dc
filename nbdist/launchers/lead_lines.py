"""The lead's last lines, with which other ranks' lines are compared: by number, and found by what they are."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Iterable

MOST_LINES, MOST_LETTERS = 50_000, 8 << 20  # that others may still be compared with
LOOK = 8  # lines of one key that are looked at


class LeadLines:
    """Lines from number `first` on.

    Attributes:
        letters: that are kept.
    """

    def __init__(self) -> None:
        self.first, self.letters = 0, 0
        self._lines: collections.deque[tuple[str, str, int]] = collections.deque()  # text, key, its letters
        self._places: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def end(self) -> int:
        """The number of the line that comes next."""
        return self.first + len(self._lines)

    def __getitem__(self, place: int) -> tuple[str, str]:
        """(text, key) of the line with this number."""
        text, key, _ = self._lines[place - self.first]
        return text, key

    def add(self, text: str, key: str) -> int:
        """Returns its number. The oldest ones go where there are too many.

        Args:
            text: "" where the key is all that is to be compared.
        """
        place, letters = self.end, len(text or key)
        self._lines.append((text, key, letters))
        self.letters += letters
        self._places.setdefault(key, []).append(place)
        while len(self._lines) > MOST_LINES or (self.letters > MOST_LETTERS and len(self._lines) > 1):
            self._drop_the_oldest()
        return place

    def _drop_the_oldest(self) -> None:
        _, gone, letters = self._lines.popleft()
        self.letters -= letters
        places = self._places[gone]
        del places[0]
        if not places:
            del self._places[gone]
        self.first += 1

    def find(self, keys: Iterable[str], start: int, fits: Callable[[str], bool]) -> tuple[int, bool] | None:
        """The first line from `start` on with one of these keys whose text fits, and whether it is the only such."""
        best: tuple[int, bool] | None = None
        for key in keys:
            places = self._places.get(key)
            if places is None:
                continue
            first = bisect.bisect_left(places, start)
            for index in range(first, min(first + LOOK, len(places))):
                if best is not None and places[index] >= best[0]:
                    break
                if fits(self[places[index]][0]):
                    best = places[index], index == len(places) - 1
                    break
        return best
