"""Running iterators that deliver together, as in zip: whose batch a micro-batch is then."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from nbdist.data.cursor import Cursor


class Beside:
    """Remembers what was delivered at the last look, and so which iterators have delivered for the batch in hand."""

    __slots__ = ("_partners", "_seen")

    def __init__(self) -> None:
        self._seen: dict[Cursor, int] = {}
        self._partners: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that are known to run beside another

    def look(self, live: Sequence[Cursor | None], before: Cursor | None, at: int) -> tuple[Cursor, bool]:
        """A batch is in hand that was not there at the last look.

        Args:
            live: the running iterators, the newest last; there is one.
            before: the newest one at the last look; None before the first.
            at: the number of its batch then.

        Returns:
            The one to weigh by: of those that have delivered together the one whose batch has the most rows over all
            ranks, so that it does not matter which was asked first. And whether one of them has delivered its last.
        """
        newest = live[-1]
        assert newest is not None
        seen = self._seen
        if before is not None:
            seen[before] = at
        by, ends = newest, newest.last
        for one in live[1:-1]:
            if one is None or seen.get(one) == one.step:
                continue
            one.position.used = True
            # A loop around the newest's has delivered too, but not beside it: it never does while that one goes on.
            if newest is before:
                self._partners.add(one.position)
            if one.position in self._partners or not runs_inside(newest, one):
                ends = ends or one.last
                if one.total > by.total:
                    by = one
        self._seen = {one: one.step for one in live if one is not None}
        return by, ends


def runs_inside(inner: Cursor | None, outer: Cursor) -> bool:
    """Whether the loop of `inner` began while a batch of `outer` was in hand."""
    while inner is not None:
        inner = inner.above
        if inner is outer:
            return True
    return False
