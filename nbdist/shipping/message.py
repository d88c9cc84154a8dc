"""One message: frames that share one pickle memo, so that equal memo indices are the same object on both sides.

Each name and each change is a frame of its own. A frame that cannot be rebuilt spoils itself and what refers into it,
nothing else. What both sides know enters the memo before the first frame: the sender sets its pickler's memo, the
receiver runs a prefix that asks for each known object in turn (the C unpickler loses a dict that is assigned to its
memo).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from nbdist.shipping.classify import ATOMS
from nbdist.shipping.kinds import Through, same
from nbdist.shipping.kinds_memory import Moved, TensorKind, has_moved
from nbdist.shipping.memory import Layout, Outgoing
from nbdist.shipping.pickler import FIRST, MEMORY, NAMESPACE, SIDE, CellRef, Packer
from nbdist.shipping.plain import BULK
from nbdist.shipping.table import Table, Token
from nbdist.shipping.views import KnownMemory
from nbdist.shipping.walk import Node, content_digest

BULKS, BIND, UPDATE, EXTRA = "bulk", "bind", "update", "extra"


@dataclass
class Frame:
    """One part of a message: what sort, for which name or token, and its content (for an update: (letter, change))."""

    sort: str
    key: Any
    content: Any


@dataclass
class Packed:
    """A message before it is sent: what goes into the envelope, and what the sender will know once it has arrived."""

    payload: bytes = b""
    spans: list[tuple[str, Any, int, int]] = field(
        default_factory=list
    )  # sort, key, offset, memo index of the frame's mark
    seeds: list[Token] = field(default_factory=list)
    new: list[tuple[int, Token]] = field(default_factory=list)
    layout: Layout = field(default_factory=lambda: Layout([], [], []))
    files: list[int] = field(default_factory=list)
    born: list[tuple[Token, Node]] = field(default_factory=list)
    digests: dict[Token, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    unhooked: int = 0

    def envelope(self) -> dict[str, Any]:
        return {
            "payload": self.payload, "spans": self.spans, "seeds": self.seeds, "new": self.new, "layout": self.layout,
            "digests": self.digests,
        }  # fmt: skip

    @property
    def size(self) -> int:
        return sum(self.sizes)


class FrameFailed(Exception):
    """A frame could not be pickled; `error` says why."""

    def __init__(self, frame: Frame, error: BaseException) -> None:
        super().__init__(str(error))
        self.frame, self.error = frame, error


class TooLarge(Exception):
    """The frames take more than they may; `frame` is the largest."""

    def __init__(self, frame: Frame, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.frame, self.size = frame, size


class Encoder:
    """Makes messages from the objects of a table."""

    def __init__(self, table: Table, side: Any) -> None:
        self.table, self.side = table, side

    def measure(self, frames: list[Frame], nodes: dict[int, Node], known: Callable[[int], Token]) -> list[int]:
        """The bytes of each frame, memory included; nothing is copied."""
        packed, _ = self._pickle(frames, nodes, known)
        return packed.sizes

    def encode(
        self,
        frames: list[Frame],
        nodes: dict[int, Node],
        known: Callable[[int], Token],
        name_born: Callable[[int], Token],
        limit: int | None = None,
        untrusted: Container[Token] = (),
    ) -> Packed:
        """Pickle frames into one message.

        Args:
            frames: what to send.
            nodes: the nodes that a walk met; only those get a token.
            known: the token under which the other side knows the object with this id, or None.
            name_born: a token for a node that it does not know.
            limit: bytes that the message may take.
            untrusted: tokens of objects whose content may differ there; new views of their memory are sent with their
                content.

        Raises:
            FrameFailed: this frame cannot be pickled.
            TooLarge: all frames take more than `limit` bytes; the largest is named.
            NotEnoughMemory: the shared copy does not fit.
        """
        if not frames:
            return Packed()
        packed, (memo, memory) = self._pickle(frames, nodes, known, untrusted)
        if limit is not None and len(packed.payload) + memory.size() > limit:
            sizes = packed.sizes[-len(frames) :]
            largest = max(range(len(frames)), key=sizes.__getitem__)
            raise TooLarge(frames[largest], sizes[largest])
        for key, (index, value) in memo.items():
            if type(value) is CellRef:
                value = value.cell
                key = id(value)
            node = nodes.get(key)
            if node is not None and known(key) is None:
                token = name_born(key)
                packed.new.append((index, token))
                packed.born.append((token, node))
        for token, node in packed.born:
            digest = content_digest(node)
            if digest is not None:
                packed.digests[token] = digest
        packed.layout, packed.files = memory.pack()
        return packed

    def _pickle(
        self,
        frames: list[Frame],
        nodes: dict[int, Node],
        known: Callable[[int], Token],
        untrusted: Container[Token] = (),
    ) -> tuple[Packed, tuple[dict[int, tuple[int, Any]], Outgoing]]:
        seeds, bulks = self._reach(frames, nodes, known)
        built: list[KnownMemory] = []
        moving = {
            id(self.table.objects.get(frame.key))
            for frame in frames
            if frame.sort == UPDATE and frame.content[0] == TensorKind.letter and type(frame.content[1][0]) is Moved
        }

        def equal(value: Any) -> bool:
            key = id(value)
            token = known(key)
            if token in untrusted or key in moving:
                return False
            snapshot = self.table.snapshots.get(token)
            if snapshot is not None and has_moved(value, snapshot):  # there it still looks at the old memory
                return False
            if key in nodes:  # if it has changed, the change is in this message
                return True
            return snapshot is not None and same(snapshot, self.table.snapshot(value))

        def shared() -> KnownMemory:
            if not built:  # only when something new with memory is sent
                held = (value for key, value in self.table.held() if known(key) is not None)
                built.append(KnownMemory(held, equal))
            return built[0]

        while True:
            packed = Packed(seeds=list(seeds))
            memory, stream = Outgoing(), io.BytesIO()
            packer = Packer(stream, self.table.namespace, memory, self.side, self.table.kinds)
            packer.known_memory, packer.known = shared, known
            start = {
                id(self.table.namespace): (NAMESPACE, self.table.namespace),
                id(memory): (MEMORY, memory),
                id(self.side): (SIDE, self.side),
            }
            for index, value in enumerate(seeds.values()):
                start[id(value)] = (FIRST + index, value)
                if type(value).__name__ == "cell":
                    packer.known_cells.add(id(value))
            packer.memo = start
            marks: list[list[Any]] = []
            if bulks:
                self._bulks(packer, stream, bulks, packed, marks)
            for frame in frames:
                offset, intervals = stream.tell(), len(memory.intervals)
                mark: list[Any] = []
                marks.append(mark)
                try:
                    packer.frame((mark, frame.content))
                except Exception as error:
                    raise FrameFailed(frame, error) from error
                packed.spans.append((frame.sort, frame.key, offset, 0))
                packed.sizes.append(stream.tell() - offset + memory.size(intervals))
            memo = packer.memo.copy()
            # What the pickler met and the other side knows must not be sent as a copy: go again with it among the
            # seeds.
            missed = {
                token: value
                for key, (_, value) in memo.items()
                if key not in start and (token := known(key)) is not None and token not in seeds
            }
            if not missed:
                break
            seeds.update(missed)
        packed.spans = [
            (sort, key, offset, memo[id(mark)][0])
            for (sort, key, offset, _), mark in zip(packed.spans, marks, strict=True)
        ]
        packed.payload, packed.modules, packed.unhooked = stream.getvalue(), packer.modules, packer.unhooked
        return packed, (memo, memory)

    def _bulks(
        self, packer: Packer, stream: io.BytesIO, bulks: list[Any], packed: Packed, marks: list[list[Any]]
    ) -> None:
        """Send bulk containers first, as pickles of their own, and put each in the memo in its stand-in's place."""
        mark: list[Any] = []
        marks.append(mark)
        stands = [BULK.change(value, None, ("U", (), ())) for value in bulks]
        packed.spans.append((BULKS, None, stream.tell(), 0))
        packer.frame((mark, tuple(stands)))
        memo = packer.memo.copy()
        # The index of what comes next is the number of entries: the stand-in's entry is replaced, not doubled.
        for stand, value in zip(stands, bulks, strict=True):
            index, _ = memo.pop(id(stand))
            memo[id(value)] = (index, value)
        packer.memo = memo
        packed.sizes.append(stream.tell())

    def _reach(
        self, frames: list[Frame], nodes: dict[int, Node], known: Callable[[int], Token]
    ) -> tuple[dict[Token, Any], list[Any]]:
        """(known objects that the frames refer to, by token; new bulk containers)."""
        seeds: dict[Token, Any] = {}
        bulks: list[Any] = []
        kinds = self.table.kinds
        stack: list[Any] = []
        for frame in frames:
            if frame.sort == UPDATE:
                letter, change = frame.content
                stack.extend(_KINDS()[letter].sent(change))
            else:
                stack.append(frame.content)
        seen: dict[int, Any] = {}
        while stack:
            value = stack.pop()
            if type(value) in ATOMS or id(value) in seen:
                continue
            seen[id(value)] = value
            token = known(id(value))
            if token is not None:
                seeds[token] = value
                continue
            node = nodes.get(id(value))
            if node is not None:
                if node.kind is BULK:
                    bulks.append(value)
                else:
                    stack.extend(node.kind.children(value, node.snapshot[2]))
                continue
            kind = kinds.of(value)
            if isinstance(kind, Through):
                stack.extend(kind.children(value, ()))
            elif isinstance(value, dict):
                stack.extend(value.values())
            elif isinstance(value, list):
                stack.extend(value)
        return seeds, bulks


def _KINDS() -> Any:
    from nbdist.shipping.classify import KINDS

    return KINDS


def binding_order(values: dict[str, Any]) -> list[str]:
    """Names in the order in which they are sent: modules, values and functions first, since rebuilding an object may
    call them.
    """

    def turn(name: str) -> int:
        value = values[name]
        if type(value) in ATOMS or isinstance(value, ModuleType):
            return 0
        return 1 if isinstance(value, type | FunctionType) else 2

    return sorted(values, key=turn)
