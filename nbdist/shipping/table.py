"""The token table of one side: which objects the other side has a copy of, and how each was when they were equal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from nbdist.shipping.classify import Classifier
from nbdist.shipping.kinds import MISSING, Snapshot
from nbdist.shipping.kinds_object import MODULE_PARTS, hooks_stay
from nbdist.shipping.patching import remember_content
from nbdist.shipping.plain import LARGE
from nbdist.shipping.walk import LARGE_TYPES, Walker

# An int for what was born in the notebook, (cell, group, position) on a rank, ("part", token, attribute) in a module.
Token = Any
PART = "part"
GONE = object()  # in a snapshot, for an object that the notebook has dropped


class Table:
    """Objects by token, tokens by identity, and snapshots."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.kinds = Classifier()
        self.objects: dict[Token, Any] = {}
        self.tokens: dict[int, Token] = {}
        self.snapshots: dict[Token, Snapshot] = {}
        self.patched: dict[Token, tuple[int, int]] = {}
        self.walker = Walker(self.kinds, namespace, self.tokens.get, self._adopt_parts, self.snapshots.get)

    def put(self, token: Token, value: Any, snapshot: Snapshot | None = None) -> None:
        """The other side knows this object under this token (and, with a snapshot, has it in this state)."""
        before = self.objects.get(token, MISSING)
        if before is not MISSING and before is not value:
            self.tokens.pop(id(before), None)
        self.objects[token] = value
        self.tokens[id(value)] = token
        if snapshot is not None:
            self.snapshots[token] = snapshot

    def replace(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Other objects stand in the place of known ones (old, new): under their tokens, and in the snapshots."""
        new_of: dict[int, Any] = {}
        for old, new in pairs:
            token = self.tokens.pop(id(old), None)
            if token is None:
                continue
            self.objects[token] = new
            self.tokens[id(new)] = token
            new_of[id(old)] = new
            if (snapshot := self.snapshots.get(token)) is not None:
                letter, scalars, references = snapshot
                self.snapshots[token] = (letter, (*scalars[:6], None), references)
        if not new_of:
            return
        for token, (letter, scalars, references) in list(self.snapshots.items()):
            if any(id(value) in new_of for value in references):
                self.snapshots[token] = (letter, scalars, tuple(new_of.get(id(value), value) for value in references))

    def drop(self, token: Token) -> None:
        """Forget a token."""
        value = self.objects.pop(token, MISSING)
        if value is not MISSING and self.tokens.get(id(value)) == token:
            del self.tokens[id(value)]
            self.kinds.opened.pop(id(value), None)
        self.snapshots.pop(token, None)
        self.patched.pop(token, None)
        self.walker.bulk.discard(token)

    def release(self, dead: dict[Token, Any]) -> None:
        """Forget objects, and let go of them wherever a snapshot refers to them: it would keep their memory."""
        gone = {id(value) for value in dead.values()}
        for token in dead:
            self.drop(token)
        for token, (letter, scalars, references) in list(self.snapshots.items()):
            if any(id(value) in gone for value in references):
                kept = tuple(GONE if id(value) in gone else value for value in references)
                self.snapshots[token] = (letter, scalars, kept)

    def clear(self) -> None:
        self.objects.clear()
        self.tokens.clear()
        self.snapshots.clear()
        self.patched.clear()
        self.walker.bulk.clear()
        self.kinds.opened.clear()

    def came_opened(self, value: Any) -> None:
        """The other side compares this item by item: here it is no bulk container either."""
        if type(value) in LARGE_TYPES and len(value) >= LARGE:
            self.kinds.opened[id(value)] = value
            self.walker.bulk.discard(self.tokens.get(id(value)))

    def has_patched(self, patches: dict[Token, tuple[int, int]]) -> None:
        """Objects whose content was sent in pieces: (bytes sent, bytes of all)."""
        for token, (size, length) in patches.items():
            if size == length:
                self.patched.pop(token, None)
            else:
                self.patched[token] = (self.patched.get(token, (0, 0))[0] + size, length)

    def worn_out(self) -> list[Token]:
        """Objects of which so many pieces were sent that the old files, each mapped in part, hold as much memory
        again: the next change is to be sent whole.
        """
        return [token for token, (size, length) in self.patched.items() if size >= length]

    def held(self) -> Iterable[tuple[int, Any]]:
        """(id, object) of all that has a token."""
        return ((id(value), value) for value in self.objects.values())

    def find(self, token: Token) -> Any:
        """The object of a token; parts of modules are found through their module."""
        value = self.objects.get(token, MISSING)
        if value is MISSING:
            if isinstance(token, tuple) and token[0] == PART:
                value = self.find(token[1]).__dict__[token[2]]
                self.put(token, value)
            else:
                raise KeyError(token)
        return value

    def _adopt_parts(self, module: Any) -> list[Any]:
        """Give tokens to parts of a known module that are no longer empty, or that another module holds as well, as
        after `copy.copy(module)`; return known parts that are empty now.

        The other side has such a part as well, empty, and finds it by its attribute.
        """
        emptied = []
        base = self.tokens[id(module)]
        own = module.__dict__
        for name in MODULE_PARTS[:4] if hooks_stay(own) else MODULE_PARTS:
            part = own.get(name)
            if part is None:
                continue
            if id(part) in self.tokens:
                if not part:
                    emptied.append(part)
            elif part or sys.getrefcount(part) > _references_alone():
                token = (PART, base, name)
                old = self.snapshots.get(token)
                kind = self.kinds.of(part)
                if kind is not None:
                    self.put(token, part, old or (kind.letter, *kind.snap(type(part)())))
        return emptied

    def remember(self, tokens: Iterable[Token], digests: dict[Token, Any]) -> None:
        """The content of these objects has come with a message that gave these digests."""
        for token in tokens:
            if token in digests and token in self.objects:
                remember_content(self.objects[token], digests[token])

    def refresh(self, tokens: Iterable[Token], digests: dict[Token, Any] | None = None) -> None:
        """Take new snapshots of objects as they are now."""
        digests = digests or {}
        for token in tokens:
            value = self.objects.get(token, MISSING)
            if value is not MISSING:
                self.snapshots[token] = self.snapshot(value, digests.get(token))

    def snapshot(self, value: Any, digest: Any = None) -> Snapshot:
        """An object's snapshot now."""
        kind, found = self.kinds.look(value)
        if kind is None or not kind.token:
            return ("", (), ())
        scalars, references = kind.snap(value, found if found is not None else digest)
        return (kind.letter, scalars, references)


@cache
def _references_alone() -> int:
    """What sys.getrefcount says in `_adopt_parts` of a part that only its module holds."""
    own: dict[str, Any] = {"part": {}}
    part = own.get("part")
    return sys.getrefcount(part)
