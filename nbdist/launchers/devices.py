"""What a pool runs on; and before ranks start on GPUs, which pools are in the way, and whether somebody holds them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil

from nbdist.config import gpus
from nbdist.config.detect import Choice, NotEnoughDevices

ROOM = 600 << 20  # bytes of a GPU that a rank needs to start: CUDA's context and NCCL's buffers, about


@dataclass(frozen=True)
class PoolOptions:
    """What makes two cells share their ranks: same options, same ranks."""

    ranks: int
    device: str = "cpu"  # or "cuda": one GPU a rank, or "mps"
    runner: str = "nbdist.worker.calls"
    devices: tuple[str, ...] = ()  # the id of each rank's GPU, as `variable` takes it; none: the first ones
    variable: str = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def of(cls, choice: Choice, runner: str = "nbdist.worker.calls") -> PoolOptions:
        return cls(choice.ranks, choice.device, runner, choice.devices, choice.variable)

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.device == "cpu":
            return f"{ranks} on the CPU"
        if self.device == "mps":
            return f"{ranks} on the Apple GPU"
        if self.devices:
            return f"{ranks} on GPU{'s' if self.ranks > 1 else ''} {', '.join(map(short_id, self.devices))}"
        return f"{ranks} on " + ("1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs")


def short_id(device: str) -> str:
    """GPU-8932f937-d72c-4106-... as GPU-8932f937; a number stays."""
    return "-".join(device.split("-")[:2])


class DevicesHeld(NotEnoughDevices):
    """Another process holds a GPU that was asked for; the message names it where it can be known."""


def in_the_way(wanted: PoolOptions, other: PoolOptions) -> bool:
    """Both want a GPU that is the same."""
    if wanted.device != other.device or wanted.device == "cpu":
        return False
    if not wanted.devices or not other.devices:  # the first ones
        return True
    if set(wanted.devices) & set(other.devices):
        return True
    if all(name.isdigit() for name in (*wanted.devices, *other.devices)):
        return False
    found = gpus.match((*wanted.devices, *other.devices), gpus.gpus(), os.environ)
    first, second = ({found[name].uuid for name in names if name in found} for names in (wanted.devices, other.devices))
    return bool(first & second)


def check_free(wanted: PoolOptions, ours: Collection[int] = ()) -> None:
    """Refuse GPUs that another process holds, before anything is started or ended.

    Args:
        ours: processes that will have ended by then.

    Raises:
        DevicesHeld: one is in exclusive-process mode and taken, or has no room for a rank.
    """
    if wanted.device != "cuda":
        return
    found = gpus.match(wanted.devices, gpus.gpus(), os.environ)
    holders = gpus.holders() if found else []
    for name, gpu in found.items():
        there = [holder for holder in holders if holder.uuid == gpu.uuid]
        others = [holder for holder in there if holder.pid not in ours]
        freed = sum(holder.used or 0 for holder in there if holder.pid in ours)
        free = gpu.memory - gpu.used + freed
        if gpu.mode == "Prohibited":
            raise DevicesHeld(f"GPU {short_id(name)} ({gpu.name}) takes no processes: its compute mode is Prohibited")
        if gpu.mode == "Exclusive_Process" and others:
            why = "it is in exclusive-process mode, so that one process has it alone"
        elif gpu.memory and free < ROOM:
            why = f"{_gib(free)} of {_gib(gpu.memory)} are free there, and a rank needs about {_gib(ROOM)} to start"
        else:
            continue
        raise DevicesHeld(
            f"GPU {short_id(name)} ({gpu.name}) is held by {_who(others)}: {why}. End what holds it, or take others "
            f"(`--gpus`), or --cpus {wanted.ranks}. Nothing was started or ended"
        )


def _who(holders: Sequence[gpus.Holder]) -> str:
    if not holders:
        return "a process that cannot be seen from here (another container's or user's)"
    return " and ".join(_process(holder) for holder in holders)


def _process(holder: gpus.Holder) -> str:
    used = f", {_gib(holder.used)}" if holder.used is not None else ""
    if holder.pid == os.getpid():
        return f"this notebook's own process{used} (`del` what is there, then torch.cuda.empty_cache())"
    try:
        process = psutil.Process(holder.pid)
        return f"process {holder.pid} ({process.name()} of {process.username()}{used})"
    except (psutil.Error, KeyError):
        return f"process {holder.pid}{f' ({used[2:]})' if used else ''}"


def who_is_there(wanted: PoolOptions) -> str:
    """After a start that failed: who computes on these GPUs, as the end of a sentence."""
    if wanted.device != "cuda":
        return ""
    found = gpus.match(wanted.devices, gpus.gpus(), os.environ)
    told = [
        f"{_process(holder)} on GPU {short_id(name)}"
        for holder in (gpus.holders() if found else ())
        for name, gpu in found.items()
        if holder.uuid == gpu.uuid and _lives(holder.pid)
    ]
    return f". On these GPUs: {'; '.join(told)}" if told else ""


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
