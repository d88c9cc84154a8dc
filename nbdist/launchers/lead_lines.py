"""The lead's last lines, with which other ranks' lines are compared: by number, and found by what they are."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from nbdist.launchers import alike

MOST_LINES, MOST_LETTERS = 100_000, 8 << 20  # that others may still be compared with
LOOK = 8  # lines of one key that are looked at
_TIDY = 4096  # lines at the front that are gone, before the lists are made shorter


class LeadLines:
    """Lines from number `first` on. What a line is compared by is only worked out when a rank does not just go on with
    the very same lines: in a flood of equal ones, never.

    Attributes:
        letters: that are kept.
    """

    def __init__(self) -> None:
        self.first, self.letters = 0, 0
        self._offset = 0  # the number of the lists' first line
        self._texts: list[str | None] = []
        self._keys: list[str | None] = []
        self._places: dict[str, list[int]] = {}
        self._found_to = 0  # lines before this number are in there, or are not needed any more

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def end(self) -> int:
        """The number of the line that comes next."""
        return self._offset + len(self._texts)

    def __getitem__(self, place: int) -> tuple[str, str]:
        """(text, key) of the line with this number; the text is "" where the key is all that is to be compared."""
        return self._texts[place - self._offset] or "", self._key(place)

    def _key(self, place: int) -> str:
        index = place - self._offset
        key = self._keys[index]
        if key is None:
            key = self._keys[index] = alike.key(self._texts[index] or "")
        return key

    def is_text(self, place: int, text: str) -> bool:
        """Whether the line with this number is this very text."""
        return self._texts[place - self._offset] == text

    def equal(self, place: int, lines: list[str]) -> int:
        """How many of these lines are the very same as those from this number on."""
        start = place - self._offset
        mine = self._texts[start : start + len(lines)]
        if mine == lines[: len(mine)]:
            return len(mine)
        return next(i for i, (one, other) in enumerate(zip(mine, lines, strict=False)) if one != other)

    def add(self, text: str | None, key: str | None) -> int:
        """Returns its number. The oldest ones go where there are too many.

        Args:
            text: None where the key is all that is to be compared.
            key: None where it is to be had from the text.
        """
        place = self.end
        self._texts.append(text)
        self._keys.append(key)
        self.letters += len(text or key or "")
        while len(self) > MOST_LINES or (self.letters > MOST_LETTERS and len(self) > 1):
            self._drop_the_oldest()
        return place

    def _drop_the_oldest(self) -> None:
        index = self.first - self._offset
        text, key = self._texts[index], self._keys[index]
        self.letters -= len(text or key or "")
        places = self._places.get(key) if key is not None else None
        if key is not None and places and places[0] == self.first:
            del places[0]
            if not places:
                del self._places[key]
        self._texts[index] = self._keys[index] = None
        self.first += 1
        if self.first - self._offset > _TIDY:
            del self._texts[: self.first - self._offset], self._keys[: self.first - self._offset]
            self._offset = self.first

    def ahead_of(self, place: int, lines: int, letters: int) -> bool:
        """Whether there are so many more lines than up to this number, or so many letters in them, about."""
        more = self.end - max(place, self.first)
        return more > lines or more * self.letters > letters * len(self)

    def find(
        self, keys: Iterable[str], start: int, needed: int, fits: Callable[[str], bool]
    ) -> tuple[int, bool] | None:
        """The first line from `start` on with one of these keys whose text fits, and whether it is the only such.

        Args:
            needed: nobody looks for a line before this number from now on.
        """
        for place in range(max(self._found_to, needed, self.first), self.end):
            self._places.setdefault(self._key(place), []).append(place)
        self._found_to = self.end
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
