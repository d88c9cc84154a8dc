"""A face: names of `accelerate.utils`, from where they live here."""

from nbdist.collectives import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce
from nbdist.data.move import send_to_device
from nbdist.kwargs import DistributedDataParallelKwargs
from nbdist.state import DistributedType, set_seed, wait_for_everyone

__all__ = [
    "DistributedDataParallelKwargs",
    "DistributedType",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
    "wait_for_everyone",
]
