"""Walking from names to every object that they reach, and telling whether two ranks reached the same structure."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from nbdist.shipping.classify import ATOMS, Classifier
from nbdist.shipping.kinds import FrozenSetKind as _FrozenSetKind
from nbdist.shipping.kinds import Kind, Snapshot, Stays, Through
from nbdist.shipping.kinds_object import ModuleKind
from nbdist.shipping.kinds_special import WeakKind
from nbdist.shipping.names import globals_read
from nbdist.shipping.plain import BULK, LARGE, holds_any


class Node(NamedTuple):
    """A mutable object that a walk met, and how it is now."""

    value: Any
    kind: Kind
    snapshot: Snapshot


def content_digest(node: Node) -> Any:
    """The hash of a tensor's or array's content; None for other nodes."""
    letter, scalars, _ = node.snapshot
    if letter == "T" and len(scalars) > 4:
        return scalars[4]
    return scalars[3] if letter == "N" and len(scalars) > 3 else None


@dataclass
class Walked:
    """What a walk met.

    Attributes:
        nodes: by id, in the order in which they were met.
        places: by id, the (group, position) at which a node was first met. A group is a root's label.
        held: what was walked through; held so that no address is used twice during a walk.
        stays: known objects that may not leave their process any more.
        signs: for each group the facts that must be equal on two ranks for their nodes to correspond.
    """

    nodes: dict[int, Node] = field(default_factory=dict)
    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    signs: dict[str, list[Any]] = field(default_factory=dict)
    stays: list[Any] = field(default_factory=list)

    def signatures(self) -> dict[str, int]:
        """A hash for each group."""
        return {group: xxhash.xxh3_64_intdigest(repr(facts).encode()) for group, facts in self.signs.items()}


class Walker:
    """Walks objects. `meet_module` is called for each module with a token, and returns further objects to visit."""

    def __init__(
        self,
        kinds: Classifier,
        namespace: dict[str, Any],
        token_of: Callable[[int], Any],
        meet_module: Callable[[Any], list[Any]],
        snapshot_of: Callable[[Any], Snapshot | None],
    ) -> None:
        self.kinds, self.namespace, self.token_of, self.meet_module = kinds, namespace, token_of, meet_module
        self.snapshot_of = snapshot_of
        self.bulk: set[Any] = set()  # tokens of objects that came as bulk: a light walk takes them as that

    def walk(
        self,
        roots: Iterable[tuple[str, Any]],
        *,
        light: bool = False,
        place: bool = False,
        found: Callable[[frozenset[str]], list[tuple[str, Any]]] | None = None,
        grown: Callable[[Node], Iterable[Any]] | None = None,
        late: Iterable[Any] = (),
        weakly: bool = True,
    ) -> Walked:
        """Visit everything reachable, depth first.

        Args:
            roots: labelled objects.
            light: do not hash contents.
            place: keep places and signatures.
            found: takes the global names that a function reads; returns further roots.
            grown: takes a node; returns further objects to visit at the end (what it used to refer to).
            late: objects to visit at the end.
            weakly: visit also what is only referred to weakly.
        """
        walked = Walked()
        nodes, held, places, signs = walked.nodes, walked.held, walked.places, walked.signs
        of_type, look = self.kinds.of_type, self.kinds.look
        by_type = self.kinds._by_type
        stack: list[tuple[str, Any]] = list(roots)[::-1]
        after: list[Any] = list(late)[::-1]
        bulks: list[tuple[str, Any]] = []
        while stack or after or (bulks and (stack := self._open(bulks, nodes))):
            # Visited at the end, in a group that other ranks do not have: it must not take another root's places.
            group, value = stack.pop() if stack else (LATE, after.pop())
            cls = type(value)
            if cls in ATOMS:
                continue
            key = id(value)
            if key in nodes:
                if place:
                    signs.setdefault(group, []).append(places[key])
                continue
            if key in held or value is self.namespace:
                continue
            if by_type.get(cls, MISSING_TYPE) is None or of_type(cls) is None:
                continue
            if cls in LARGE_TYPES and len(value) >= LARGE:
                token = self.token_of(key)
                kind, digest = look(value, light and token in self.bulk, self.snapshot_of(token))
            else:
                kind, digest = self.kinds.of(value), None
            if kind is None:
                continue
            if isinstance(kind, Through):
                held[key] = value
                if isinstance(kind, Stays):
                    if self.token_of(key) is not None:
                        walked.stays.append(value)
                    continue
                if place:
                    signs.setdefault(group, []).append((cls.__name__, kind.shape(value)))
                children: Iterable[Any] = kind.children(value, ())
                if isinstance(kind, _FrozenSetKind) and place:
                    group = f"{group}{{}}"
            else:
                try:
                    scalars, references = kind.snap(value, digest, light)
                except Exception as error:  # the object's own code; packing it will say what is wrong
                    scalars, references = ("unreadable", type(error).__name__), ()
                node = nodes[key] = Node(value, kind, (kind.letter, scalars, references))
                token = self.token_of(key)
                if place:
                    facts = signs.setdefault(group, [])
                    places[key] = (group, len(facts))
                    facts.append((kind.letter, cls.__qualname__, kind.shape(value), token))
                if kind is BULK:
                    bulks.append((group, value))
                if grown is not None:
                    after.extend(grown(node))
                if found is not None and kind.letter == "F" and value.__globals__ is self.namespace:
                    stack.extend(found(globals_read(value.__code__)))
                children = kind.children(value, references)
                if not weakly and isinstance(kind, WeakKind):
                    children = [part for part in references if type(part) is not weakref.ref]
                if token is not None and isinstance(kind, ModuleKind):
                    children = [*children, *self.meet_module(value)]
                if kind.unordered and place:
                    group = f"{group}{{}}"  # no order: a group of its own, which only this rank knows
            if not isinstance(children, tuple | list):
                children = list(children)
            if len(children) > 8 and set(map(type, children)) <= ATOMS:
                continue
            stack.extend([(group, child) for child in reversed(children) if type(child) not in ATOMS])
        return walked

    def _open(self, bulks: list[tuple[str, Any]], nodes: dict[int, Node]) -> list[tuple[str, Any]]:
        """Bulk containers that hold what was met by itself as well are to be visited again, item by item."""
        ids = {key for key, node in nodes.items() if type(node.value) in LARGE_TYPES}
        found = [(group, value) for group, value in bulks if len(ids) > 1 and holds_any(value, ids)]
        bulks.clear()
        for _, value in found:
            del nodes[id(value)]
            self.kinds.opened[id(value)] = value
            self.bulk.discard(self.token_of(id(value)))
        return found[::-1]


MISSING_TYPE = object()
LATE = "{}"
LARGE_TYPES = frozenset({list, dict, set})
