"""Which lines of N ranks are one, found while they run: rank 0 leads, the others are laid beside it.

Every other rank's lines are matched with the lead's in order. A line that the lead wrote too is folded into it; one
that it did not write *differs*, and is shown once for all ranks that share it. Ranks may be ahead of the lead or
behind it, and may have lines of their own; nothing here waits for ever, and nothing grows without bound.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nbdist.launchers import alike
from nbdist.launchers.differing import Differing, Item
from nbdist.launchers.lead_lines import LeadLines

MOVED_ON = 0.25  # seconds that a line waits when the lead has written others in its place
BEHIND = 1.0  # ... when the lead has written nothing more: it may be slower
WRITING = 4.0  # ... more at most, while the lead is at a line that it has not ended
MOST_WAITING, MOST_WAITING_LETTERS = 100_000, 16 << 20  # lines of one rank that wait
FAR_LINES, FAR_LETTERS = 10_000, 1 << 20  # by which a rank may be ahead of another before it had better wait
LOOK = 32  # waiting lines of a rank that are looked up for the place where it goes on with the lead
NEAR = 8  # lines skipped, by either, without more evidence than one equal line
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
    own_key: str | None  # None: to be had from the text
    since: float
    what: Any = None
    bar: bool = False
    forms: list[str] | None = None  # keys of the lead that it would match, but for the rank

    @property
    def key(self) -> str:
        if self.own_key is None:
            self.own_key = alike.key(self.text)
        return self.own_key


@dataclass
class _Other:
    waiting: collections.deque[_Line] = field(default_factory=collections.deque)
    letters: int = 0
    at: int = 0  # the lead's line with which it goes on
    last: Item | None = None  # the last line of its own
    absent: tuple[int, int] = (0, 0)  # so many of its first waiting lines are not among the lead's up to this number
    far: bool = False  # its first waiting line has its match far on, and needs evidence
    own: int = 0  # letters that it wrote and the lead did not


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
        self._lines = LeadLines()
        self._heard = 0.0  # when the lead wrote last
        self._held: collections.deque[Item] = collections.deque()  # lines of the lead that were not given out
        self._differing = Differing()

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
                self._add_lead(text, key, now, what)
            for other in self._others:
                self._settle(other, now)
        else:
            mine = self._others.get(rank)
            if mine is None:
                mine = self._others[rank] = _Other()
            if key is None and not mine.waiting and not self.hold_lead:
                lines = list(lines)
                mine.at = max(mine.at, self._lines.first)
                count = self._lines.equal(mine.at, lines)
                mine.at += count
                lines = lines[count:]
            for text in lines:
                mine.waiting.append(_Line(text, key, now, what, bar))
                mine.letters += len(text)
            self._settle(rank, now)

    def _add_lead(self, text: str, key: str | None, now: float, what: Any) -> None:
        if key is None and (len(text) > alike.LONGEST or text.startswith(DISPLAY)):
            key = alike.key(text)
        known = key is None or not (len(text) > alike.LONGEST or key.startswith(DISPLAY))
        place = self._lines.add(text if known else None, key)
        if self.hold_lead:
            self._held.append(Item(place, text, now, {self.lead}, what))

    # ---------------------------------------------------------------- matching

    def _forms(self, line: _Line, rank: int) -> list[str]:
        if line.forms is None:
            line.forms = alike.as_if(line.key, rank, self.lead, self._world)
        return line.forms

    def _same(self, line: _Line, rank: int, place: int) -> bool:
        """Whether this line is the lead's at that place."""
        if line.text and self._lines.is_text(place, line.text):
            return True
        text, key = self._lines[place]
        return (line.key == key or key in self._forms(line, rank)) and self._near(line, text)

    @staticmethod
    def _near(line: _Line, text: str) -> bool:
        """Whether this line's times tell no more than those of another with its key."""
        return "\0" not in line.key or not text or line.key.startswith(DISPLAY) or alike.near(line.text, text)

    def _find(self, line: _Line, rank: int, start: int) -> tuple[int, bool] | None:
        """The first line of the lead from `start` on that is this one, and whether it is the only such."""
        if start >= self._lines.end:
            return None
        keys = (line.key, *self._forms(line, rank))
        needed = min(other.at for other in self._others.values()) if self._known else 0
        return self._lines.find(keys, start, needed, lambda text: self._near(line, text))

    def _settle(self, rank: int, now: float, force: bool = False) -> None:
        """Fold what can be folded, and let go of what has waited long enough."""
        other = self._others[rank]
        waiting = other.waiting
        while waiting:
            other.at = max(other.at, self._lines.first)
            line = waiting[0]
            if not self.hold_lead and other.at < self._lines.end and self._goes_on(other, line):
                continue
            if other.at < self._lines.end and self._same(line, rank, other.at):
                self._fold(rank, other, line)
                continue
            found = self._sync(other, rank, force)
            if found is not None:
                place, skipped = found
                for _ in range(skipped):
                    self._differs(rank, other, now, place)
                other.at = place
                continue
            if other.at < self._lines.end:
                limit = line.since + MOVED_ON
            else:
                limit = max(line.since, min(self._heard, line.since + WRITING)) + BEHIND
            if other.far and len(waiting) == 1 and not force:
                break  # the lead has shown it; what comes next will tell where this rank is
            full = len(waiting) > MOST_WAITING or other.letters > MOST_WAITING_LETTERS
            if not (force or full or now >= limit):
                break
            self._differs(rank, other, now, self._lines.end)

    def _goes_on(self, other: _Other, line: _Line) -> bool:
        """Fold the first waiting line if it is the very same as the lead's; nothing more needs to be known of it."""
        if not line.text or not self._lines.is_text(other.at, line.text):
            return False
        self._take(other)
        other.at += 1
        return True

    def _sync(self, other: _Other, rank: int, force: bool) -> tuple[int, int] | None:
        """Where this rank goes on with the lead: (the lead's line, how many waiting lines come before that); the
        nearest such, skipped lines of both counted. A line far on, or one of many equal ones, is no evidence.
        """
        best: tuple[int, int] | None = None
        least = len(self._lines) + LOOK + 1
        other.far = False
        known = other.absent[0] if other.absent[1] == self._lines.end else 0
        other.absent = (known, self._lines.end)
        for skipped in range(known, min(LOOK, len(other.waiting))):
            if skipped >= least:
                break
            line = other.waiting[skipped]
            found = self._find(line, rank, other.at)
            if found is None:
                if other.absent[0] == skipped:
                    other.absent = (skipped + 1, self._lines.end)
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
        text, key = self._lines[other.at]
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
        other.own += len(line.text)
        shape = _shape(line.key)
        # behind its counterpart: `loss 0.3` behind `loss 0.2`
        if other.at < limit and shape == _shape(self._lines[other.at][1]):
            other.at += 1
        place = max(other.at, other.last.place if other.last is not None and not other.last.out else 0)
        names: tuple[str, ...] = (line.key, "\1" + alike.without_rank(line.key, rank, self._world))
        if line.what is None:
            names = (*names, "\2" + line.text)
        mine = Item(place, line.text, now, {rank}, line.what, names, shape)
        shown = self._differing.put(mine, other.last, lambda text: self._near(line, text), now)
        other.last = shown
        if shown is not mine and shown.text != line.text and not line.key.startswith(DISPLAY):
            self._count(rank, shown.text, shown.names[0], line)

    # ---------------------------------------------------------------- lines go

    def ready(self, now: float, force: bool = False) -> list[Shown]:
        """What is to be shown by now; with `force` all of it, since no more will come."""
        for rank, other in self._others.items():
            if other.waiting:
                self._settle(rank, now, force)
        out: list[Item] = []
        while True:
            first = self._differing.first
            if first is not None and (not self._held or first <= self._held[0].place):
                if not self._differing.let_go(now, force, out):
                    break
            elif self._held:
                item = self._held[0]
                passed = self._known and all(other.at > item.place for other in self._others.values())
                if not (force or passed or now - item.since >= BEHIND):
                    break
                out.append(self._held.popleft())
            else:
                break
        return [Shown(tuple(sorted(item.ranks)), item.text, item.what) for item in out]

    def ahead(self, comes: Callable[[int], bool]) -> set[int]:
        """Ranks that are far ahead of another one that writes the same: unless they wait for it, more is kept than is
        good, and in the end no longer known as equal.

        Args:
            comes: whether a rank writes a lot just now.
        """
        far: set[int] = set()
        for rank, other in self._others.items():
            if other.own > FAR_LETTERS // 4:
                continue  # it goes its own way
            if comes(self.lead) and (len(other.waiting) > FAR_LINES or other.letters > FAR_LETTERS):
                far.add(rank)
            if comes(rank) and self._lines.ahead_of(other.at, FAR_LINES, FAR_LETTERS):
                far.add(self.lead)
        return far

    @property
    def held(self) -> int:
        """Letters of the lead that are kept for the others."""
        return self._lines.letters

    @property
    def waiting(self) -> bool:
        """Whether something is held back that time alone will let go."""
        return self._differing.first is not None or bool(
            self._held or any(other.waiting for other in self._others.values())
        )


def _shape(key: str) -> str:
    return alike.shape(key.partition(END)[0] if key.startswith(DISPLAY) else key)
