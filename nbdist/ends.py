"""The ends of a nested value: what a collective takes out of it, and puts back into one like it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

CANNOT = " (cannot travel)"  # behind the kind of an end that has no plain data


class Leaf(NamedTuple):
    """One end of a nested value, or a container on the way."""

    path: str  # where it is, as one would index it
    role: str  # "tensor", "number", "list", "object", "structure"
    kind: str  # in words; equal on all ranks
    value: Any


def leaves(value: Any, path: str = "") -> Iterator[Leaf]:
    """The ends of a nested value, and its containers, in order."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided and not value.is_quantized else f" {value.layout}{CANNOT}"
        layout = CANNOT if value.is_meta else layout
        kind = f"a {value.dim()}-dim tensor of {name_of(value.dtype)} on {value.device.type}{layout}"
        yield Leaf(path, "tensor", kind, value)
    elif value is None:
        yield Leaf(path, "structure", "None", value)
    elif isinstance(value, bool | int | float | complex):
        yield Leaf(path, "number", f"a number of type {type(value).__name__}", value)
    elif isinstance(value, Mapping):
        yield Leaf(path, "structure", f"a dict with keys {list(value)}", value)
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple) or (isinstance(value, list) and _has_tensor(value)):
        yield Leaf(path, "structure", f"a {type(value).__name__} of {len(value)}", value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, list):
        yield Leaf(path, "list", "a list of objects", value)
    else:
        yield Leaf(path, "object", "an object", value)


def rebuilt(value: Any, results: Iterator[Any]) -> Any:
    """A nested value like `value`, with the next result at each of its ends."""
    if isinstance(value, Mapping):
        next(results)
        items = {key: rebuilt(item, results) for key, item in value.items()}
        return items if type(value) is dict else like(value, items)
    if isinstance(value, tuple) or (isinstance(value, list) and _has_tensor(value)):
        next(results)
        done = [rebuilt(item, results) for item in value]
        if isinstance(value, list):
            return done
        return type(value)(*done) if hasattr(value, "_fields") else type(value)(done)
    return next(results)


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The items in a mapping of the same class; a plain dict where that class is not made from one."""
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def number_dtype(value: Any) -> Any:
    """The dtype of the tensor that numbers like this one become."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.get_default_dtype() if isinstance(value, float) else torch.get_default_dtype().to_complex()


def name_of(dtype: torch.dtype) -> str:
    """As one says it: float32."""
    return str(dtype).removeprefix("torch.")
