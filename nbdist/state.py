"""Who am I: rank, world size, device, the barrier, the seed, and the step boundary at which ranks can agree to stop.

There is one set of facts per process and nobody changes them behind your back: `current()` reads them,
`nbdist.processes.PartialState` shows them.
In a pool the process group is there already; under torchrun the first look starts it; otherwise this is the only
process.
"""

from __future__ import annotations

import atexit
import operator
import os
import random
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from nbdist import checks, messages

if TYPE_CHECKING:
    from nbdist.kwargs import InitProcessGroupKwargs


class StepBoundary:
    """Where all ranks of a training loop are in the same state: behind all that belongs to an optimizer step.

    A prepared optimizer makes steps. Their boundary is passed where the next step begins, when the scheduler has
    stepped too and the gradients are zeroed: a prepared loader is asked for its next batch, or the next backward
    begins. These call `passed` then; when nobody wants to stop that is a test, and an addition each step. To stop, the
    worker's control thread calls `freeze` on every rank, takes the largest answer, and `release`s every rank to it: all
    of them run on to that very step and raise KeyboardInterrupt there, so that replicas stay equal.

    Attributes, all of this cell:
        cell: stands for it.
        steps: boundaries passed.
        made: steps that optimizers have made to their end.
        counted: those before the last boundary; where it is another number than `made`, a boundary is to be passed.
        stepping: an optimizer was cut off in the middle of one, since the last boundary.
        midway: a backward was called since the last boundary.
        begun: a backward was called.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def passed(self) -> None:
        """Count a step; when a stop is being agreed on, wait for its target and raise KeyboardInterrupt there."""
        if threading.get_ident() != self._thread:
            return  # one that reads ahead: it does not know where the loop is
        self.counted, self.midway, self.stepping = self.made, False, False
        self.steps += 1
        if self._frozen:
            self._meet()

    def _meet(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None or self._cancelled)
            if self._cancelled:
                return
            reached = self._target is not None and self.steps >= self._target
        if reached:
            raise KeyboardInterrupt

    def reset(self) -> None:
        """A new cell starts."""
        with self._changed:
            self.cell = object()
            self.steps = self.made = 0
            self.counted = 0
            self.begun = self.midway = self.stepping = False
            self._frozen: bool = False
            self._cancelled: bool = False
            self._target: int | None = None
            self._thread: int | None = threading.main_thread().ident

    def freeze(self) -> int | None:
        """Hold this rank at its next boundary. Returns the step it will be held at, None when it does not train in
        this cell.
        """
        with self._changed:
            if not (self.steps or self.begun):
                return None
            self._frozen = True
            return self.steps + 1

    @property
    def coming(self) -> bool:
        """Whether this rank is in the middle of a step. Without one it may have been the last."""
        return self.midway or self.made != self.counted

    def release(self, target: int | None) -> None:
        """Run on to step `target` and stop there; None gives the stop up (the rest of the ladder takes over)."""
        with self._changed:
            self._target, self._cancelled = target, target is None
            self._changed.notify_all()


step_boundary = StepBoundary()

# Called after a cell was interrupted, before anything else runs: strategies repair their wrappers here. Call them on
# every rank of the group when any rank was interrupted: what they rebuild must be rebuilt on all.
# Held weakly, so that a dropped model does not stay: keep the callable itself alive (a bound method dies at once).
interrupt_hooks: WeakSet[Callable[[], None]] = WeakSet()
# Called when a cell is over, however it ended, before what it made is looked at; held weakly too.
cell_hooks: WeakSet[Callable[[], None]] = WeakSet()

# Called when a strategy has put other parameters in the place of a module's own: with the module, and (old, new) pairs.
# A rank's side of the notebook has them stand for the notebook's from then on, and lets go of the old ones.
replaced_hooks: list[Callable[[Any, list[tuple[Any, Any]]], None]] = []

# Called on all ranks alike, before a cell runs, when the notebook has changed objects that the ranks have: it writes
# into them directly, so that a layer in the place of another one, or a new group of an optimizer, goes unseen.
edit_hooks: list[Callable[[], None]] = []

# What goes on behind user code and is better finished before this process ends: each has `finish(limit)`, which waits,
# at most so many seconds, and returns whether it is over. It takes itself out then.
unfinished: set[Any] = set()


class DistributedType(StrEnum):
    """The kind of distribution, with Accelerate's names."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"


