"""One process that needs a process group: it gets one of itself."""

from __future__ import annotations

from nbdist.state import Process


def start(process: Process) -> bool:
    """Start a group of this process alone, where there is none and it is the only one. Returns whether it did."""
    import torch.distributed as dist

    if dist.is_initialized() or process.world_size > 1:
        return False
    backend = "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True
