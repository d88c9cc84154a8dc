"""A nested value as bytes for another rank: its tensors as they lie in memory, the rest pickled."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import cloudpickle
import torch

_ALIGNED = 16  # so that a part of the buffer can be seen as any dtype


def pack(value: Any) -> torch.Tensor:
    """The value in one tensor of bytes on the CPU.

    Raises:
        TypeError: something in it cannot be pickled.
    """
    try:
        text, tensors = _pickled(pickle.Pickler, value)
    except Exception:  # something of a notebook's, by value
        try:
            text, tensors = _pickled(cloudpickle.Pickler, value)
        except Exception as error:
            raise TypeError(f"a batch cannot be sent to another rank: {type(error).__name__}: {error}") from None
    head = len(text).to_bytes(8, "little") + text
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *map(_bytes, tensors)]
    parcel = torch.empty(sum(_room(len(part)) for part in parts), dtype=torch.uint8)
    at = 0
    for part in parts:
        parcel[at : at + len(part)] = part
        at += _room(len(part))
    return parcel


def digest(value: Any) -> bytes:
    """The same for equal values, on all ranks. Raises what `pack` raises."""
    try:
        text, tensors = _pickled(cloudpickle.Pickler, value)
    except Exception as error:
        raise TypeError(f"a batch cannot be compared with another rank's: {type(error).__name__}: {error}") from None
    found = hashlib.blake2b(text, digest_size=16)
    for tensor in tensors:
        found.update(_bytes(tensor).numpy().tobytes())
    return found.digest()


def unpack(parcel: torch.Tensor) -> Any:
    """The value again; its tensors are parts of the parcel's memory."""
    size = int.from_bytes(parcel[:8].numpy().tobytes(), "little")
    reader = pickle.Unpickler(io.BytesIO(parcel[8 : 8 + size].numpy().tobytes()))
    at = _room(8 + size)

    def tensor(facts: Any) -> torch.Tensor:
        nonlocal at
        dtype, shape, length = facts
        part = parcel[at : at + length].view(dtype).reshape(shape)
        at += _room(length)
        return part

    reader.persistent_load = tensor  # type: ignore[method-assign]
    return reader.load()


def _pickled(kind: Any, value: Any) -> tuple[bytes, list[torch.Tensor]]:
    written, tensors = io.BytesIO(), []
    pickler = kind(written, protocol=pickle.HIGHEST_PROTOCOL)

    def aside(item: Any) -> Any:
        plain = type(item) is torch.Tensor and item.layout is torch.strided and item.device.type == "cpu"
        if not plain or item.is_quantized or item.requires_grad:
            return None
        tensors.append(item)
        return item.dtype, tuple(item.shape), item.numel() * item.element_size()

    pickler.persistent_id = aside
    pickler.dump(value)
    return written.getvalue(), tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
