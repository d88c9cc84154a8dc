"""Memory that travels: address intervals of tensors and arrays, packed into files that ranks map copy-on-write.

Every tensor and array names an interval of addresses. Intervals that overlap become one segment, so that views keep
sharing memory on the other side, across names and between torch and numpy, and `huge[:10]` takes 40 bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from nbdist import cgroups, system
from nbdist.shipping.errors import NotEnoughMemory

INLINE = 64 << 10  # below this a copy in the message is cheaper than a mapping
OWN_FILE = 16 << 20  # from this a segment has a file of its own: a file's memory is freed only as a whole
SHARED_FILE = 64 << 20  # smaller segments share files of about this size
_ALIGN = 64  # segments keep their start modulo this, so that dtypes stay aligned
_PAGE = mmap.PAGESIZE


@dataclass
class Parcel:
    """What is handed to the transport: bytes, and descriptors to be passed along (SCM_RIGHTS).

    The receiver owns the descriptors that it gets; the sender closes its own with `close`.
    """

    head: bytes
    files: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors; the memory lives on where it is mapped."""
        files, self.files = self.files, []
        for file in files:
            os.close(file)


@dataclass
class Layout:
    """Where the intervals of a message lie.

    Attributes:
        refs: for each interval (segment, offset, length); segment -1 for one without bytes.
        segments: for each segment (file or -1, position, length, pad, torch); `position` is an index into `inline`
            for file -1.
        inline: the bytes of small segments.
    """

    refs: list[tuple[int, int, int]]
    segments: list[tuple[int, int, int, int, bool]]
    inline: list[bytes]


def raw(address: int, length: int) -> memoryview:
    """The bytes at an address. The caller holds what owns them."""
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def equal_bytes(one: int, other: int, length: int) -> bool:
    """Are the bytes at two addresses equal? A memoryview would compare them one by one."""
    return bool(_libc().memcmp(one, other, length) == 0)


class Outgoing:
    """Collects the intervals of one message."""

    def __init__(self) -> None:
        self.intervals: list[tuple[int, int, bool]] = []
        self._keep: list[Any] = []

    def add(self, address: int, length: int, owner: Any, torch: bool = False) -> int:
        """Note an interval and return its number. `torch`: its memory must be torch's on the other side."""
        self.intervals.append((address, length, torch))
        self._keep.append(owner)
        return len(self.intervals) - 1

    def size(self, start: int = 0) -> int:
        """Bytes of the intervals from number `start` on, shared ones counted once."""
        return sum(high - low for low, high, _ in self._merged(start))

    def _merged(self, start: int = 0) -> list[list[Any]]:
        merged: list[list[Any]] = []
        for low, high, torch in sorted((a, a + n, t) for a, n, t in self.intervals[start:] if n):
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
                merged[-1][2] |= torch
            else:
                merged.append([low, high, torch])
        return merged

    def pack(self) -> tuple[Layout, list[int]]:
        """Copy the memory into files (and small pieces into the layout).

        Raises:
            NotEnoughMemory: before anything is copied.
        """
        merged = self._merged()
        inline: list[bytes] = []
        segments: list[tuple[int, int, int, int, bool]] = []
        writes: list[tuple[int, int, int, int]] = []  # file, position, address, length
        sizes: list[int] = []  # of the files
        shared = -1
        for low, high, torch in merged:
            length, pad = high - low, low % _ALIGN
            if length < INLINE:
                segments.append((-1, len(inline), length, pad, torch))
                inline.append(bytes(raw(low, length)))
                continue
            whole = -(-(length + pad) // _PAGE) * _PAGE
            if length >= OWN_FILE:
                file, position = len(sizes), 0
                sizes.append(whole)
            else:
                if shared < 0 or sizes[shared] + whole > SHARED_FILE:
                    shared = len(sizes)
                    sizes.append(0)
                file, position = shared, sizes[shared]
                sizes[shared] += whole
            segments.append((file, position, length, pad, torch))
            writes.append((file, position + pad, low, length))
        files = _write_files(sizes, writes)
        starts = [low for low, _, _ in merged]
        refs = []
        for address, length, _ in self.intervals:
            if length:
                segment = bisect.bisect_right(starts, address) - 1
                refs.append((segment, address - starts[segment], length))
            else:
                refs.append((-1, 0, 0))
        return Layout(refs, segments, inline), files


def _write_files(sizes: list[int], writes: list[tuple[int, int, int, int]]) -> list[int]:
    need = sum(sizes)
    if need:
        free = available_memory()
        if need > free:
            raise NotEnoughMemory(need, free)
    files: list[int] = []
    try:
        for size in sizes:
            files.append(system.memory_file("nbdist"))
            os.ftruncate(files[-1], size)
        for file, position, address, length in writes:
            view, done = raw(address, length), 0
            while done < length:
                done += os.pwrite(files[file], view[done : done + (1 << 30)], position + done)
    except OSError as error:
        for file in files:
            os.close(file)
        raise NotEnoughMemory(need, available_memory()) from error
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return files


def available_memory() -> int:
    """Bytes that can be had without swapping: what the kernel says is available, and the cgroup's limit where there
    is one.
    """
    free = _system_memory()
    for limit, used, cache in cgroups.memory():
        free = min(free, max(0, limit - max(0, used - cache)))
    return free


def _system_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        import psutil
    except ImportError:
        return sys.maxsize
    return int(psutil.virtual_memory().available)


class _Region:
    """A private mapping that is given back when nothing looks at it any more.

    Not `mmap.mmap`: that keeps a duplicate of the descriptor for each mapping, and a large model has more tensors
    than a process may have descriptors.
    """

    __slots__ = ("_unmap", "address", "length")

    def __init__(self, file: int, position: int, length: int) -> None:
        self._unmap, self.address, self.length = _libc().munmap, 0, length
        address = _libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, position)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {length} bytes: {os.strerror(code)}")
        self.address = address

    def __del__(self) -> None:
        if self.address:
            self._unmap(self.address, self.length)


