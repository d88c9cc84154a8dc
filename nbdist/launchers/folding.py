"""Which lines of N ranks are one, found while they run: rank 0 leads, the others are laid beside it.

Every other rank's lines are matched with the lead's in order. A line that the lead wrote too is folded into it; one
that it did not write *differs*, and is shown once for all ranks that share it. Ranks may be ahead of the lead or
behind it, and may have lines of their own; nothing here waits for ever, and nothing grows without bound.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nbdist.launchers import alike

MOVED_ON = 0.25  # seconds that a line waits when the lead has written others in its place
BEHIND = 1.0  # ... when the lead has written nothing more: it may be slower
WRITING = 4.0  # ... more at most, while the lead is at a line that it has not ended
SHARED = 0.1  # seconds that a line which differs waits for other ranks with the same
BESIDE = 64  # lines that differ, before which one of another rank may still be put
MOST_LINES, MOST_LETTERS = 50_000, 8 << 20  # of the lead, that others may still be compared with
MOST_WAITING, MOST_WAITING_LETTERS = 10_000, 16 << 20  # lines of one rank that wait
LOOK = 32  # waiting lines of a rank that are looked up for the place where it goes on with the lead
NEAR = (
    8  # lines of one key whose times are looked at; lines skipped, by either, without more evidence than one equal line
)
SURE = 3  # ... by a line that the lead wrote more than once

# A display's key: this, its text, END, what else it shows; so no printed line is taken for one.
DISPLAY, END = "\x03", "\x04"


@dataclass
class Shown:
    """A line to show: by these ranks, in the words of the first of them. `what` is what came with it (a display)."""

    ranks: tuple[int, ...]
    text: str
    what: Any = None


@dataclass
class _Line:
    text: str
    key: str
    since: float
    what: Any = None
    bar: bool = False
    forms: list[str] | None = None  # keys of the lead that it would match, but for the rank


@dataclass
class _Item:
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
class _Differing:
    """Lines that differ, all before the same line of the lead, in the order in which they are shown."""

    since: float
    items: list[_Item] = field(default_factory=list)


@dataclass
class _Other:
    waiting: collections.deque[_Line] = field(default_factory=collections.deque)
    letters: int = 0
    at: int = 0  # the lead's line with which it goes on
    last: _Item | None = None  # the last line of its own
    absent: tuple[int, int] = (0, 0)  # so many of its first waiting lines are not among the lead's up to this number
    far: bool = False  # its first waiting line has its match far on, and needs evidence


@dataclass
class Folded:
    """How many lines of a rank were taken as the lead's though they are not quite: {rank: [lines, because of]}."""

    lines: int = 0
    why: set[str] = field(default_factory=set)


