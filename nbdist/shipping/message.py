"""One message: frames that share one pickle memo, so that equal memo indices are the same object on both sides.

Each name and each change is a frame of its own. A frame that cannot be rebuilt spoils itself and what refers into it,
nothing else. What both sides know enters the memo before the first frame: the sender sets its pickler's memo, the
receiver runs a prefix that asks for each known object in turn (the C unpickler loses a dict that is assigned to its
memo).
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

from nbdist.shipping.classify import ATOMS
from nbdist.shipping.kinds import MISSING, Through, same
from nbdist.shipping.memory import Incoming, Layout, Outgoing
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

        def equal(value: Any) -> bool:
            key = id(value)
            token = known(key)
            if token in untrusted:
                return False
            if key in nodes:  # if it has changed, the change is in this message
                return True
            snapshot = self.table.snapshots.get(token)
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


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, seeds: list[Any]) -> None:
        super().__init__(stream)
        self.seeds = seeds

    def persistent_load(self, index: int) -> Any:
        return self.seeds[index]


def _prefix(count: int) -> bytes:
    """A pickle program that memoises the objects 0..count-1 and returns None."""
    return b"\x80\x05" + b"".join(b"J" + struct.pack("<i", index) + b"Q\x940" for index in range(count)) + b"N."


class Lost:
    """Stands in the memo for what was in a frame that could not be rebuilt."""


LOST = Lost()


_PythonUnpickler: Any = pickle._Unpickler


class _CarefulUnpacker(_PythonUnpickler):
    """The slow way, frame by frame, when a frame has failed: the memo is kept in step by the index of each frame's
    mark.
    """

    def __init__(self, stream: io.BytesIO, seeds: list[Any]) -> None:
        super().__init__(stream)
        self.stream = stream
        self.memo = dict(enumerate(seeds))

    def frame(self, offset: int, mark: int) -> Any:
        for index in [index for index in self.memo if index >= mark]:
            del self.memo[index]
        for index in range(len(self.memo), mark):
            self.memo[index] = LOST
        self.stream.seek(offset)
        return self.load()

    def _recall(self, index: int) -> None:
        value = self.memo.get(index, LOST)
        if value is LOST:
            raise pickle.UnpicklingError("it refers to something else that could not be rebuilt")
        self.append(value)

    def _binget(self) -> None:
        self._recall(self.read(1)[0])

    def _long_binget(self) -> None:
        self._recall(struct.unpack("<I", self.read(4))[0])

    dispatch: ClassVar[dict[int, Any]] = {
        **_PythonUnpickler.dispatch,
        pickle.BINGET[0]: _binget,
        pickle.LONG_BINGET[0]: _long_binget,
    }


@dataclass
class Unpacked:
    """A received message, rebuilt but not yet acted upon."""

    values: list[tuple[str, Any, Any]]  # sort, key, content
    failed: list[tuple[str, Any, BaseException]]
    new: list[tuple[Token, Any]]
    digests: dict[Token, Any]
    lost: list[Token]
    undo: list[tuple[str, Any]] = field(default_factory=list)  # names bound while decoding, and what they were

    def unbind(self, namespace: dict[str, Any]) -> None:
        """Take back what decoding has bound."""
        _restore(namespace, self.undo)


class DecodeFailed(Exception):
    """A frame could not be rebuilt."""

    def __init__(self, sort: str, key: Any, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.sort, self.key, self.error = sort, key, error


def decode(envelope: dict[str, Any], files: list[int], table: Table, side: Any, *, isolate: bool) -> Unpacked:
    """Rebuild a message. No object that exists is changed; names are bound as they come, and can be unbound again.

    Names are bound at once because rebuilding an object may run code of the notebook (`__setstate__`) that reads them.

    Args:
        isolate: go on after a frame that fails, instead of raising.

    Raises:
        DecodeFailed: the first frame that failed, unless `isolate`.
    """
    spans = envelope["spans"]
    if not spans:
        for file in files:
            _close(file)
        return Unpacked([], [], [], {}, [])
    memory = Incoming(envelope["layout"], files)
    try:
        seeds: list[Any] = [table.namespace, memory, side]
        for token in envelope["seeds"]:
            try:
                seeds.append(table.find(token))
            except KeyError:  # forgotten here since: what refers to it fails, and nothing else
                if not isolate:
                    raise
                seeds.append(LOST)
        stream = io.BytesIO(_prefix(len(seeds)) + envelope["payload"])
        unpacker = _Unpacker(stream, seeds)
        unpacker.load()
        values: list[tuple[str, Any, Any]] = []
        failed: list[tuple[str, Any, BaseException]] = []
        memo: dict[int, Any]
        current = spans[0]
        undo: list[tuple[str, Any]] = []
        try:
            if any(seed is LOST for seed in seeds):
                raise pickle.UnpicklingError("an object is no longer known")
            for current in spans:
                content = unpacker.load()[1]
                values.append((current[0], current[1], content))
                if current[0] == BIND:
                    _bind(table.namespace, current[1], content, undo)
            memo = unpacker.memo.copy() if envelope["new"] else {}
        except Exception as error:
            _restore(table.namespace, undo)
            if not isolate:
                raise DecodeFailed(current[0], current[1], error) from error
            values, failed, memo = _decode_carefully(envelope, seeds, table.namespace, undo)
        new, lost = [], []
        for index, token in envelope["new"]:
            value = memo.get(index, LOST)
            if value is LOST:
                lost.append(token)
            else:
                new.append((token, value))
        return Unpacked(values, failed, new, envelope["digests"], lost, undo)
    finally:
        memory.close()


def _decode_carefully(
    envelope: dict[str, Any], seeds: list[Any], namespace: dict[str, Any], undo: list[tuple[str, Any]]
) -> tuple[list[tuple[str, Any, Any]], list[tuple[str, Any, BaseException]], dict[int, Any]]:
    unpacker = _CarefulUnpacker(io.BytesIO(envelope["payload"]), seeds)
    values: list[tuple[str, Any, Any]] = []
    failed: list[tuple[str, Any, BaseException]] = []
    good: dict[int, Any] = {}
    for sort, key, offset, mark in envelope["spans"]:
        try:
            content = unpacker.frame(offset, mark)
            values.append((sort, key, content[1]))
            if sort == BIND:
                _bind(namespace, key, content[1], undo)
            good.update((index, value) for index, value in unpacker.memo.items() if index >= mark)
        except Exception as error:
            failed.append((sort, key, error))
            for index in [index for index in unpacker.memo if index >= mark]:
                unpacker.memo[index] = LOST
    return values, failed, good


def _bind(namespace: dict[str, Any], name: str, value: Any, undo: list[tuple[str, Any]]) -> None:
    undo.append((name, namespace.get(name, MISSING)))
    namespace[name] = value


def _restore(namespace: dict[str, Any], undo: list[tuple[str, Any]]) -> None:
    while undo:
        name, value = undo.pop()
        if value is MISSING:
            namespace.pop(name, None)
        else:
            namespace[name] = value


def binding_order(values: dict[str, Any]) -> list[str]:
    """Names in the order in which they are sent: modules, values and functions first, since rebuilding an object may
    call them.
    """

    def turn(name: str) -> int:
        value = values[name]
        if type(value) in ATOMS:
            return 0
        return 1 if isinstance(value, type | FunctionType) else 2

    return sorted(values, key=turn)


def _close(file: int) -> None:
    import os

    os.close(file)


def changed(table: Table, nodes: dict[int, Node]) -> Iterable[tuple[Token, Node]]:
    """The known nodes that are not as their snapshot says."""
    for key, node in nodes.items():
        token = table.tokens.get(key)
        if token is not None:
            snapshot = table.snapshots.get(token)
            if snapshot is None or not same(snapshot, node.snapshot):
                yield token, node
