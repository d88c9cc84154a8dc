"""How many cores this process may use: by its affinity and its control group, not by what the host has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from nbdist import cgroups


@dataclass(frozen=True)
class Cores:
    """`usable` physical cores, at least 1; `why` says what they were counted by."""

    usable: int
    why: str


def cores(quota: float | None = None) -> Cores:
    """Physical cores (hyper-threads counted once) that this process may use.

    Args:
        quota: processors' worth of time; default: what the control group says.
    """
    host = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    usable = min(_physical(allowed), len(allowed))
    why = _cores(usable) if usable >= host else f"{usable} of {host} physical cores by affinity"
    quota = cgroups.processors() if quota is None else quota
    if quota is not None and quota < usable:
        usable = max(1, int(quota))
        why = f"{_cores(usable)}: the container may use {quota:g} processors' worth of time"
    return Cores(usable, why)


def _cores(count: int) -> str:
    return "1 physical core" if count == 1 else f"{count} physical cores"


def _physical(allowed: set[int]) -> int:
    """Cores below these logical processors."""
    found = set()
    for number in allowed:
        folder = f"/sys/devices/system/cpu/cpu{number}/topology"
        try:
            with open(f"{folder}/physical_package_id") as package, open(f"{folder}/core_id") as core:
                found.add((package.read(), core.read()))
        except OSError:  # not Linux, or hidden
            return max(1, min(len(allowed), psutil.cpu_count(logical=False) or len(allowed)))
    return max(1, len(found))


def threads_for(ranks: int, environment: Mapping[str, str]) -> tuple[int, str]:
    """Intra-op threads of each rank, and why: OMP_NUM_THREADS where it is set, else the cores shared out evenly."""
    wanted = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted), f"OMP_NUM_THREADS={wanted}"
    have = cores()
    return max(1, have.usable // ranks), f"{have.why}, shared by {ranks} rank{'s' if ranks > 1 else ''}"
