"""Bringing a batch to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """A nested value with its tensors, and its objects that have a `.to`, on the device. The rest stays the same
    object.

    Args:
        tensor: tuples, lists and dicts of anything.
        device: where to.
        non_blocking: let the copy run beside the computation; it needs pinned memory.
        skip_keys: dict keys whose values stay where they are.
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if isinstance(tensor, torch.Tensor) or hasattr(tensor, "to"):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a .to of its own that knows no non_blocking
            return tensor.to(device)
    if isinstance(tensor, Mapping):
        items = {
            key: value if key in skipped else send_to_device(value, device, non_blocking, skip_keys)
            for key, value in tensor.items()
        }
        if type(tensor) is dict:
            return items
        try:
            return type(tensor)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tensor, list | tuple):
        moved = [send_to_device(value, device, non_blocking, skip_keys) for value in tensor]
        return type(tensor)(*moved) if hasattr(tensor, "_fields") else type(tensor)(moved)
    return tensor
