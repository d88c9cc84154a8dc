"""Rebuilding a message, frame by frame: one that cannot be rebuilt spoils itself and what refers into it."""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nbdist.shipping.kinds import MISSING
from nbdist.shipping.memory import Incoming
from nbdist.shipping.message import BIND
from nbdist.shipping.table import Table, Token


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


# CPython's unpickler in Python; without it a frame that fails takes all the names of its message with it.
_PythonUnpickler: Any = getattr(pickle, "_Unpickler", None)


class _CarefulUnpacker(_PythonUnpickler or object):  # type: ignore[misc]
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
            if _PythonUnpickler is None:
                values, failed, memo = [], [(sort, key, error) for sort, key, _, _ in envelope["spans"]], {}
            else:
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


def _close(file: int) -> None:
    import os

    os.close(file)
