"""The handles that a pool's notebook side has given out: made, pruned, and dead when their ranks are gone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from nbdist.shipping.handle import RankedValue, handle_facts

Fetch = Callable[[RankedValue, tuple[str, ...]], Any]


class Handles:
    """Of one pool.

    Args:
        world_size: how many ranks there are.
        fetch: called with a handle and attribute names when the user reads an attribute of a handle.
        pool: whose they are.
    """

    def __init__(self, world_size: int, fetch: Fetch | None, pool: object) -> None:
        self._ranks = f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0"
        self._fetch, self._pool = fetch, pool
        self._made: list[RankedValue] = []

    def __len__(self) -> int:
        return len(self._made)

    def make(self, name: str, facts: dict[str, Any]) -> RankedValue:
        """For what a rank described (`Away.give`, `Away.peek`) in place of sending it."""
        handle = RankedValue(
            facts.get("label", name) or "the cell's value",
            facts["type"],
            key=facts["key"],
            path=tuple(facts.get("path", ())),
            ranks=self._ranks,
            size=facts.get("size"),
            reason=facts["reason"],
            fetch=self._fetch,
            pool=self._pool,
        )
        self._made.append(handle)
        return handle

    def forget(self) -> None:
        """The ranks were replaced: all handles are dead."""
        for handle in self._made:
            handle_facts(handle).dead = True
        self._made.clear()

    def prune(self, bound: Iterable[Any]) -> set[str]:
        """Drop those that nobody holds, neither a name (`bound`: all values of names) nor anything else. Returns the
        keys that no other handle has: the ranks need not keep those objects.
        """
        named = {id(value) for value in bound}
        kept = [handle for handle in self._made if id(handle) in named or sys.getrefcount(handle) > 3]
        unpinned = {handle_facts(handle).key for handle in self._made} - {handle_facts(handle).key for handle in kept}
        self._made = kept
        return unpinned
