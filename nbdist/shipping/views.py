"""New views of memory that both sides have: rebuilt over the other side's copy, so that they go on sharing it."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from nbdist.shipping.kinds_memory import array_extent, has_plain_memory, tensor_extent
from nbdist.shipping.lazy import numpy_if_loaded, torch_if_loaded

_LOOK_BACK = 64  # how many intervals that start before a view are tried


class KnownMemory:
    """Finds the known tensor or array in whose memory an interval lies."""

    def __init__(self, values: Iterable[Any], equal: Callable[[Any], bool]) -> None:
        self._equal = equal  # has the other side the same content, once the message is applied?
        torch, numpy = torch_if_loaded(), numpy_if_loaded()
        found: list[tuple[int, int, int, Any]] = []
        for value in values:
            if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
                if not has_plain_memory(value):
                    continue
                low, length = tensor_extent(value)
            elif numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
                low, length = array_extent(value)
            else:
                continue
            if length:
                found.append((low, low + length, id(value), value))
        found.sort(key=lambda item: item[:3])
        self._found, self._starts = found, [item[0] for item in found]

    def holder(self, address: int, length: int) -> tuple[Any, int] | None:
        """(the known object, the byte offset from its lowest address) for an interval inside its memory."""
        if not length:
            return None
        index = bisect.bisect_right(self._starts, address)
        for low, high, _, value in reversed(self._found[max(0, index - _LOOK_BACK) : index]):
            if low <= address and address + length <= high and self._equal(value):
                return value, address - low
        return None

    def inside(self, address: int, length: int) -> list[tuple[Any, int]]:
        """(the known tensor, its byte offset) for those whose memory lies inside an interval."""
        torch = torch_if_loaded()
        found = []
        for low, high, _, value in self._found[bisect.bisect_left(self._starts, address) :]:
            if low >= address + length:
                break
            if high <= address + length and isinstance(value, torch.Tensor) and self._equal(value):
                found.append((value, low - address))
        return found


def move_into(base: Any, inner: list[tuple[Any, int]]) -> None:
    """Have tensors that were sent before look at the memory of one that holds theirs, and was sent after them."""
    import torch

    storage = base.untyped_storage()
    low = tensor_extent(base)[0] - storage.data_ptr()
    for tensor, offset in inner:
        start = (low + offset) // tensor.dtype.itemsize
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, start, tensor.shape, tensor.stride())


def _bytes_of(holder: Any, offset: int, length: int) -> Any:
    """A buffer over a part of a tensor's or array's memory, which keeps it alive."""
    torch = torch_if_loaded()
    is_tensor = torch is not None and isinstance(holder, torch.Tensor)
    low, size = tensor_extent(holder) if is_tensor else array_extent(holder)
    if offset + length > size:
        raise ValueError("it is a view of memory that has another size here")
    buffer = (ctypes.c_char * length).from_address(low + offset)
    # A tensor may be given other memory later (`t.data = other`): what is held is the memory.
    buffer.owner = holder.untyped_storage() if is_tensor else holder  # type: ignore[attr-defined]
    return buffer


def make_tensor_view(
    holder: Any, offset: int, length: int, dtype: Any, shape: Any, stride: Any, requires_grad: bool, parameter: bool
) -> Any:
    import torch

    if isinstance(holder, torch.Tensor):
        low, size = tensor_extent(holder)
        if offset + length > size:
            raise ValueError("it is a view of memory that has another size here")
        storage = holder.untyped_storage()
        start = low - storage.data_ptr() + offset
    else:
        storage, start = torch.frombuffer(_bytes_of(holder, offset, length), dtype=torch.uint8).untyped_storage(), 0
    tensor = torch.empty(0, dtype=dtype).set_(storage, start // dtype.itemsize, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def make_array_view(
    holder: Any, offset: int, length: int, dtype: Any, shape: Any, strides: Any, writeable: bool
) -> Any:
    import numpy

    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    array = numpy.ndarray(shape, dtype, buffer=_bytes_of(holder, offset, length), offset=-low, strides=strides)
    if not writeable:
        array.flags.writeable = False
    return array
