"""Packing what the notebook ships: a name that is surely read must go, or the cell does not start; others may stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nbdist.shipping.chunks import Pieces
from nbdist.shipping.errors import CannotShip
from nbdist.shipping.explain import advice_for, path_to_trouble, reason_of, too_deep
from nbdist.shipping.message import BIND, EXTRA, UPDATE, Encoder, Frame, FrameFailed, binding_order
from nbdist.shipping.patching import PATCHED, without_content
from nbdist.shipping.shipment import Plan
from nbdist.shipping.table import Table, Token
from nbdist.shipping.walk import Walked, content_digest


@dataclass
class Sending:
    """One shipment in the making; it has a plan for each set of ranks that get the same.

    Attributes:
        walked: everything that is reached from the names and from `extra`.
        hard: names that are surely read.
        numbers: gives tokens to objects that have none yet.
        whole: tokens of objects that a change does not suffice for: "all" their content, or "anew".
        left_out: names that could not be packed and may stay, with the reason.
    """

    table: Table
    encoder: Encoder
    namespace: dict[str, Any]
    numbers: Iterator[int]
    walked: Walked
    hard: set[str]
    extra: Any
    whole: dict[Token, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    _fresh: dict[int, Token] = field(default_factory=dict)

    def pack(self, plan: Plan, lacking: frozenset[Token], untrusted: frozenset[Token]) -> None:
        """Encode a plan, leaving out what cannot be packed and is not surely read.

        Args:
            lacking: tokens of objects that these ranks do not have.
            untrusted: tokens of objects that may differ there from what the notebook knows.

        Raises:
            CannotShip: a name that is surely read cannot leave this process.
        """
        tokens = self.table.tokens

        def known(key: int) -> Token:
            token = tokens.get(key)
            return None if token is None or token in lacking else token

        def name_born(key: int) -> Token:
            token = tokens.get(key) or self._fresh.get(key)
            if token is None:
                token = self._fresh[key] = next(self.numbers)
            return token

        while True:
            try:
                frames = self._frames(plan)
                plan.packed = self.encoder.encode(frames, self.walked.nodes, known, name_born, untrusted=untrusted)
                break
            except FrameFailed as failure:
                self._leave_out(failure, plan)
        for token, (node, _) in plan.updates.items():
            digest = content_digest(node)
            if digest is not None:
                plan.packed.digests[token] = digest

    def _frames(self, plan: Plan) -> list[Frame]:
        frames = [Frame(BIND, name, plan.binds[name]) for name in binding_order(plan.binds)]
        for token, (node, old) in plan.updates.items():
            frame, how = Frame(UPDATE, token, None), self.whole.get(token)
            if how is not None:
                old = None if how == "anew" else without_content(old)
            try:
                change = node.kind.change(node.value, old, node.snapshot)
            except Exception as error:
                raise FrameFailed(frame, error) from error
            frame.content = (node.kind.letter, change)
            if node.kind.letter in PATCHED and type(change[0]) is Pieces:
                plan.patches[token] = (change[0].size, change[0].form[3])
            frames.append(frame)
        if self.extra is not None:
            frames.append(Frame(EXTRA, None, self.extra))
        return frames

    def _leave_out(self, failure: FrameFailed, plan: Plan) -> None:
        """Take a failed frame out of a plan if no name that is surely read needs it; else raise CannotShip."""
        frame = failure.frame
        if frame.sort == BIND and frame.key not in self.hard:
            self.left_out[frame.key] = too_deep(frame.content, failure.error) or reason_of(failure.error)
            del plan.binds[frame.key]
            return
        if frame.sort == BIND:
            raise self._cannot(frame.key, self.namespace[frame.key], failure.error) from None
        if frame.sort == EXTRA:
            raise self._cannot_call(frame.content, failure.error) from None
        node = plan.updates.pop(frame.key)[0]
        for name in sorted(self.hard):
            reached = self.table.walker.walk([(name, self.namespace[name])], light=True)
            if id(node.value) in reached.nodes:
                raise self._cannot(name, self.namespace[name], failure.error) from None

    def _packs(self, part: Any) -> bool:
        try:
            self.encoder.measure([Frame(BIND, "", part)], {}, lambda key: None)
        except FrameFailed:
            return False
        return True

    def _cannot_call(self, extra: Any, error: BaseException) -> CannotShip:
        """What is wrong with a function and its arguments."""
        if not (isinstance(extra, tuple) and len(extra) == 3 and isinstance(extra[2], dict)):
            return self._cannot("what goes with the cell", extra, error)
        function, arguments, keywords = extra
        called = getattr(function, "__name__", type(function).__name__)
        parts = {called: function, **{f"args[{place}]": one for place, one in enumerate(arguments)}, **keywords}
        for name, part in parts.items():
            if not self._packs(part):
                return self._cannot(name, part, error, inside=called)
        return self._cannot("the arguments", extra, error, inside=called)

    def _cannot(self, name: str, value: Any, error: BaseException, inside: str = "") -> CannotShip:
        deep = too_deep(value, error)
        if deep:
            advice = f"Create it inside {inside or 'the cell'}, or keep it flatter (a list in place of links)"
            return CannotShip(name, name, type(value).__name__, f"it is {deep}", advice)
        trouble = path_to_trouble(name, value, self._packs)
        advice = advice_for(name, value, trouble, inside)
        return CannotShip(name, trouble.path, type(value).__name__, trouble.what(error), advice)
