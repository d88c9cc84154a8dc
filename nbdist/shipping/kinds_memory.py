"""The kind of tensors. Content is compared by hash, and copied in place."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import xxhash

from nbdist.shipping.chunks import Patch, Pieces, digest_of, runs_of
from nbdist.shipping.kinds import Kind, Snapshot
from nbdist.shipping.memory import INLINE


def tensor_extent(tensor: Any) -> tuple[int, int]:
    """(address, length in bytes) that a strided tensor's elements span."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def array_extent(array: Any) -> tuple[int, int]:
    """(address, length in bytes) that an array's elements span."""
    address = array.__array_interface__["data"][0]
    if array.size == 0:
        return address, 0
    low, high = address, address + array.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high - low


def has_plain_memory(tensor: Any) -> bool:
    """Is this a strided CPU tensor whose memory may be read as it lies there?"""
    import torch

    if uninitialized(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return _readable(tensor)


def _readable(tensor: Any) -> bool:
    """False for a tensor whose storage was freed under it (FSDP does that): reading it would end the process."""
    if tensor.numel() == 0:
        return True
    try:
        storage = tensor.untyped_storage()
        address, length = tensor_extent(tensor)
        return storage.data_ptr() != 0 and storage.nbytes() >= address - storage.data_ptr() + length
    except (RuntimeError, NotImplementedError):
        return False


def freed(tensor: Any) -> bool:
    """Has a strided CPU tensor lost its storage?"""
    import torch

    strided = tensor.layout is torch.strided and not tensor.is_nested and not uninitialized(tensor)
    return bool(strided and tensor.device.type == "cpu" and not _readable(tensor))


def dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Do elements lie side by side, in whatever order, so that every byte between them is theirs?"""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Content:
    """Stands for all elements of a known tensor or array in a change: they are to travel, although the other side has
    the object.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class TensorKind(Kind):
    letter = "T"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = value.__dict__
        grad = value.grad if value.is_leaf else None
        references = (grad, type(value), *own.values())
        if light:
            return (), references
        if digest is None:
            digest = self.digest(value)
        facts = (_shape(value), value.dtype, value.layout, value.requires_grad and value.is_leaf, digest)
        return (*facts, tuple(own), _place(value)), references

    def digest(self, value: Any) -> Any:
        """(the stride unless it follows from the shape, the hash of the content), whatever device and layout it has."""
        if has_plain_memory(value):
            return stride_of(value), digest_of(*tensor_extent(value))
        if freed(value):
            return "freed"
        if uninitialized(value):
            return "uninitialized"
        if value.device.type == "meta":
            return "meta"
        import torch

        with torch.no_grad():
            if value.layout is torch.strided and not value.is_quantized and not value.is_nested:
                copy = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
                return None, digest_of(*tensor_extent(copy))
        stream = io.BytesIO()
        with warnings.catch_warnings(action="ignore"):  # torch's, about kinds of tensors that may change
            pickle.Pickler(stream, 5).dump(value.detach())
        return xxhash.xxh3_64_intdigest(stream.getbuffer())

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return references

    def shape(self, value: Any) -> Any:
        return _shape(value), str(value.dtype), tuple(value.__dict__)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        if freed(value):
            raise TypeError("its memory was taken away (a sharded parameter)")
        own = dict(value.__dict__)
        grad = value.grad if value.is_leaf else None
        content: Any = None
        if old is not None and has_moved(value, old):
            content = Moved(value.detach())
        elif old is None or old[0] != self.letter or old[1][:3] != new[1][:3]:
            content = Content(value.detach())
        elif old[1][4] != new[1][4]:
            content = self._pieces(value, old[1][4], new[1][4]) or Content(value.detach())
        return content, value.requires_grad and value.is_leaf, grad, own

    def _pieces(self, value: Any, old: Any, new: Any) -> Pieces | None:
        if not has_plain_memory(value) or not comparable(old, new) or not dense(value.shape, value.stride()):
            return None
        address, length = tensor_extent(value)
        if length < INLINE:
            return None
        form = (value.dtype, tuple(value.shape), value.stride(), length)
        return Pieces(value.detach(), form, address, runs_of(address, length, old[1], new[1]))

    def sent(self, change: Any) -> Iterable[Any]:
        return (change[2], *change[3].values())

    def apply(self, value: Any, change: Any) -> None:
        import torch

        if hasattr(value, "placements"):  # a rank has a part of it
            from nbdist.shipping.spread import SPREAD

            SPREAD.apply(value, change)
            return
        content, requires_grad, grad, own = change
        if uninitialized(value) and isinstance(content, torch.Tensor) and not uninitialized(content):
            value.materialize(tuple(content.shape), dtype=content.dtype)
        if type(content) is Moved:
            value.data = content.value.to(value.device)
        elif type(content) is Patch:
            _patch_tensor(value, content)
        elif content is not None:
            _lay_out_as(value, content)
            with torch.no_grad():
                if _shape(value) == _shape(content) and value.dtype == content.dtype and value.layout is content.layout:
                    # copy_ and not .data.copy_: autograd must see that saved tensors have changed
                    once(value).copy_(once(content))
                else:
                    # an in-place resize: the new memory is taken over, views of the old one stay with the old one
                    value.data = content.clone().to(value.device)
        if value.is_leaf:
            if value.requires_grad != requires_grad:
                value.requires_grad_(requires_grad)
            put_gradient(value, grad)
        for name in [name for name in value.__dict__ if name not in own]:
            del value.__dict__[name]
        value.__dict__.update(own)


class Moved:
    """In a change, for a tensor that looks at other memory than before (`t.data = other`): its new memory, which new
    and known tensors may share. What shared the old one keeps it.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Moved, (self.value,)


def put_gradient(tensor: Any, grad: Any) -> None:
    """Set `.grad`, also one of another shape, which `t.data = other` leaves in its place and torch refuses to set."""
    if tensor.grad is grad:
        return
    if grad is None or (grad.shape == tensor.shape and grad.dtype == tensor.dtype):
        tensor.grad = grad
        return
    own = tensor.data
    tensor.data = grad.detach()
    try:
        tensor.grad = grad
    finally:
        tensor.data = own


def _place(tensor: Any) -> int | None:
    """Where a tensor's memory is in this process; None for one without plain memory, or without any."""
    return tensor.data_ptr() if has_plain_memory(tensor) and tensor.numel() else None


def has_moved(value: Any, old: Snapshot) -> bool:
    """Does a tensor look at other memory than when this snapshot was taken?"""
    before = old[1][6] if old[0] == TensorKind.letter and len(old[1]) > 6 else None
    return before is not None and _place(value) not in (None, before)


def _lay_out_as(value: Any, content: Any) -> None:
    """Give a tensor another shape over its own memory (`t.unsqueeze_(0)`), so that it goes on being shared."""
    import torch

    if value.dtype != content.dtype or not (has_plain_memory(value) and has_plain_memory(content)):
        return
    if value.shape == content.shape or not value.numel():
        return
    storage, offset = value.untyped_storage(), value.storage_offset()
    if offset * value.element_size() + tensor_extent(content)[1] <= storage.nbytes():
        value.data = torch.empty(0, dtype=value.dtype).set_(storage, offset, content.shape, content.stride())


def once(tensor: Any) -> Any:
    """An expanded tensor's elements, each once: torch refuses to write to one place several times."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.is_nested:
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _shape(tensor: Any) -> tuple[Any, ...]:
    """A tensor's shape; of a nested one its parts'."""
    if uninitialized(tensor):
        return ("uninitialized",)
    return tuple(tuple(part.shape) for part in tensor.unbind()) if tensor.is_nested else tuple(tensor.shape)


def uninitialized(tensor: Any) -> bool:
    """Is this a parameter or buffer of a lazy module, which has no shape yet?"""
    parameter = sys.modules["torch"].nn.parameter
    return issubclass(type(tensor), parameter.UninitializedParameter | parameter.UninitializedBuffer)


def stride_of(tensor: Any) -> Any:
    return None if tensor.is_contiguous() else tensor.stride()


def comparable(old: Any, new: Any) -> bool:
    """Are these digests of memory that lies in the same way?"""
    return type(old) is tuple and type(new) is tuple and old[0] == new[0]


def lies_as(tensor: Any, patch: Patch) -> bool:
    return has_plain_memory(tensor) and tensor.stride() == patch.form[2]


def laid_out_as(tensor: Any, patch: Patch) -> Any:
    """A copy that lies as the sender's does."""
    import torch

    dtype, shape, stride, _ = patch.form
    return torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor.detach())


def _patch_tensor(value: Any, patch: Patch) -> None:
    import torch

    with torch.no_grad():
        if not lies_as(value, patch):  # on a device, for example
            copy = laid_out_as(value, patch)
            patch.write(copy.data_ptr())
            value.copy_(copy)
            return
        patch.write(value.data_ptr())
        if not value.is_inference():
            # autograd must see that saved tensors have changed: writing no elements counts as writing
            value.detach().as_strided((0,), (1,)).zero_()