class Folder:
    """One stream of N ranks.

    Args:
        lead: the rank that leads.
        everyone: the ranks that write; None when not known.
        hold_lead: the lead's lines are given out like the others' instead of having been shown by the caller.

    Times are given by the caller, in seconds of one clock.
    """

    def __init__(self, lead: int = 0, everyone: Iterable[int] | None = None, hold_lead: bool = False) -> None:
        self.lead, self.hold_lead = lead, hold_lead
        self.folded: dict[int, Folded] = {}
        self._known = everyone is not None
        self._others = {rank: _Other() for rank in everyone or () if rank != lead}
        self._world = len(self._others) + 1 if self._known else None  # for `[3/8]`
        # the lead's lines, from number _first on
        self._first = 0
        self._texts: collections.deque[tuple[str, str, int]] = collections.deque()  # text, key, its letters
        self._letters = 0
        self._heard = 0.0  # when the lead wrote last
        self._places: dict[str, list[int]] = {}
        self._held: collections.deque[_Item] = collections.deque()  # lines of the lead that were not given out
        self._differing: dict[int, _Differing] = {}  # by place
        self._order: list[int] = []  # the places, sorted

    # ---------------------------------------------------------------- lines come

    def add(
        self,
        rank: int,
        lines: Iterable[str],
        now: float,
        bar: bool = False,
        key: str | None = None,
        what: Any = None,
    ) -> None:
        """Whole lines that a rank wrote.

        Args:
            bar: they are what is left of progress bars, of which it goes without saying that they took their time.
            key: of a display: what it is compared by; its text is what is shown of it, or `what`.
        """
        if rank == self.lead:
            self._heard = now
            for text in lines:
                self._add_lead(text, key or alike.key(text), now, what)
            for other in self._others:
                self._settle(other, now)
        else:
            mine = self._others.get(rank)
            if mine is None:
                mine = self._others[rank] = _Other()
            for text in lines:
                mine.waiting.append(_Line(text, key or alike.key(text), now, what, bar))
                mine.letters += len(text)
            self._settle(rank, now)

    def _add_lead(self, text: str, key: str, now: float, what: Any) -> None:
        place = self._first + len(self._texts)
        known = len(text) <= alike.LONGEST and not key.startswith(DISPLAY)
        letters = len(text) if known else len(key)
        self._texts.append((text if known else "", key, letters))
        self._letters += letters
        self._places.setdefault(key, []).append(place)
        if self.hold_lead:
            self._held.append(_Item(place, text, now, {self.lead}, what))
        while len(self._texts) > MOST_LINES or (self._letters > MOST_LETTERS and len(self._texts) > 1):
            _, gone, letters = self._texts.popleft()
            self._letters -= letters
            places = self._places[gone]
            del places[0]
            if not places:
                del self._places[gone]
            self._first += 1

    # ---------------------------------------------------------------- matching

    @property
    def _end(self) -> int:
        return self._first + len(self._texts)

    def _forms(self, line: _Line, rank: int) -> list[str]:
        if line.forms is None:
            line.forms = alike.as_if(line.key, rank, self.lead, self._world)
        return line.forms

    def _same(self, line: _Line, rank: int, place: int) -> bool:
        """Whether this line is the lead's at that place."""
        text, key, _ = self._texts[place - self._first]
        if text == line.text != "":
            return True
        return (line.key == key or key in self._forms(line, rank)) and self._near(line, text)

    @staticmethod
    def _near(line: _Line, text: str) -> bool:
        """Whether this line's times tell no more than those of another with its key."""
        return "\0" not in line.key or not text or line.key.startswith(DISPLAY) or alike.near(line.text, text)

    def _find(self, line: _Line, rank: int, start: int) -> tuple[int, bool] | None:
        """The first line of the lead from `start` on that is this one, and whether it is the only such."""
        best: tuple[int, bool] | None = None
        for key in (line.key, *self._forms(line, rank)):
            places = self._places.get(key)
            if places is None:
                continue
            first = bisect.bisect_left(places, start)
            for index in range(first, min(first + NEAR, len(places))):
                if best is not None and places[index] >= best[0]:
                    break
                if self._near(line, self._texts[places[index] - self._first][0]):
                    best = places[index], index == len(places) - 1
                    break
        return best

    def _settle(self, rank: int, now: float, force: bool = False) -> None:
        """Fold what can be folded, and let go of what has waited long enough."""
        other = self._others[rank]
        waiting = other.waiting
        while waiting:
            other.at = max(other.at, self._first)
            line = waiting[0]
            if other.at < self._end and self._same(line, rank, other.at):
                self._fold(rank, other, line)
                continue
            found = self._sync(other, rank, force)
            if found is not None:
                place, skipped = found
                for _ in range(skipped):
                    self._differs(rank, other, now, place)
                other.at = place
                continue
            if other.at < self._end:
                limit = line.since + MOVED_ON
            else:
                limit = max(line.since, min(self._heard, line.since + WRITING)) + BEHIND
            if other.far and len(waiting) == 1 and not force:
                break  # the lead has shown it; what comes next will tell where this rank is
            full = len(waiting) > MOST_WAITING or other.letters > MOST_WAITING_LETTERS
            if not (force or full or now >= limit):
                break
            self._differs(rank, other, now, self._end)

    def _sync(self, other: _Other, rank: int, force: bool) -> tuple[int, int] | None:
        """Where this rank goes on with the lead: (the lead's line, how many waiting lines come before that); the
        nearest such, skipped lines of both counted. A line far on, or one of many equal ones, is no evidence.
        """
        best: tuple[int, int] | None = None
        least = len(self._texts) + LOOK + 1
        other.far = False
        known = other.absent[0] if other.absent[1] == self._end else 0
        other.absent = (known, self._end)
        for skipped in range(known, min(LOOK, len(other.waiting))):
            if skipped >= least:
                break
            line = other.waiting[skipped]
            found = self._find(line, rank, other.at)
            if found is None:
                if other.absent[0] == skipped:
                    other.absent = (skipped + 1, self._end)
                continue
            place, only = found
            cost = place - other.at + skipped
            if cost >= least:
                continue
            weak = not only or not line.key.strip()
            if cost > (SURE if weak else NEAR) and not (force and not weak):
                if skipped == 0:
                    other.far = True
                if skipped + 1 >= len(other.waiting):
                    continue
                after = self._find(other.waiting[skipped + 1], rank, place + 1)
                if after is None or after[0] - place > NEAR:
                    continue
            best, least = (place, skipped), cost
        return best

    def _take(self, other: _Other) -> _Line:
        line = other.waiting.popleft()
        other.absent = (max(0, other.absent[0] - 1), other.absent[1])
        other.letters -= len(line.text)
        return line

    def _fold(self, rank: int, other: _Other, line: _Line) -> None:
        """The lead wrote this line too."""
        text, key, _ = self._texts[other.at - self._first]
        place = other.at
        if self.hold_lead:
            item = self._held[place - self._held[0].place] if self._held and place >= self._held[0].place else None
            if item is None:  # the lead's was given out already
                other.at = place + 1
                self._differs(rank, other, line.since, other.at)
                return
            item.ranks.add(rank)
        self._take(other)
        other.at = place + 1
        if line.key.startswith(DISPLAY):
            text, same = "", key == line.key
        else:
            same = len(line.text) > alike.LONGEST or text.rstrip() == line.text.rstrip()
        if not same:
            self._count(rank, text, key, line)

    def _count(self, rank: int, text: str, key: str, line: _Line) -> None:
        why = {"the rank"} if key != line.key else set()
        if text and alike.times_of(text) != alike.times_of(line.text):
            why.add("times")
        if why != {"times"} or not line.bar:
            told = self.folded.setdefault(rank, Folded())
            told.lines += 1
            told.why |= why

    def _differs(self, rank: int, other: _Other, now: float, limit: int) -> None:
        """The first waiting line is the rank's own: it is shown, together with other ranks that have it in the same
        place, before the lead's line `limit` at the latest.
        """
        line = self._take(other)
        shape = _shape(line.key)
        # behind its counterpart: `loss 0.3` behind `loss 0.2`
        if other.at < limit and shape == _shape(self._texts[other.at - self._first][1]):
            other.at += 1
            if line.what is not None and not self.hold_lead and _is_told(line):
                line.what = None
        place = max(other.at, other.last.place if other.last is not None and not other.last.out else 0)
        names: tuple[str, ...] = (line.key, "\1" + alike.without_rank(line.key, rank, self._world))
        if line.what is None:
            names = (*names, "\2" + line.text)
        group = self._differing.get(place)
        if group is None:
            group = self._differing[place] = _Differing(now)
            bisect.insort(self._order, place)
        items = group.items
        start = self._behind(other.last, items)
        for index in range(start, len(items)):
            item = items[index]
            if rank in item.ranks or set(names).isdisjoint(item.names):
                continue
            if self._near(line, item.text):
                item.ranks.add(rank)
                other.last = item
                if item.text != line.text and not line.key.startswith(DISPLAY):
                    self._count(rank, item.text, item.names[0], line)
                return
        while start < len(items) and items[start].shape == shape and min(items[start].ranks) < rank:
            start += 1
        other.last = _Item(place, line.text, now, {rank}, line.what, names, shape)
        items.insert(start, other.last)

    @staticmethod
    def _behind(last: _Item | None, items: list[_Item]) -> int:
        """Where in these lines a rank may have its next, if `last` was the last of its own."""
        first = max(0, len(items) - BESIDE)
        if last is None or last.out or not items or last.place != items[0].place:
            return first
        for index in range(len(items) - 1, first - 1, -1):
            if items[index] is last:
                return index + 1
        return len(items)

    # ---------------------------------------------------------------- lines go

    def ready(self, now: float, force: bool = False) -> list[Shown]:
        """What is to be shown by now; with `force` all of it, since no more will come."""
        for rank, other in self._others.items():
            if other.waiting:
                self._settle(rank, now, force)
        out: list[_Item] = []
        while True:
            if self._order and (not self._held or self._order[0] <= self._held[0].place):
                group = self._differing[self._order[0]]
                if not force and now - group.since < SHARED:
                    break
                self._let_go(group, now, force, out)
                if group.items:
                    break
                del self._differing[self._order.pop(0)]
            elif self._held:
                item = self._held[0]
                passed = self._known and all(other.at > item.place for other in self._others.values())
                if not (force or passed or now - item.since >= BEHIND):
                    break
                out.append(self._held.popleft())
            else:
                break
        return [Shown(tuple(sorted(item.ranks)), item.text, item.what) for item in out]

    @staticmethod
    def _let_go(group: _Differing, now: float, force: bool, out: list[_Item]) -> None:
        """All up to the last that has waited: those before it may be younger, but none of them is shown behind it."""
        count = len(group.items)
        if not force:
            while count > 1 and now - group.items[count - 1].since < SHARED / 2:
                count -= 1
        for item in group.items[:count]:
            item.out = True
        out += group.items[:count]
        del group.items[:count]
        group.since = min((item.since for item in group.items), default=now)

    @property
    def held(self) -> int:
        """Letters of the lead that are kept for the others."""
        return self._letters

    @property
    def waiting(self) -> bool:
        """Whether something is held back that time alone will let go."""
        return bool(self._order or self._held or any(other.waiting for other in self._others.values()))


def _shape(key: str) -> str:
    return alike.shape(key.partition(END)[0] if key.startswith(DISPLAY) else key)


def _is_told(line: _Line) -> bool:
    """Whether the text of a display is enough beside the lead's: it is a plot that every rank draws, or it says all
    that is shown, as that of a table does and `<IPython.core.display.HTML object>` does not.
    """
    return not line.text.startswith("<") or any(kind.startswith("image/") for kind in line.what["data"])
