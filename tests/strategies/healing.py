"""A process group that lives on inside the same object after its connections were cut, as a pool does it."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d as world

_kept: list[Any] = []  # the old backends: ending one may wait for peers that are gone


def store() -> Any:
    return world._world.pg_map[dist.group.WORLD][1]


def cut() -> None:
    """Shut every TCP connection of this process down: the collectives that wait on them fail."""
    for name in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                end.getpeername()
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            end.close()


def heal(generation: int, base: Any) -> None:
    """Put a new gloo backend into the default group. All ranks call it."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    old = group._get_backend(cpu)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = old.options._timeout
    options._devices = [c10d.ProcessGroupGloo.create_default_device()]
    options.group_name = world._world.pg_names[group]
    options.global_ranks_in_group = old.options.global_ranks_in_group
    fresh = dist.PrefixStore(f"heal{generation}/", base)
    new = c10d.ProcessGroupGloo(fresh, dist.get_rank(), dist.get_world_size(), options)
    new._set_sequence_number_for_group()
    _kept.append(old)
    group._register_backend(cpu, c10d.ProcessGroup.BackendType(6 + generation), new)
    world._world.pg_map[group] = (world._world.pg_map[group][0], fresh)
