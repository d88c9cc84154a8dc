"""Facts about this machine and this process that need no torch: what a report begins with."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

import psutil

from nbdist import cgroups
from nbdist.config.cores import cores

Facts = list[tuple[str, str]]

LIBRARIES = (
    "nbdist", "torch", "ipython", "ipykernel", "jupyterlab", "notebook", "numpy", "cloudpickle", "psutil", "accelerate",
    "transformers", "deepspeed", "ray", "torch-xla",
)  # fmt: skip

# Variables that change what ranks do.
_MATTER = re.compile(
    r"(CUDA|HIP|ROCR|NCCL|RCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|GOMP|OPENBLAS|ACCELERATE|NBDIST|PJRT|XLA|UCX|FI)_"
    r"|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV|CONDA_PREFIX|LD_PRELOAD|LD_LIBRARY_PATH)$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)(API_?)?KEY($|_)|(^|_)AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def versions() -> Facts:
    """Of this Python and of the libraries that are installed; none is imported for it."""
    found = [("python", f"{platform.python_version()} ({sys.executable})")]
    for name in LIBRARIES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            if name in ("nbdist", "torch", "ipython", "ipykernel"):
                found.append((name, "not installed"))
    return found


def machine() -> Facts:
    memory, here = psutil.virtual_memory(), cores()
    facts = [
        ("system", f"{platform.platform()}, {platform.machine()}"),
        ("processor", _processor()),
        ("cores", f"{here.usable} usable ({here.why}); the machine has {os.cpu_count()} logical ones"),
        ("memory", f"{gib(memory.total)}, {gib(memory.available)} available"),
    ]
    container = cgroups.memory()
    if container:
        limit, used, _ = min(container)
        facts.append(("container", f"its memory limit is {gib(limit)}, {gib(used)} in use"))
    return facts


def limits() -> Facts:
    facts: Facts = []
    try:
        import resource

        for name, number, words in (
            ("open files", resource.RLIMIT_NOFILE, str),
            ("locked memory", resource.RLIMIT_MEMLOCK, gib),
            ("processes", resource.RLIMIT_NPROC, str),
        ):
            soft, hard = resource.getrlimit(number)
            told = ["no limit" if one == resource.RLIM_INFINITY else words(one) for one in (soft, hard)]
            facts.append((name, told[0] if soft == hard else f"{told[0]} (may be raised to {told[1]})"))
    except (ImportError, AttributeError):  # Windows; a system without one of these limits
        pass
    try:
        shared = os.statvfs("/dev/shm")
        whole, free = (gib(blocks * shared.f_frsize) for blocks in (shared.f_blocks, shared.f_bavail))
        facts.append(("/dev/shm", f"{whole}, {free} free (DataLoader workers use it; nbdist does not)"))
    except (OSError, AttributeError):
        pass
    return facts


def environment(variables: Mapping[str, str]) -> Facts:
    """The variables that matter, without secrets."""
    return [(name, _safe(name, variables[name])) for name in sorted(variables) if _MATTER.match(name)]


def _safe(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set, not shown)"
    return _LOGIN.sub("...@", without_home(value))


def without_home(text: str) -> str:
    """A report that is pasted somewhere need not have the user's name in its paths."""
    home = os.path.expanduser("~")
    return text.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else text


def gib(size: int) -> str:
    """Bytes in words."""
    return (
        f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size} bytes"
    )


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")
    except OSError:
        return ""


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_precisions() -> str:
    """What bf16 and fp16 are worth on this processor."""
    flags = set(_cpuinfo("flags").split())
    if not flags:
        return "on the CPU bf16 and fp16 compute; whether in hardware is not known here"
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    fp16 = [name for name in ("amx_fp16", "avx512_fp16") if name in flags]
    return "; ".join(
        f"{kind} on the CPU: {'in hardware (' + ', '.join(by) + ')' if by else 'computes, without hardware for it'}"
        for kind, by in (("bf16", bf16), ("fp16", fp16))
    )
