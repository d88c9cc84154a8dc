"""What the control groups of this process allow, which in a container is less than the machine has; versions 2 and 1.

None of it on systems without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# A version 1 group without a limit says a number near 2**63.
_NO_LIMIT = 1 << 60


def _groups(controller: str, root: str) -> Iterator[tuple[bool, str]]:
    """(version 2?, folder) of the groups that this process is in for a controller, innermost first."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as lines:
            groups = [line.strip().split(":", 2) for line in lines]
    except OSError:
        return
    for number, controllers, path in groups:
        if number == "0":
            base = root
        elif controller in controllers.split(","):
            base = f"{root}/{controller}"
        else:
            continue
        # In a container the group's own folder is mounted as the root, and its path leads nowhere. The groups around
        # it have limits too.
        place = base + path.rstrip("/")
        while len(place) >= len(base):
            if os.path.isdir(place):
                yield number == "0", place
            place = place.rpartition("/")[0]


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="ascii") as file:
        return file.read().strip()


def memory(root: str = "/sys/fs/cgroup") -> list[tuple[int, int, int]]:
    """(limit, used, file cache that can be dropped), in bytes, for each group that has a limit."""
    found: list[tuple[int, int, int]] = []
    for second, folder in _groups("memory", root):
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        key = "inactive_file" if second else "total_inactive_file"
        try:
            limit, used = _read(folder, names[0]), int(_read(folder, names[1]))
            stat = dict(line.split()[:2] for line in _read(folder, "memory.stat").splitlines())
            if limit != "max" and int(limit) < _NO_LIMIT:
                found.append((int(limit), used, int(stat.get(key, 0))))
        except (OSError, ValueError):
            continue
    return found


def processors(root: str = "/sys/fs/cgroup") -> float | None:
    """How many processors' worth of time may be used (docker's --cpus); None: no limit."""
    limits = []
    for second, folder in _groups("cpu", root):
        try:
            if second:
                quota, period = _read(folder, "cpu.max").split()
            else:
                quota, period = _read(folder, "cpu.cfs_quota_us"), _read(folder, "cpu.cfs_period_us")
            if quota not in ("max", "-1"):
                limits.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(limits, default=None)
