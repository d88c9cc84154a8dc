"""Which pages of a private mapping this process has written: the others need not be hashed again.

Linux says so in /proc/self/pagemap. It is tried once on a small mapping; where it does not answer as expected (another
system, a sandbox), everything counts as written.
"""

from __future__ import annotations

import os
from typing import Any

from nbdist import system
from nbdist.shipping.lazy import numpy_if_loaded
from nbdist.shipping.regions import PAGE, Region, raw

_ENTRY = 8  # bytes a page
_OF_FILE, _IN_USE = 61, 62  # bits: the page is a file's; it is in memory (63) or swapped out (62)
_works: list[bool] = []


def written(address: int, length: int, chunk: int) -> list[bool] | None:
    """For each chunk of an interval whether a page that it touches was written; None where nobody can tell."""
    if not _works:
        _works.append(_try())
    return _ask(address, length, chunk) if _works[0] else None


def _ask(address: int, length: int, chunk: int) -> list[bool] | None:
    numpy: Any = numpy_if_loaded()
    if numpy is None:
        return None
    first, last = address // PAGE, -(-(address + length) // PAGE)
    try:
        file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(file, (last - first) * _ENTRY, first * _ENTRY)
        finally:
            os.close(file)
    except OSError:
        return None
    if len(data) != (last - first) * _ENTRY:
        return None
    entries = numpy.frombuffer(data, numpy.uint64)
    own = (entries >> numpy.uint64(_IN_USE) != 0) & (entries >> numpy.uint64(_OF_FILE) & numpy.uint64(1) == 0)
    before = numpy.concatenate(([0], numpy.cumsum(own)))  # own pages before each
    starts = numpy.arange(address, address + length, chunk)
    ends = numpy.minimum(starts + chunk, address + length)
    found: list[bool] = (before[-(-ends // PAGE) - first] != before[starts // PAGE - first]).tolist()
    return found


def _try() -> bool:
    """Does a written page show, and one that is only read not?"""
    file = system.memory_file("nbdist-pages")
    try:
        os.pwrite(file, b"x" * 4 * PAGE, 0)
        region = Region(file, 0, 0, 4 * PAGE)
    finally:
        os.close(file)
    memory = raw(region.address, region.length)
    memory[PAGE] = memory[0]
    memory[3 * PAGE] = memory[2 * PAGE]
    return _ask(region.address, region.length, PAGE) == [False, True, False, True]
