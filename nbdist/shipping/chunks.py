"""Large memory, compared and sent in chunks: one changed element of a gibibyte costs a mebibyte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from nbdist.shipping.memory import Source
from nbdist.shipping.pages import written
from nbdist.shipping.regions import PAGE, raw, region_at

CHUNK = 1 << 20
_ONE = struct.Struct("<Q")


class Hashes:
    """The content hash of each chunk."""

    __slots__ = ("each",)

    def __init__(self, each: bytes) -> None:
        self.each = each

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashes) and self.each == other.each

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Hashes, (self.each,)

    def __len__(self) -> int:
        return len(self.each) // _ONE.size

    def __getitem__(self, index: int) -> bytes:
        return self.each[index * _ONE.size : (index + 1) * _ONE.size]


def digest_of(address: int, length: int) -> int | Hashes:
    """The content hash of memory, of each chunk where there are several; 1 GiB takes 35 ms.

    Of a mapping of our own only what was written is hashed again.
    """
    if length <= CHUNK:
        return xxhash.xxh3_64_intdigest(raw(address, length)) if length else 0
    return Hashes(b"".join(_hashes(address, length, range(-(-length // CHUNK)))))


def _hashes(address: int, length: int, indices: Iterable[int]) -> Iterator[bytes]:
    region = region_at(address, length)
    own = written(address, length, CHUNK) if region is not None else None
    for index in indices:
        start, size = address + index * CHUNK, min(CHUNK, length - index * CHUNK)
        known = region.hashes.get((start, size)) if region is not None and own is not None and not own[index] else None
        if known is None:
            known = _ONE.pack(xxhash.xxh3_64_intdigest(raw(start, size)))
            if region is not None and own is not None and not own[index]:
                region.hashes[start, size] = known
        yield known


def remember(address: int, length: int, digest: Any) -> None:
    """Memory is as a message has said: its files' content need not be hashed here."""
    region = region_at(address, length) if isinstance(digest, Hashes) else None
    if region is not None and len(digest) == -(-length // CHUNK):
        for index in range(len(digest)):
            size = min(CHUNK, length - index * CHUNK)
            region.hashes[address + index * CHUNK, size] = digest[index]


def runs_of(address: int, length: int, old: Any, new: Any) -> list[tuple[int, int]]:
    """(offset, length) of what has changed between two digests, in whole pages: those can be mapped on the other
    side.
    """
    if not isinstance(old, Hashes) or not isinstance(new, Hashes) or len(old) != len(new):
        return [(0, length)]
    runs: list[tuple[int, int]] = []
    for index in range(len(new)):
        if old[index] == new[index]:
            continue
        start = max(0, (address + index * CHUNK) // PAGE * PAGE - address)
        end = min(length, -(-(address + (index + 1) * CHUNK) // PAGE) * PAGE - address)
        if runs and start <= runs[-1][0] + runs[-1][1]:
            start = runs.pop()[0]
        runs.append((start, end - start))
    return runs


class Pieces:
    """Stands in a change for what has changed of a dense tensor's or array's memory."""

    __slots__ = ("address", "form", "runs", "value")

    def __init__(self, value: Any, form: Any, address: int, runs: list[tuple[int, int]]) -> None:
        self.value, self.form, self.address, self.runs = value, form, address, runs

    @property
    def size(self) -> int:
        return sum(length for _, length in self.runs)


@dataclass
class Patch:
    """Pieces, on the other side.

    Attributes:
        form: (dtype, shape, stride, length in bytes) of the sender's.
        parts: (offset, bytes), in order.
    """

    form: Any
    parts: list[tuple[int, Source]]

    @property
    def whole(self) -> bool:
        return len(self.parts) == 1 and self.parts[0][1].length == self.form[3]

    def write(self, address: int) -> None:
        """Write it over memory that lies as the sender's."""
        for offset, source in self.parts:
            source.write(address + offset)

    def completes(self, address: int, wanted: Any) -> bool:
        """Is the memory as the sender's, once the patch is written? `wanted`: the digest of the sender's."""
        length = self.form[3]
        if self.whole:
            return True
        if not isinstance(wanted, Hashes) or len(wanted) != -(-length // CHUNK):
            return False
        covered: set[int] = set()
        for offset, part in self.parts:
            end = offset + part.length
            covered.update(range(-(-offset // CHUNK), len(wanted) if end == length else end // CHUNK))
        others = [index for index in range(len(wanted)) if index not in covered]
        return all(known == wanted[i] for i, known in zip(others, _hashes(address, length, others), strict=True))


def make_patch(memory: Any, form: Any, parts: list[tuple[int, int]]) -> Patch:
    return Patch(form, [(offset, memory.source(ref)) for offset, ref in parts])