_LIBRARY: list[Any] = []


def _libc() -> Any:
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


class Incoming:
    """The segments of a received message.

    Built where a value asks for them; the descriptors are closed with `close`.
    """

    def __init__(self, layout: Layout, files: list[int]) -> None:
        self._layout, self._files = layout, files
        self._memory: dict[int, Any] = {}  # segment -> a flat uint8 tensor or array
        self._uses: dict[int, int] = {}
        for segment, _, _ in layout.refs:
            self._uses[segment] = self._uses.get(segment, 0) + 1

    def close(self) -> None:
        """Close the descriptors. Mappings made until now stay."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _buffer(self, segment: int) -> tuple[Any, bool]:
        """(an object with the buffer protocol, whether it must be copied to be owned)."""
        file, position, length, pad, _ = self._layout.segments[segment]
        if file < 0:
            return self._layout.inline[position], True
        region = _Region(self._files[file], position, pad + length)
        array = (ctypes.c_char * (pad + length)).from_address(region.address)
        array.region = region  # type: ignore[attr-defined]  # the mapping lives as long as what looks at it
        return array, False

    def flat(self, segment: int) -> Any:
        """A segment as a one-dimensional uint8 tensor (when torch shares it) or array; without its pad."""
        memory = self._memory.get(segment)
        if memory is None:
            buffer, copy = self._buffer(segment)
            _, _, length, pad, torch_too = self._layout.segments[segment]
            if torch_too:
                import torch

                if copy:
                    memory = torch.empty(pad + length, dtype=torch.uint8)
                    ctypes.memmove(memory.data_ptr() + pad, buffer, length)
                    memory = memory[pad:]
                else:
                    memory = torch.frombuffer(buffer, dtype=torch.uint8)[pad:]
            else:
                import numpy

                if copy:
                    memory = numpy.empty(pad + length, numpy.uint8)
                    memory[pad:] = numpy.frombuffer(buffer, numpy.uint8)
                    memory = memory[pad:]
                else:
                    memory = numpy.frombuffer(buffer, numpy.uint8)[pad:]
            self._memory[segment] = memory
        return memory

    def torch(self, ref: int) -> tuple[Any, int]:
        """(the storage of an interval or None, the interval's byte offset in it)."""
        segment, offset, _ = self._layout.refs[ref]
        if segment < 0:
            return None, 0
        flat = self.flat(segment)
        return flat.untyped_storage(), flat.storage_offset() + offset

    def numpy(self, ref: int) -> tuple[Any, int]:
        """(a flat uint8 array or None, the interval's byte offset in it)."""
        segment, offset, _ = self._layout.refs[ref]
        if segment < 0:
            return None, 0
        flat = self.flat(segment)
        return (flat.numpy() if self._layout.segments[segment][4] else flat), offset

    def alone(self, ref: int) -> bool:
        """Does nothing else look at the segment of this interval, and is it small?"""
        segment = self._layout.refs[ref][0]
        return segment < 0 or (self._uses[segment] == 1 and self._layout.segments[segment][0] < 0)
