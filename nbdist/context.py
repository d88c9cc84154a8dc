"""Context parallel: the ranks of a group take parts of each sequence, and attention goes over all of them. It is
torch's own (torch.distributed.tensor.experimental), with the Accelerator's mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nbdist import checks
from nbdist.state import Process


def obstacle(process: Process, size: int) -> str | None:
    """Why sequences cannot be shared in this process; None when they can, or when nothing is to be shared.

    Args:
        size: how many ranks share a sequence.
    """
    if size == 1 or process.device.type == "cuda":
        return None
    return (
        f"context parallel (cp_size={size}) needs GPUs: torch {torch.__version__} splits no kernel of "
        f"scaled_dot_product_attention that runs on {process.device.type} over ranks. Take cp_size=1; dp_shard_size or "
        "tp_size spread memory here too"
    )


@contextmanager
def sharing(
    mesh: Any, way: str, buffers: list[torch.Tensor], dims: list[int], kept: set[torch.Tensor]
) -> Iterator[None]:
    """In this block `buffers` are this rank's part of them, and attention goes over the parts of all.

    Args:
        mesh: of the context parallel group.
        way: how ranks get the keys and values of others, "allgather" or "alltoall".
        buffers: whole, and the same on all ranks of the group. They are changed in place and whole again afterwards.
        dims: the dimension of each that is the sequence's.
        kept: those of them that stay as they are at the end.
    """
    from torch.distributed.tensor.experimental import context_parallel

    _choose(way)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept):
        yield


def _choose(way: str) -> None:
    from torch.distributed.tensor.experimental import _attention

    choose = getattr(_attention, "set_rotate_method", None)
    if choose is not None:  # else torch's own default, which is another order of the same sums
        choose(way)


def checked(buffers: Any, dims: Any, kept: Any, size: int) -> tuple[list[torch.Tensor], list[int], set[torch.Tensor]]:
    """What `maybe_context_parallel` was given.

    Raises:
        TypeError, ValueError: they do not go together, or a sequence cannot be split evenly over `size` ranks.
    """
    where = "maybe_context_parallel"
    buffers, dims, kept = list(buffers or ()), list(dims or ()), set(kept or ())
    for one in (*buffers, *kept):
        checks.kind(one, torch.Tensor, f"{where}: buffers", "a list of tensors")
    if len(buffers) != len(dims):
        raise ValueError(
            f"{where}: there are {len(buffers)} buffers and {len(dims)} buffer_seq_dims: give the dimension of the "
            "sequence for each"
        )
    if not kept <= set(buffers):
        raise ValueError(f"{where}: a tensor of no_restore_buffers is none of the buffers")
    for at, (one, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(dim, int) or not -one.dim() <= dim < one.dim():
            raise ValueError(f"{where}: buffer {at} has the shape {tuple(one.shape)}, and no dimension {dim!r}")
        if one.shape[dim] % (2 * size):  # torch gives each rank two pieces, an early and a late one
            raise ValueError(
                f"{where}: the sequence of buffer {at} has the length {one.shape[dim]}; over {size} ranks it must be a "
                f"multiple of {2 * size}. Pad it"
            )
    return buffers, dims, kept