@dataclass(frozen=True)
class Process:
    """The facts about this process. `device` is a torch.device; each automatic choice has its reason beside it."""

    rank: int
    local_rank: int
    world_size: int
    device: Any
    device_reason: str
    backend: str | None  # None: there is no process group
    backend_reason: str

    @property
    def distributed_type(self) -> DistributedType:
        if self.world_size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU


_told: tuple[str, str] | None = None  # the device the worker has set, and why
# The process group that the facts were read from, weakly: a library may end it,
# and the facts.
_known: tuple[Callable[[], Any], Process] | None = None
_seed = 0
_seed_rank: int | None = None  # of those that draw apart; None: this process's
_debug: bool | None = None  # None: as the environment says


def debugging() -> bool:
    """Whether debug mode is on: `ACCELERATE_DEBUG_MODE`, unless it was set here."""
    if _debug is None:
        return os.environ.get("ACCELERATE_DEBUG_MODE", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return _debug


def set_debugging(on: bool) -> None:
    """Turn debug mode on or off in this process."""
    global _debug
    _debug = on


def use_device(device: str, reason: str) -> None:
    """Fix the device of this process before anything asks: a CPU pool stays on the CPU even where there is a GPU."""
    global _told, _known
    _told, _known = (device, reason), None


def current(cpu: bool = False, group_options: InitProcessGroupKwargs | None = None) -> Process:
    """The facts about this process; under torchrun the first call starts the process group.

    Args:
        cpu: stay on the CPU, whatever devices there are. Default: the device order is cuda, mps (one process only),
            cpu.
        group_options: how the group is started. Where it is there already they change nothing, which is noted once.

    Raises:
        RuntimeError: there are more ranks on this machine than GPUs.
    """
    global _known
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # A dead reference is not the same as no group: it was there when the facts were read, and has ended since.
    if _known is None or _known[0]() is not (group if group is not None else _NO_GROUP):
        if group is not None:
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            device, why = _choose_device(local, dist.get_world_size(), cpu)
            facts = Process(
                dist.get_rank(),
                local,
                dist.get_world_size(),
                device,
                why,
                dist.get_backend(),
                "the process group was there",
            )
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
            facts = _start_group(cpu, group_options)
            group, group_options = dist.group.WORLD, None
        else:
            device, why = _choose_device(0, 1, cpu)
            facts = Process(0, 0, 1, device, why, None, "one process: nothing to talk to")
        _known = (weakref.ref(group) if group is not None else _no_group, facts)
    facts = _known[1]
    if group_options is not None:
        _note_options(group_options, group)
    if cpu and facts.device.type != "cpu":
        return replace(facts, device=torch.device("cpu"), device_reason="cpu=True was asked for")
    return facts


_NO_GROUP = object()


def _no_group() -> object:
    return _NO_GROUP


def _choose_device(local_rank: int, world_size: int, cpu: bool) -> tuple[Any, str]:
    import torch

    if cpu:
        return torch.device("cpu"), "cpu=True was asked for"
    if _told is not None:
        return torch.device(_told[0]), _told[1]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(
                f"local rank {local_rank} has no GPU: this machine has {count}. Start at most {count} ranks here, "
                "or ask for cpu=True."
            )
        return torch.device("cuda", local_rank), f"CUDA is available; local rank {local_rank} of {count} GPUs"
    if world_size == 1 and torch.backends.mps.is_available():
        return torch.device("mps"), "no CUDA, one process, MPS is available"
    return torch.device("cpu"), "neither CUDA nor (for one process) MPS is available"


_noted: set[str] = set()


def note_once(text: str) -> None:
    """A warning, once in this process and on the main process only, pointing at the user's line."""
    if text in _noted:
        return
    _noted.add(text)
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=messages.depth())


