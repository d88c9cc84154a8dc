"""What is here, each answer with its reason. Nothing is initialised by asking."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil


class NotEnoughDevices(ValueError):
    """More devices were asked for than there are; the message says how many there are and what to do."""


_rank: int | None = None


def note_rank(rank: int) -> None:
    """Said by the worker: this process is a rank of a pool, and so is whatever it forks."""
    global _rank
    _rank = rank


def inside_a_rank() -> int | None:
    """The rank of a pool that this process is, else None. A process under torchrun is none of ours."""
    return _rank


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def choose_ranks(
    *, ranks: int | None = None, cpus: int | None = None, gpus: int | None = None, count_gpus: Callable[[], int]
) -> tuple[int, str, str]:
    """How many ranks, on what ("cpu" or "cuda"), and why.

    Args:
        ranks: `-n`: that many, on GPUs when there are enough of them, else on the CPU.
        cpus: `--cpus`: that many on the CPU, whatever else there is.
        gpus: `--gpus`: that many, one GPU each.
        count_gpus: asked only when it matters.

    Raises:
        NotEnoughDevices: fewer GPUs than asked for.
        ValueError: a count below 1, or two of the three.
    """
    given = {name: count for name, count in (("-n", ranks), ("--cpus", cpus), ("--gpus", gpus)) if count is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
    for name, count in given.items():
        if count < 1:
            raise ValueError(f"{name} {count}: takes a number of ranks, 1 or more")
    if cpus is not None:
        return cpus, "cpu", "--cpus"
    there = count_gpus()
    if gpus is not None:
        if gpus > there:
            have = "no GPU" if there == 0 else "1 GPU" if there == 1 else f"{there} GPUs"
            better = f"--gpus {there}, or " if there else ""
            raise NotEnoughDevices(
                f"--gpus {gpus}: this machine has {have}. Use {better}--cpus {gpus} to run {gpus} ranks on the CPU"
            )
        return gpus, "cuda", "--gpus"
    if ranks is not None:
        if there >= ranks:
            return ranks, "cuda", f"-n {ranks}, and there are {there} GPUs"
        return (
            ranks,
            "cpu",
            f"-n {ranks}" + (f", and there are only {there} GPUs" if there else ", and there is no GPU"),
        )
    if there:
        return there, "cuda", f"all {there} GPUs"
    cores = physical_cores()
    return max(2, cores), "cpu", f"no GPU; {cores} physical cores, and at least 2 ranks"
