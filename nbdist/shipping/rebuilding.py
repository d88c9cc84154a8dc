"""What `pickler` takes apart is made again by these functions on the other side, which finds them by their names."""

from __future__ import annotations

import types
import warnings
from typing import Any

from nbdist.shipping.kinds_memory import put_gradient
from nbdist.shipping.views import move_into


def itself(value: Any) -> Any:
    """For what travels as another object in its place."""
    return value


def rebuild_quietly(function: Any, arguments: tuple[Any, ...]) -> Any:
    """A tensor of a kind about which torch warns whenever one is made: who made it here was nobody's cell."""
    with warnings.catch_warnings(action="ignore"):
        return function(*arguments)


def ranks_own(side: Any, key: str, name: str, path: tuple[str, ...]) -> Any:
    """The object behind a handle, on a rank."""
    value = side.own(key, name)
    for attribute in path:
        value = getattr(value, attribute)
    return value


def make_tensor(
    memory: Any,
    ref: int,
    dtype: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
) -> Any:
    import torch

    storage, offset = memory.torch(ref)
    if storage is None:
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
    else:
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def make_copy(tensor: Any, requires_grad: bool, parameter: bool) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def set_tensor(tensor: Any, state: tuple[Any, dict[str, Any], list[tuple[Any, int]], Any]) -> None:
    grad, own, inner, side = state
    if inner:
        move_into(tensor, inner)
        side.moved.extend(part for part, _ in inner)
    put_gradient(tensor, grad)
    tensor.__dict__.update(own)


def make_array(
    memory: Any, ref: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], writeable: bool
) -> Any:
    import numpy

    flat, offset = memory.numpy(ref)
    if flat is None:
        array = numpy.empty(shape, dtype)
    else:
        low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
        array = numpy.ndarray(shape, dtype, buffer=flat, offset=offset - low, strides=strides)
        if memory.alone(ref) and (array.flags.c_contiguous or array.flags.f_contiguous):
            # Owns its memory, so that it may be resized. With gaps it must lie as it does on the other side: a view of
            # it that is sent later says where in its memory it looks.
            array = array.copy(order="K")
    if not writeable:
        array.flags.writeable = False
    return array


def set_read_only(array: Any, state: Any) -> None:
    array.__setstate__(state)
    array.flags.writeable = False


def make_storage(memory: Any, ref: int, size: int) -> Any:
    import torch

    storage, offset = memory.torch(ref)
    if storage is None:
        return torch.UntypedStorage(0)
    if offset == 0 and storage.nbytes() == size:
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,)).clone().untyped_storage()


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def make_function(code: types.CodeType, scope: dict[str, Any], cells: tuple[types.CellType, ...] | None) -> Any:
    return types.FunctionType(code, scope, None, None, cells)


def set_function(function: types.FunctionType, state: Any) -> None:
    own, attributes, filled = state
    for name, value in own.items():
        setattr(function, name, value)
    function.__dict__.update(attributes)
    for cell, contents in filled:
        cell.cell_contents = contents[0]


def scope_of(name: str) -> dict[str, Any]:
    """The globals of an importable module."""
    from importlib import import_module

    return import_module(name).__dict__