def _note_options(options: InitProcessGroupKwargs, group: Any) -> None:
    """The group is there already (or there is none): what was asked of it has no effect."""
    asked = {name: value for name, value in vars(options).items() if value is not None}
    if group is not None and asked and asked != _started_with:
        told = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        note_once(f"{told}: the process group is there already, and goes on as it is")


# The groups of a pool's rank, set by the worker: see nbdist.regroup. None outside of a pool.
pool_groups: Any = None


def group_timeout() -> timedelta | None:
    """The timeout that was asked for when the group was started here; None: torch's own."""
    return _started_with.get("timeout")


_started = False  # the group was started here
_started_with: dict[str, Any] = {}


def _start_group(cpu: bool, options: InitProcessGroupKwargs | None) -> Process:
    """Join the group that torchrun's environment describes."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    device, why = _choose_device(local, world, cpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, because = "cpu:gloo,cuda:nccl", "tensors on GPUs travel by NCCL, those on the CPU by gloo"
    else:
        backend, because = "gloo", f"the device is {device.type}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == world and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing of ours listens on other interfaces
    asked = {} if options is None else {name: value for name, value in vars(options).items() if value is not None}
    if "backend" in asked:
        backend, because = asked["backend"], "it was asked for"
    _started_with.update(asked)
    dist.init_process_group(**{"backend": backend, **asked})
    global _started
    _started = True
    atexit.register(_end_group)
    return Process(rank, local, world, device, why, dist.get_backend(), because)


def end_own_group() -> None:
    """End the process group of all processes, if it was started here."""
    if _started:
        end_group()


def _end_group() -> None:
    import torch.distributed as dist

    # After an error the other ranks may be anywhere: then leaving at once is better than a goodbye that can wait for
    # them.
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def end_group(group: Any = None) -> None:
    """End a process group; by default that of all processes, if there is one."""
    import torch.distributed as dist

    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise checks.wrong("destroy_process_group: group", group, "a process group; None is the one of all processes")
    if group is not None or (dist.is_available() and dist.is_initialized()):
        dist.destroy_process_group(group)


def wait_for_everyone() -> None:
    """Wait until every rank is here. A rank that is in another operation of this package instead makes all of them
    raise.
    """
    current()  # under torchrun this may be the first look
    messages.agree("wait_for_everyone", None)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed random, numpy and torch, and the order of prepared loaders that have no generator of their own.

    Args:
        seed: any integer, of any size.
        device_specific: add the rank, so that dropout and augmentation differ by rank; loaders keep one order on all
            ranks. Ranks that compute one result together (tensor and context parallel) have the same.
        deterministic: also ask torch for deterministic algorithms.

    Raises:
        TypeError: the seed is no integer; nothing has changed then.
    """
    global _seed
    import numpy
    import torch

    device_specific = checks.flag(device_specific, "set_seed: device_specific")
    deterministic = checks.flag(deterministic, "set_seed: deterministic")
    seed = _seed = whole_seed(seed, "set_seed")
    if device_specific:
        seed += current().rank if _seed_rank is None else _seed_rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)  # every device's generator too
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)


def draw_apart(rank: int) -> None:
    """What a rank-specific seed differs by in this process: which part of a batch it takes."""
    global _seed_rank
    _seed_rank = rank


def whole_seed(seed: Any, where: str) -> int:
    """A seed as an integer.

    Args:
        where: who was told, for the error.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"{where}: the seed is {checks.short(seed)}; it must be a whole number, such as 42") from None


def data_seed() -> int:
    """The seed of prepared loaders without a generator of their own: that of the last `set_seed`, 0 before the
    first.
    """
    return _seed
