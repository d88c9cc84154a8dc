"""Which GPUs there are, and who holds them. Nothing here starts CUDA: counting is NVML's (through torch, in the
supervisor) and nvidia-smi's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CHOOSES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and those of WSL 2, on Linux
COUNT_LIMIT = 60.0  # seconds for a child of its own to import torch and count
ASK_LIMIT = 5.0  # seconds for nvidia-smi: without persistence mode it wakes every GPU


@dataclass(frozen=True)
class Devices:
    """GPUs that ranks could use.

    Attributes:
        kind: "cuda" (AMD's too, as torch calls them), "mps", or "" for none.
        ids: what the variable calls each, in torch's order: numbers, or GPU-... and MIG-... names.
        why: why these, as the end of "... : why".
        variable: the one by which a process is given some of them.
    """

    kind: str = ""
    ids: tuple[str, ...] = ()
    why: str = "this machine has no GPU"
    variable: str = "CUDA_VISIBLE_DEVICES"

    @property
    def count(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi sees it; bytes."""

    index: str
    uuid: str
    name: str
    memory: int
    used: int
    mode: str
    capability: str


@dataclass(frozen=True)
class Holder:
    """A process on a GPU; `used` bytes there, None where it is not told."""

    uuid: str
    pid: int
    used: int | None


# ---------------------------------------------------------------- what torch would see


def named(environment: Mapping[str, str], hip: bool = False) -> tuple[list[str] | None, str, str]:
    """What the environment leaves visible, read as CUDA reads it: (ids, or None for all; variable; why).

    CUDA takes a list up to the first entry that is no device, and nothing when one is there twice.
    """
    variable = "HIP_VISIBLE_DEVICES" if hip and "HIP_VISIBLE_DEVICES" in environment else "CUDA_VISIBLE_DEVICES"
    text = environment.get(variable)
    if text is None:
        return None, "HIP_VISIBLE_DEVICES" if hip else variable, ""
    if not text.strip():
        return [], variable, f"{variable} is empty, which hides every GPU"
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            after = f": only what stands before {entry!r} counts" if found else f": {entry!r} is no device"
            return found, variable, f"{variable}={text}{after}"
        if entry in found:
            return [], variable, f"{variable}={text} has {entry} twice, which hides every GPU"
        found.append(entry)
    return found, variable, f"{variable}={text}"


def look(environment: Mapping[str, str]) -> Devices:
    """What ranks with this environment would see. Imports torch: for the supervisor, not for the notebook."""
    import torch

    hip = getattr(torch.version, "hip", None)
    if torch.version.cuda is None and not hip:
        if torch.backends.mps.is_available():
            return Devices("mps", ("0",), "MPS, the Apple GPU, serves one rank: torch has no collectives on it")
        there = any(map(os.path.exists, DEVICE_FILES))
        return Devices(why=f"torch {torch.__version__} was built without CUDA" if there else Devices.why)
    return combine(environment, _count(torch, environment), bool(hip))


def combine(environment: Mapping[str, str], count: int, hip: bool = False) -> Devices:
    """Devices, from what the environment names and what torch counts in it."""
    ids, variable, why = named(environment, hip)
    if ids is None:
        has = f"this machine has {how_many(count)}"
        return Devices("cuda" if count else "", tuple(map(str, range(count))), has, variable)
    if len(ids) > count:
        why += f": there is no device {ids[count]}" if ids[count].isdigit() else f": {ids[count]} is not here"
    return Devices("cuda" if count and ids else "", tuple(ids[:count]), why, variable)


def how_many(count: int) -> str:
    return "no GPU" if count == 0 else "1 GPU" if count == 1 else f"{count} GPUs"


def _count(torch: Any, environment: Mapping[str, str]) -> int:
    """As torch counts without starting CUDA; where NVML cannot be asked, a child of its own counts with CUDA."""
    by = getattr(torch.cuda, "_device_count_nvml", None)
    if getattr(torch.version, "hip", None):
        by = getattr(torch.cuda, "_device_count_amdsmi", None)
    with _as_in(environment):
        count = by() if by is not None else -1
    if count >= 0:
        return int(count)
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env={**os.environ, **_chosen(environment)},
        capture_output=True,
        text=True,
        timeout=COUNT_LIMIT,
    )
    last = done.stdout.strip().rpartition("\n")[2]
    return int(last) if last.isdigit() else 0


def _chosen(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in CHOOSES if name in environment}


@contextmanager
def _as_in(environment: Mapping[str, str]) -> Iterator[None]:
    """The variables that choose devices, as they are there; this process's own afterwards."""
    before = _chosen(os.environ)
    try:
        for name in CHOOSES:
            os.environ.pop(name, None)
        os.environ.update(_chosen(environment))
        yield
    finally:
        for name in CHOOSES:
            os.environ.pop(name, None)
        os.environ.update(before)


# ---------------------------------------------------------------- what nvidia-smi knows


def _nvidia_smi(query: str, fields: Sequence[str], limit: float) -> list[list[str]]:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=limit,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]


def _bytes(mebibytes: str) -> int | None:
    try:
        return int(float(mebibytes) * 2**20)
    except ValueError:  # [N/A], [Not Supported]
        return None


def gpus(limit: float = ASK_LIMIT) -> list[Gpu]:
    """Every NVIDIA GPU of this machine, whatever is visible; empty where nvidia-smi is not, or does not answer."""
    fields = ("index", "uuid", "name", "memory.total", "memory.used", "compute_mode", "compute_cap")
    return [
        Gpu(index, uuid, name, _bytes(memory) or 0, _bytes(used) or 0, mode, capability)
        for index, uuid, name, memory, used, mode, capability in _nvidia_smi("gpu", fields, limit)
    ]


def holders(limit: float = ASK_LIMIT) -> list[Holder]:
    """The processes that compute on GPUs, as far as this process may know them (not those of other containers)."""
    rows = _nvidia_smi("compute-apps", ("gpu_uuid", "pid", "used_memory"), limit)
    return [Holder(uuid, int(pid), _bytes(used)) for uuid, pid, used in rows if pid.isdigit()]


def match(ids: Sequence[str], found: Sequence[Gpu], environment: Mapping[str, str]) -> dict[str, Gpu]:
    """Which of nvidia-smi's GPUs an id means, where that is certain.

    Numbers are certain when CUDA counts as nvidia-smi does (CUDA_DEVICE_ORDER=PCI_BUS_ID), or when all GPUs are of
    one model: CUDA's own order puts faster models first.
    """
    sure = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in found}) == 1
    matched = {}
    for name in ids:
        for gpu in found:
            if (name.isdigit() and sure and gpu.index == name) or (
                name.startswith("GPU-") and gpu.uuid.startswith(name)
            ):
                matched[name] = gpu
    return matched
