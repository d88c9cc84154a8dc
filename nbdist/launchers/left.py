"""Ranks that wait for one that cannot come any more: it has ended the cell, or is not in it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

EVERY = 0.5  # seconds between two looks
CONFIRM = 1.2  # seconds of standing in one place before a cell is given up

# What a rank can have in common with others before all of them have come.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# What every rank of the pool takes part in, and no collective tells of.
_OF_ALL = frozenset({"new_group", "init_process_group", "monitored_barrier"})

Places = Mapping[int, Mapping[str, Any]]


class Left:
    """Looks at the ranks of a running cell as soon as one has left it.

    What counts is each group's own number of a collective: a rank that has left can begin none, so one that it has not
    begun never ends. Nothing is concluded from what cannot be known: messages between two ranks, a thread of the user's
    that may still begin one, groups without the rank.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._stood: dict[int, tuple[Any, float]] = {}  # where each rank was seen, and since when

    def next_look(self, someone: bool) -> float:
        """Seconds until then. Args: someone: a rank has left."""
        return max(0.0, self._next - time.monotonic()) if someone else float("inf")

    def look(self, running: Places, gone: Places, groups: Mapping[str, Collection[int]]) -> frozenset[int]:
        """The ranks that have left and that another one waits for in vain; usually none.

        Args:
            running: where the ranks are that run the cell.
            gone: the same of those that have left it, which tells what they have begun.
            groups: {name: members}.
        """
        now = time.monotonic()
        self._next = now + EVERY
        stands = {}
        for rank, place in running.items():
            at = _place(place)
            before, since = self._stood.get(rank, (None, now))
            if at is not None:
                stands[rank] = (at, since if at == before else now)
        self._stood = stands
        standing = {rank for rank, (_, since) in stands.items() if now - since >= CONFIRM}
        missed: set[int] = set()
        for rank in standing:
            missed |= _missed(running[rank]["waits"], standing, running, gone, groups)
        return frozenset(missed)


def _place(place: Mapping[str, Any]) -> Any:
    """What stays the same as long as this rank waits; None when it does not."""
    waits = place.get("waits")
    return (waits["name"], waits["number"], waits["group"], place.get("at")) if waits else None


def _missed(
    waits: Mapping[str, Any], standing: set[int], running: Places, gone: Places, groups: Mapping[str, Collection[int]]
) -> set[int]:
    can_come = {rank for rank, place in gone.items() if place.get("reached") is None or place.get("threads")}
    if waits["group"] is None:
        alone = len(running) == 1 and waits["name"] in _OF_ALL
        return set(gone) if alone and not can_come else set()
    members = groups.get(waits["group"], ())
    if waits["name"] in _ROOTED and any(rank in members and rank not in standing for rank in running):
        return set()
    return {rank for rank in gone if rank in members and rank not in can_come and _never_began(gone[rank], waits)}


def _never_began(place: Mapping[str, Any], waits: Mapping[str, Any]) -> bool:
    reached, all_known = place["reached"]
    number = reached.get(waits["group"], 0 if all_known else None)
    return number is not None and waits["number"] is not None and number < waits["number"]
