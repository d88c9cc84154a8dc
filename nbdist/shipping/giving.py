"""Packing what a lead rank returns: what cannot be packed stays, is named, and spoils nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbdist.shipping.comparing import changed
from nbdist.shipping.errors import StaysOnRank, in_words
from nbdist.shipping.explain import path_to_trouble, reason_of, too_deep
from nbdist.shipping.kinds import Stays
from nbdist.shipping.message import (
    BIND,
    EXTRA,
    UPDATE,
    Encoder,
    Frame,
    FrameFailed,
    Packed,
    TooLarge,
    binding_order,
)
from nbdist.shipping.spread import SPREAD, NotGathered, leaves_gradient
from nbdist.shipping.table import Table, Token
from nbdist.shipping.walk import Node, Walked

Describe = Callable[[str, Any, str, int | None], dict[str, Any]]


@dataclass
class Giving:
    """A return in the making. What cannot be packed or is too large goes from `binds` to `handles`, from `updates` to
    `notes`.

    Attributes:
        encoder, known: how objects are pickled, and which of them the notebook knows (by id).
        describe: makes the facts of a handle: (name, value, reason, size).
        paths: names by the id of their object, for messages.
        again: tokens of what was not sent as a whole this time, and is to be compared as before the next time.
    """

    encoder: Encoder
    known: Callable[[int], Token]
    describe: Describe
    paths: dict[int, str]
    binds: dict[str, Any] = field(default_factory=dict)
    updates: dict[Token, tuple[Node, Any]] = field(default_factory=dict)
    handles: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    again: set[Token] = field(default_factory=set)

    def label(self, value: Any) -> str:
        return self.paths.get(id(value)) or f"a {type(value).__name__}"

    def take_up(self, table: Table, walked: Walked) -> None:
        """All that was changed of what the notebook knows; a note on what cannot be told."""
        for value in walked.stays:
            kind = table.kinds.of(value)
            reason = kind.reason if isinstance(kind, Stays) else ""
            self._left(value, reason)
        for token, node in changed(table, walked.nodes):
            try:
                self.updates[token] = (node, node.kind.change(node.value, table.snapshots[token], node.snapshot))
                if node.kind is SPREAD and leaves_gradient(node.value):
                    self.again.add(token)
            except NotGathered:
                continue
            except Exception as error:
                self.notes.append(f"{self.label(node.value)} was left as it was: {reason_of(error)}")

    def _left(self, value: Any, reason: str) -> None:
        self.notes.append(f"{self.label(value)} ({type(value).__name__}) was left as it was: {reason}")

    def stays(self, name: str, reason: str, size: int | None = None) -> None:
        """This name becomes a handle."""
        self.handles[name] = self.describe(name, self.binds.pop(name), reason, size)

    def pack(self, walked: Walked, name_born: Callable[[int], Token], extra: Any, limit: int) -> tuple[Packed, bool]:
        """Encode. Returns the message, and whether `extra` is in it."""
        send_extra = extra is not None
        while True:
            frames = [Frame(BIND, name, self.binds[name]) for name in binding_order(self.binds)]
            frames += [
                Frame(UPDATE, token, (node.kind.letter, change)) for token, (node, change) in self.updates.items()
            ]
            if send_extra:
                frames.append(Frame(EXTRA, None, extra))
            try:
                return self.encoder.encode(frames, walked.nodes, self.known, name_born, limit), send_extra
            except FrameFailed as failure:
                frame, reason, size = failure.frame, reason_of(failure.error), None
                if isinstance(failure.error, NotGathered) and frame.sort == UPDATE:
                    self._split(frame.key, "", whole=False)
                    continue
                if frame.sort == BIND:
                    reason = why(self.encoder, self.known, frame.key, frame.content, failure.error)
            except TooLarge as failure:
                frame, reason, size = failure.frame, f"over the return limit of {in_words(limit)}", failure.size
            if frame.sort == BIND:
                self.stays(frame.key, reason, size)
            elif frame.sort == EXTRA:
                send_extra = False
                self.handles[""] = self.describe("", extra, reason, size)
            else:
                self._split(frame.key, reason, whole=size is not None)

    def _split(self, token: Token, reason: str, whole: bool) -> None:
        """Of a change that cannot be packed, keep the parts that can."""
        node, change = self.updates.pop(token)
        label = self.label(node.value)
        parts = None if whole else node.kind.parts(change)
        good = []
        for step, part in parts or ():
            error = packs(self.encoder, self.known, part)
            if error is None:
                good.append(part)
            elif isinstance(error, NotGathered):  # told once for all of them, see `Reached.notes`
                self.again.add(token)
            else:
                self.notes.append(f"{label}{step} ({type(part[1]).__name__}) was left as it was: {reason_of(error)}")
        if not parts or len(good) == len(parts):
            if reason:
                self._left(node.value, reason)
        elif good:
            self.updates[token] = (node, node.kind.join(change, good))


def packs(encoder: Encoder, known: Callable[[int], Token], value: Any) -> Exception | None:
    """What keeps this value from being packed by itself, None when nothing does."""
    try:
        encoder.measure([Frame(BIND, "", value)], {}, known)
    except FrameFailed as failure:
        return failure.error if isinstance(failure.error, Exception) else None
    return None


def why(encoder: Encoder, known: Callable[[int], Token], name: str, value: Any, error: BaseException) -> str:
    """The reason in words, with the path to the part that is to blame."""
    if isinstance(error, NotGathered):
        return str(error)
    deep = too_deep(value, error)
    if deep:
        return f"it is {deep}"
    trouble = path_to_trouble(name, value, lambda part: packs(encoder, known, part) is None)
    if isinstance(error, StaysOnRank) and trouble.path == name:
        return str(error)
    return f"{trouble.path} is {trouble.what(error)}" if trouble.path != name else trouble.what(error)
