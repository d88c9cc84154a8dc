"""Mappings of our own: made, given back, and replaced in place under the tensors and arrays that look at them."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from typing import Any

PAGE = mmap.PAGESIZE
_FEW = 8192  # replaced parts in one process: each takes two of the mappings that it may have (65,530 on Linux)
_FIXED = 0x10  # MAP_FIXED, which the module does not name: the same on Linux and macOS
_FAILED = ctypes.c_void_p(-1).value


class Region:
    """A private mapping that is given back when nothing looks at it any more.

    Not `mmap.mmap`: that keeps a duplicate of the descriptor for each mapping, and a large model has more tensors
    than a process may have descriptors.

    Attributes:
        address, length: of the mapping; it begins at a page.
        pad: bytes before what is looked at.
        parts, replaced: how many parts of it other files have replaced, and their bytes.
        hashes: of the files' content in intervals (address, length), which holds as long as nothing is written there.
    """

    __slots__ = ("__weakref__", "_unmap", "address", "hashes", "length", "pad", "parts", "replaced")

    def __init__(self, file: int, position: int, pad: int, length: int) -> None:
        self._unmap, self.address, self.length, self.pad = libc().munmap, 0, pad + length, pad
        self.parts = self.replaced = 0
        self.hashes: dict[tuple[int, int], bytes] = {}
        self.address = _map(None, self.length, 0, file, position)
        _LIVE[self.address] = weakref.ref(self)
        _CHANGES[0] += 1

    def __del__(self) -> None:
        if self.address:
            _LIVE.pop(self.address, None)
            _CHANGES[0] += 1
            _PARTS[0] -= self.parts
            self._unmap(self.address, self.length)

    def buffer(self, lead: int) -> Any:
        """What is looked at and `lead` bytes before it, as an object with the buffer protocol that keeps the
        mapping.
        """
        start = self.pad - lead
        array = (ctypes.c_char * (self.length - start)).from_address(self.address + start)
        array.region = self  # type: ignore[attr-defined]
        return array


_LIVE: dict[int, weakref.ref[Region]] = {}
_CHANGES, _PARTS = [0], [0]
_ORDER: list[Any] = [-1, []]  # the starts of what is live, sorted after so many changes


def region_at(address: int, length: int) -> Region | None:
    """Our mapping that holds all of an interval."""
    if _ORDER[0] != _CHANGES[0]:
        _ORDER[:] = _CHANGES[0], sorted(_LIVE)
    starts = _ORDER[1]
    index = bisect.bisect_right(starts, address) - 1
    reference = _LIVE.get(starts[index]) if index >= 0 else None
    region = reference() if reference is not None else None
    return region if region is not None and address + length <= region.address + region.length else None


def replace(address: int, length: int, file: int, position: int) -> tuple[int, int]:
    """Map a part of a file over a part of a mapping of our own, privately: whatever looks there sees the file's bytes.

    Pages that this process had written are given back, and ranks on one machine share the new ones. Only whole pages
    can be replaced, and the file's must lie as the mapping's do. Nothing is done where that cannot be, where the
    process would get too many mappings, or where files that are mostly replaced would pile up.

    Returns:
        The interval that was replaced, (0, 0) for none.
    """
    region = region_at(address, length)
    if region is None or (address - position) % PAGE:
        return 0, 0
    start, end = address, address + length
    # Beyond what is looked at there is nothing to keep: the last pages go whole, or they would keep the old file.
    first = region.address if start <= region.address + region.pad else -(-start // PAGE) * PAGE
    last = -(-end // PAGE) * PAGE if end == region.address + region.length else end // PAGE * PAGE
    if last - first < PAGE:
        return 0, 0
    whole = first == region.address and end == region.address + region.length
    if not whole and (_PARTS[0] >= _FEW or region.replaced + last - first > region.length):
        return 0, 0
    stale = [(low, size) for low, size in region.hashes if low < last and first < low + size]
    for key in stale:
        del region.hashes[key]
    _map(first, last - first, _FIXED, file, position + first - address)
    if whole:
        _PARTS[0] -= region.parts
        region.parts = region.replaced = 0
    else:
        _PARTS[0] += 1
        region.parts += 1
        region.replaced += last - first
    return max(first, start), min(last, end)


def _map(address: int | None, length: int, flags: int, file: int, position: int) -> int:
    mapped = libc().mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | flags, file, position)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length} bytes: {os.strerror(code)}")
    return int(mapped)


_LIBRARY: list[Any] = []


def libc() -> Any:
    if not _LIBRARY:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
        ]  # fmt: skip
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        _LIBRARY.append(library)
    return _LIBRARY[0]


def raw(address: int, length: int) -> memoryview:
    """The bytes at an address. The caller holds what owns them."""
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def equal_bytes(one: int, other: int, length: int) -> bool:
    """Are the bytes at two addresses equal? A memoryview would compare them one by one."""
    return bool(libc().memcmp(one, other, length) == 0)
