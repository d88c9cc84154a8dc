"""Memory that travels: address intervals of tensors and arrays, packed into files that ranks map copy-on-write.

Every tensor and array names an interval of addresses. Intervals that overlap become one segment, so that views keep
sharing memory on the other side, across names and between torch and numpy, and `huge[:10]` takes 40 bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from nbdist import cgroups, system
from nbdist.shipping.errors import NotEnoughMemory
from nbdist.shipping.regions import PAGE, Region, raw, replace

INLINE = 64 << 10  # below this a copy in the message is cheaper than a mapping
OWN_FILE = 16 << 20  # from this a segment has a file of its own: a file's memory is freed only as a whole
SHARED_FILE = 64 << 20  # smaller segments share files of about this size
_ALIGN = 64  # small segments keep their start modulo this, so that dtypes stay aligned


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
            NotEnoughMemory: before anything is sent, and as a rule before anything is copied.
            OSError: this process may not open more files.
        """
        merged = self._merged()
        inline: list[bytes] = []
        segments: list[tuple[int, int, int, int, bool]] = []
        writes: list[tuple[int, int, int, int]] = []  # file, position, address, length
        sizes: list[int] = []  # of the files
        shared = -1
        for low, high, torch in merged:
            length = high - low
            if length < INLINE:
                segments.append((-1, len(inline), length, low % _ALIGN, torch))
                inline.append(bytes(raw(low, length)))
                continue
            pad = low % PAGE  # pages lie as here, so that they can be replaced as such
            whole = -(-(length + pad) // PAGE) * PAGE
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


_WRITE = 64 << 20  # bytes in one call: between two of them Stop is heard


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
                done += os.pwrite(files[file], view[done : done + _WRITE], position + done)
    except OSError as error:
        for file in files:
            os.close(file)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            what = "there is no room for more open files: close some, or raise the limit (ulimit -n)"
            raise OSError(error.errno, what) from error
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

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError):  # no descriptor left, for one: what cannot be known is no limit
        return sys.maxsize


class OpenFile:
    """A descriptor that is closed when nothing refers to it any more."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Source:
    """Bytes of a message that are written over memory later: a part of a file, or bytes.

    Attributes:
        length: how many.
    """

    __slots__ = ("_file", "_position", "length")

    def __init__(self, file: OpenFile | memoryview, position: int, length: int) -> None:
        self._file, self._position, self.length = file, position, length

    def write(self, address: int) -> None:
        """Write them there: mapped where whole pages of a mapping of ours are replaced, else copied."""
        if isinstance(self._file, memoryview):
            raw(address, self.length)[:] = self._file
            return
        first, last = replace(address, self.length, self._file.number, self._position)
        if first == last:
            first = last = address
        self._copy(address, first - address, 0)
        self._copy(last, address + self.length - last, last - address)

    def _copy(self, address: int, length: int, skip: int) -> None:
        assert isinstance(self._file, OpenFile)
        view, done = raw(address, length), 0
        while done < length:
            part = view[done : done + (1 << 30)]
            got = os.preadv(self._file.number, [part], self._position + skip + done)
            if not got:
                raise OSError("the shared file ends too early")
            done += got


class Incoming:
    """The segments of a received message.

    Built where a value asks for them; the descriptors are closed with `close`.
    """

    def __init__(self, layout: Layout, files: list[int]) -> None:
        self._layout, self._files = layout, files
        self._memory: dict[int, Any] = {}  # segment -> a flat uint8 tensor or array
        self._uses: dict[int, int] = {}
        self._open: dict[int, OpenFile] = {}
        for segment, _, _ in layout.refs:
            self._uses[segment] = self._uses.get(segment, 0) + 1

    def close(self) -> None:
        """Close the descriptors. Mappings made until now stay."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def source(self, ref: int) -> Source:
        """The bytes of an interval, to be written over memory after the message was decoded."""
        segment, offset, length = self._layout.refs[ref]
        file, position, _, pad, _ = self._layout.segments[segment]
        if file < 0:
            return Source(memoryview(self._layout.inline[position])[offset : offset + length], 0, length)
        if file not in self._open:
            self._open[file] = OpenFile(os.dup(self._files[file]))
        return Source(self._open[file], position + pad + offset, length)

    def flat(self, segment: int) -> Any:
        """A segment as a one-dimensional uint8 tensor (when torch shares it) or array; without its pad."""
        memory = self._memory.get(segment)
        if memory is None:
            file, position, length, pad, torch_too = self._layout.segments[segment]
            if file < 0:
                memory = _owned(self._layout.inline[position], length, pad, torch_too)
            else:
                lead = pad % _ALIGN
                memory = _viewed(Region(self._files[file], position, pad, length).buffer(lead), torch_too)[lead:]
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


def _viewed(buffer: Any, torch_too: bool) -> Any:
    if torch_too:
        import torch

        return torch.frombuffer(buffer, dtype=torch.uint8)
    import numpy

    return numpy.frombuffer(buffer, numpy.uint8)


def _owned(data: bytes, length: int, pad: int, torch_too: bool) -> Any:
    if torch_too:
        import torch

        memory = torch.empty(pad + length, dtype=torch.uint8)
        ctypes.memmove(memory.data_ptr() + pad, data, length)
        return memory[pad:]
    import numpy

    array = numpy.empty(pad + length, numpy.uint8)
    array[pad:] = numpy.frombuffer(data, numpy.uint8)
    return array[pad:]
