"""Lines that the lead did not write, in the order in which they are shown: each once for all ranks that share it."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SHARED = 0.1  # seconds that a line which differs waits for other ranks with the same
BESIDE = 64  # lines that differ, before which one of another rank may still be put


@dataclass
class Item:
    """A line of the lead (`place` is its number) or one that differs, shown before the lead's line of that number."""

    place: int
    text: str
    since: float
    ranks: set[int]
    what: Any = None
    names: tuple[str, ...] = ()  # other ranks' lines with one of these are the same
    shape: str = ""
    out: bool = False


@dataclass
class _Group:
    """Lines that differ, all before the same line of the lead, in the order in which they are shown."""

    since: float
    items: list[Item] = field(default_factory=list)


class Differing:
    """Lines that differ and were not shown yet."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by place
        self._order: list[int] = []  # the places, sorted

    @property
    def first(self) -> int | None:
        """The first place with such lines."""
        return self._order[0] if self._order else None

    def put(self, mine: Item, last: Item | None, same: Callable[[str], bool], now: float) -> Item:
        """A line of one rank: it joins one with a name of its own that is not shown before the rank's `last`, or is
        put among the others. Returns what it is shown as.

        Args:
            same: takes the text of another line with one of its names.
        """
        (rank,) = mine.ranks
        group = self._groups.get(mine.place)
        if group is None:
            group = self._groups[mine.place] = _Group(now)
            bisect.insort(self._order, mine.place)
        items = group.items
        start = _behind(last, items)
        for index in range(start, len(items)):
            item = items[index]
            if rank in item.ranks or set(mine.names).isdisjoint(item.names):
                continue
            if same(item.text):
                item.ranks.add(rank)
                return item
        while start < len(items) and items[start].shape == mine.shape and min(items[start].ranks) < rank:
            start += 1
        items.insert(start, mine)
        return mine

    def let_go(self, now: float, force: bool, out: list[Item]) -> bool:
        """Of the lines in the first place, those that have waited long enough; whether that is all of them.

        All up to the last that has waited: those before it may be younger, but none of them is shown behind it.
        """
        group = self._groups[self._order[0]]
        if not force and now - group.since < SHARED:
            return False
        count = len(group.items)
        if not force:
            while count > 1 and now - group.items[count - 1].since < SHARED / 2:
                count -= 1
        for item in group.items[:count]:
            item.out = True
        out += group.items[:count]
        del group.items[:count]
        group.since = min((item.since for item in group.items), default=now)
        if group.items:
            return False
        del self._groups[self._order.pop(0)]
        return True


def _behind(last: Item | None, items: list[Item]) -> int:
    """Where in these lines a rank may have its next, if `last` was the last of its own."""
    first = max(0, len(items) - BESIDE)
    if last is None or last.out or not items or last.place != items[0].place:
        return first
    for index in range(len(items) - 1, first - 1, -1):
        if items[index] is last:
            return index + 1
    return len(items)
