"""Ranks that wait for each other: who is where, and whether it can end by itself."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.launchers.failures import ranks_in_words

CONFIRM_AFTER = 1.0  # seconds between two looks that must agree before a cell is given up


def tell(places: Mapping[int, Mapping[str, Any]]) -> str:
    """ "rank 1 is in all_gather at cell line 14; rank 0 is in barrier at cell line 22"."""
    parts = []
    for rank, place in sorted(places.items()):
        if place.get("silent"):
            parts.append(f"rank {rank} is in native code that holds the interpreter")
            continue
        waits, line = place.get("waits"), place.get("line")
        top = place.get("top")
        inside = f"in {top}()" if top and top != "<module>" else "" if line else "running"
        what = f"in {place.get('call') or waits['name']}" if waits else inside
        function = place.get("function")
        within = f" ({function})" if function and function != "<module>" else ""
        parts.append(" ".join(filter(None, (f"rank {rank} is", what, line and f"at cell line {line}{within}"))))
    return "; ".join(parts) or "no rank is running it any more"


def cannot_go_on(places: Mapping[int, Mapping[str, Any]], gone: Collection[int], ranks: Collection[int]) -> str:
    """What is said of ranks that wait for each other, or for some that have left.

    Args:
        places: where they are.
        gone: ranks that do not come any more.
        ranks: those that the cell was for.
    """
    parts = [f"the ranks wait for each other and cannot go on: {tell(places)}"]
    ended = [rank for rank in gone if rank in ranks]
    if ended:
        parts.append(f"{ranks_in_words(ended)} {'has' if len(ended) == 1 else 'have'} finished the cell")
    outside = [rank for rank in gone if rank not in ranks]
    if outside:
        listed = ",".join(map(str, sorted(ranks)))
        parts.append(f"this needs {ranks_in_words(outside)} too, and the cell runs without (--ranks {listed})")
    return "; ".join(parts)


@dataclass
class Verdict:
    line: str = ""
    hopeless: bool = False


class Watch:
    """Looks at a running cell every now and then.

    Args:
        limit: seconds of waiting in the same collective before anything is said.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._next = time.monotonic() + limit / 2
        self._last: dict[int, Any] = {}
        self._since = time.monotonic()
        self._told = False

    def next_look(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def look(self, places: Mapping[int, Mapping[str, Any]], done: Mapping[int, Any]) -> Verdict:
        """What to say about it now, if anything."""
        now = time.monotonic()
        waiting = {rank: _wait(place) for rank, place in places.items()}
        if waiting != self._last or not any(waiting.values()):
            self._last, self._since, self._told = waiting, now, False
        waited = now - self._since
        self._next = now + (CONFIRM_AFTER if any(waiting.values()) and waited < self._limit else self._limit / 2)
        if not any(waiting.values()) or waited < min(self._limit, max(CONFIRM_AFTER, self._limit / 2)):
            return Verdict()
        text = tell(places)
        finished = sorted(rank for rank, message in done.items() if message["ran"])
        if _hopeless(waiting, done, finished):
            return Verdict(cannot_go_on(places, finished, [*places, *finished]), True)
        if waited >= self._limit and not self._told:
            self._told = True
            return Verdict(f"waiting for {waited:.0f} s: {text}")
        return Verdict()


def _wait(place: Mapping[str, Any]) -> tuple[Any, ...] | None:
    waits = place.get("waits")
    return (waits["name"], waits["number"], waits["group"], place.get("line")) if waits else None


def _hopeless(waiting: Mapping[int, Any], done: Mapping[int, Any], finished: list[int]) -> bool:
    """Every running rank waits, and either for one that has finished, or in another collective of the same group."""
    if not waiting or not all(waiting.values()):
        return False
    members = {group[0]: set(group[1]) for message in done.values() for group in message["groups"]}
    for wait in waiting.values():
        if wait[2] is not None and members.get(wait[2], set()) & set(finished):
            return True
    known = [wait for wait in waiting.values() if wait[2] is not None]
    same_group = len(known) == len(waiting) > 1 and len({wait[2] for wait in known}) == 1
    return same_group and len({wait[:2] for wait in known}) > 1
