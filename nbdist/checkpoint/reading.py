"""Reading a checkpoint: of each tensor the part that this rank wants, into fresh memory, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from nbdist.checkpoint import contents, tree
from nbdist.checkpoint.blocks import Files
from nbdist.checkpoint.manifest import BadCheckpoint, Manifest, Tensor


def read(
    files: Files,
    held: Manifest,
    wanted: Mapping[str, DTensor | None],
    got: Callable[[int], Any] = lambda count: None,
) -> dict[str, torch.Tensor]:
    """Tensors by key, in fresh memory on the CPU, or where the shards are that they are to be like.

    Args:
        wanted: the keys; None: the whole tensor; else one that it is to be sharded like.
        got: is told of bytes that were read.

    Raises:
        BadCheckpoint: the checkpoint does not have it whole, or its bytes are not those that were written.
    """
    found = {}
    for key, like in wanted.items():
        if key not in held.tensors:
            raise BadCheckpoint(f"the checkpoint has no tensor {key}: it is damaged")
        tensor = held.tensors[key]
        if like is None:
            found[key] = _part(files, key, tensor, [0] * len(tensor.shape), tensor.shape)
        else:
            found[key] = _sharded(files, key, tensor, like)
        got(contents.local(found[key]).nbytes)
    return found


def _sharded(files: Files, key: str, tensor: Tensor, like: DTensor) -> torch.Tensor:
    local = like.to_local()
    if like.device_mesh.get_coordinate() is None:
        part = torch.empty_like(local)
    else:
        (chunk,) = like.__create_chunk_list__()
        if math.prod(chunk.sizes):
            part = _part(files, key, tensor, list(chunk.offsets), list(chunk.sizes)).to(local.device)
        else:
            part = torch.empty(local.shape, dtype=tree.dtype(tensor.dtype), device=local.device)
    return DTensor.from_local(
        part.reshape(local.shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _part(files: Files, key: str, tensor: Tensor, offsets: list[int], sizes: list[int]) -> torch.Tensor:
    """A box of a tensor, from the chunks that it lies in."""
    dtype = tree.dtype(tensor.dtype)
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    saved = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.chunks]
    described = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), saved)
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    whole: torch.Tensor | None = None
    filled = 0
    for item in create_read_items_for_chunk_list(key, described, [box]):
        chunk = tensor.chunks[item.storage_index.index or 0]
        strides = _strides(chunk.sizes)
        first = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
        lengths = list(item.lengths)
        last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        flat = files.read(chunk, dtype, key, first, last + 1)
        piece = flat.as_strided(lengths, strides)
        count = math.prod(lengths)
        filled += count
        if count == math.prod(sizes) and piece.is_contiguous():
            whole = piece
            continue
        if whole is None:
            whole = torch.empty(sizes, dtype=dtype)
        into = whole
        for dim, (at, length) in enumerate(zip(item.dest_offsets, lengths, strict=True)):
            into = into.narrow(dim, at, length)
        into.copy_(piece)
    if filled != math.prod(sizes):
        raise BadCheckpoint(f"the checkpoint has only {filled} of {math.prod(sizes)} elements of {key}: it is damaged")
    assert whole is not None
    return whole


def _strides(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return strides[::-1]
