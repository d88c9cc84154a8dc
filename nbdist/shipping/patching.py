"""What both sides must have in common for a change in pieces to suffice."""

from __future__ import annotations

from typing import Any

from nbdist.shipping.chunks import Hashes, Patch, remember
from nbdist.shipping.kinds import Snapshot
from nbdist.shipping.kinds_array import ArrayKind, strides_of
from nbdist.shipping.kinds_memory import (
    TensorKind,
    array_extent,
    freed,
    has_plain_memory,
    laid_out_as,
    lies_as,
    stride_of,
    tensor_extent,
)
from nbdist.shipping.lazy import torch_if_loaded
from nbdist.shipping.spread import is_spread


def missing(value: Any, patch: Patch, digest: Any) -> str:
    """What is missing on this side for an object to be as the sender's once a patch is written.

    Args:
        digest: of the sender's object.

    Returns:
        "" for nothing; "all" where unsent bytes are other ones here; "anew" where the object itself is another one.
    """
    torch = torch_if_loaded()
    dtype, shape, stride, _ = patch.form
    if value.dtype != dtype or tuple(value.shape) != shape:
        return "anew"
    if torch is None or not isinstance(value, torch.Tensor):
        if value.strides != stride:
            return "anew"
        return "" if patch.completes(array_extent(value)[0], digest[1]) else "all"
    if value.layout is not torch.strided or (freed(value) and not is_spread(value)):
        return "anew"
    if patch.whole:
        return ""
    if is_spread(value):
        return "all"  # of what was not sent, this rank has a part
    memory = value if lies_as(value, patch) else laid_out_as(value, patch)
    return "" if patch.completes(memory.data_ptr(), digest[1]) else "all"


def remember_content(value: Any, digest: Any) -> None:
    """A tensor or array is now as the other side's, which has this digest."""
    if type(digest) is not tuple or len(digest) != 2 or type(digest[1]) is not Hashes:
        return
    torch = torch_if_loaded()
    if torch is not None and isinstance(value, torch.Tensor):
        if is_spread(value):
            return
        if has_plain_memory(value) and stride_of(value) == digest[0]:
            remember(*tensor_extent(value), digest[1])
    elif strides_of(value) == digest[0]:
        remember(*array_extent(value), digest[1])


PATCHED = {TensorKind.letter: 4, ArrayKind.letter: 3}  # kinds that are sent in pieces: where their digest is


def without_content(snapshot: Snapshot | None) -> Snapshot | None:
    """A snapshot against which all bytes have changed, and nothing else."""
    if snapshot is None or snapshot[0] not in PATCHED:
        return snapshot
    letter, scalars, references = snapshot
    place = PATCHED[letter]
    if len(scalars) <= place or type(scalars[place]) is not tuple:
        return snapshot
    return letter, (*scalars[:place], (scalars[place][0], None), *scalars[place + 1 :]), references
