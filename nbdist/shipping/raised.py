"""The exception that ended a run, brought home as any other value: of the notebook's own class, with its attributes,
its notes and what it was caused by. Each part is a frame of its own: one that cannot travel spoils nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbdist.shipping.errors import article
from nbdist.shipping.explain import reason_of
from nbdist.shipping.giving import packs
from nbdist.shipping.kinds import attributes_of
from nbdist.shipping.kinds_special import OF_THE_PROCESS, ExceptionKind, make_exception, put_attribute
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import EXTRA, Encoder, Frame, FrameFailed, TooLarge
from nbdist.shipping.table import Table, Token
from nbdist.shipping.unpacking import decode

_MOST = 32  # exceptions: causes, contexts and members of groups


@dataclass
class Raised:
    """What arrived.

    Attributes:
        error: None when it could not be made here.
        left_out: parts that stayed, as `.lock (a lock)`.
        reason: why there is no error.
    """

    error: BaseException | None = None
    left_out: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class _Link:
    """One exception in the making.

    Attributes:
        cls: None when `whole` goes as it is: the notebook has this very object, or its class has its own way to pickle.
        arguments: what it is made with.
        own: its attributes.
        members: of a group, by number.
    """

    whole: BaseException
    cls: type[BaseException] | None = None
    arguments: tuple[Any, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    in_words: bool = False

    def content(self) -> Any:
        return (None, self.whole) if self.cls is None else (self.cls, self.arguments)


def _link(error: BaseException, table: Table, known: Callable[[int], Token]) -> _Link:
    if known(id(error)) is not None:
        return _Link(error)
    if not isinstance(table.kinds.of_type(type(error)), ExceptionKind):
        notes = getattr(error, "__notes__", None)
        return _Link(error, own={"__notes__": notes} if notes else {})
    reduced: Any = error.__reduce__()  # the interpreter's own: a tuple
    _, arguments, *more = reduced
    own = {**(more[0] if more and isinstance(more[0], dict) else {}), **attributes_of(error)}
    for name in OF_THE_PROCESS:
        own.pop(name, None)
    return _Link(error, type(error), arguments, own)


def _links(error: BaseException, table: Table, known: Callable[[int], Token]) -> tuple[list[_Link], dict[int, int]]:
    """All exceptions that belong to this one, itself first; the place of each by its id."""
    found: list[_Link] = []
    places: dict[int, int] = {}
    waiting = [error]
    while waiting and len(found) < _MOST:
        one = waiting.pop(0)
        if id(one) in places:
            continue
        places[id(one)] = len(found)
        link = _link(one, table, known)
        found.append(link)
        if isinstance(one, BaseExceptionGroup) and link.cls is not None:
            waiting.extend(one.exceptions)
        waiting.extend(other for other in (one.__cause__, one.__context__) if other is not None)
    for link in found:
        if isinstance(link.whole, BaseExceptionGroup) and link.cls is not None:
            link.members = [places[id(one)] for one in link.whole.exceptions if id(one) in places]
            link.arguments = link.arguments[:1]
    return found, places


def pack_raised(
    encoder: Encoder, table: Table, error: BaseException, known: Callable[[int], Token], limit: int
) -> Parcel:
    """Pack an exception for `Home.raised`.

    Args:
        encoder, table: the rank's own.
        known: the token of an object that the notebook has, and that may be taken for it.
        limit: bytes; what is over it stays.
    """
    links, places = _links(error, table, known)
    left_out: list[str] = []
    reasons: dict[int, str] = {}
    while True:
        frames: list[Frame] = []
        for number, link in enumerate(links):
            if number not in reasons:
                frames.append(Frame(EXTRA, (number, ""), link.content()))
                frames += [Frame(EXTRA, (number, name), value) for name, value in link.own.items()]
        try:
            packed = encoder.encode(frames, {}, known, lambda key: None, limit)
            break
        except FrameFailed as failure:
            frame, reason = failure.frame, reason_of(failure.error)
        except TooLarge as failure:
            frame, reason = failure.frame, "it is too large"
        number, name = frame.key
        link = links[number]
        if name:
            value = link.own.pop(name)
            left_out.append(f".{name} ({article(type(value).__name__)})")
        elif link.cls is not None and link.arguments and not link.in_words:
            link.in_words = True
            link.arguments = tuple(
                one if packs(encoder, known, one) is None else _in_words(one) for one in link.arguments
            )
        else:
            reasons[number] = reason
    facts = [
        {
            "cause": places.get(id(link.whole.__cause__)),
            "context": places.get(id(link.whole.__context__)),
            "suppress": link.whole.__suppress_context__,
            "members": link.members,
        }
        for link in links
    ]
    envelope = {**packed.envelope(), "links": facts, "left_out": left_out, "reason": reasons.get(0, "")}
    return Parcel(pickle.dumps(envelope, 5), packed.files)


def _in_words(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"<{type(value).__name__}>"


def unpack_raised(envelope: dict[str, Any], files: list[int], table: Table, side: Any) -> Raised:
    """Make an exception of what `pack_raised` made, as far as it can be made here."""
    received = decode(envelope, files, table, side, isolate=True)
    facts, left_out = envelope["links"], list(envelope["left_out"])
    contents = {key: content for _, key, content in received.values}
    reason = envelope["reason"]
    for _, (number, name), problem in received.failed:
        if name:
            left_out.append(f".{name} ({reason_of(problem)})")
        elif number == 0:
            reason = reason_of(problem)
    made: dict[int, BaseException] = {}

    def make(number: int) -> BaseException | None:
        if number in made or (number, "") not in contents:
            return made.get(number)
        cls, content = contents[number, ""]
        if cls is not None:
            members = [one for one in map(make, facts[number]["members"]) if one is not None]
            content = make_exception(cls, (*content, members) if facts[number]["members"] else content)
        made[number] = content
        return made[number]

    for number in reversed(range(len(facts))):
        try:
            make(number)
        except Exception as problem:  # its class refuses, or a group has lost all that was in it
            if number == 0:
                reason = reason_of(problem)
    for (number, name), content in contents.items():
        if name and number in made:
            put_attribute(made[number], name, content)
    for number, one in made.items():
        if contents[number, ""][0] is None and one.__cause__ is not None:
            continue
        cause, context = (facts[number][which] for which in ("cause", "context"))
        one.__cause__, one.__context__ = made.get(cause), made.get(context)
        one.__suppress_context__ = facts[number]["suppress"]
    return Raised(made.get(0), left_out, reason)
