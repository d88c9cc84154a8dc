"""Bringing a batch to a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nbdist import checks


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
    if skip_keys is not None:
        checks.kind(skip_keys, str | list | tuple | set | frozenset, "send_to_device: skip_keys", "keys of dicts")
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


class CopyAhead:
    """Copies each batch to a device while the one before is computed on, on a stream of its own.

    Args:
        batches: those to copy; pinned memory, else each copy waits for itself.
        device: where to.
        module: what has Stream, stream, current_stream: torch.cuda.
    """

    def __init__(self, batches: Iterator[Any], device: Any, module: Any) -> None:
        self._batches, self._device, self._module = batches, device, module
        self._stream = module.Stream(device)

    @classmethod
    def over(cls, batches: Iterator[Any], device: Any) -> Iterator[Any]:
        """`batches` on the device: copied ahead on CUDA, else one by one."""
        if device.type != "cuda":
            return (send_to_device(batch, device, non_blocking=True) for batch in batches)
        return iter(cls(batches, device, torch.cuda))

    def __iter__(self) -> Iterator[Any]:
        copied = self._copied()
        while copied:
            current = self._module.current_stream(self._device)
            current.wait_stream(self._stream)
            _used_on(copied[0], current)  # its memory is not given to another copy before this stream is done with it
            batch = copied[0]
            error = None
            try:
                copied = self._copied()
            except Exception as raised:  # its turn is after the batch in hand
                error = raised
            yield batch
            if error is not None:
                raise error

    def _copied(self) -> tuple[Any, ...]:
        """The next batch on the device, in a tuple; empty at the end."""
        for batch in self._batches:
            with self._module.stream(self._stream):
                return (send_to_device(batch, self._device, non_blocking=True),)
        return ()


def _used_on(value: Any, stream: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _used_on(item, stream)
    elif hasattr(value, "record_stream"):
        value.record_stream(stream)
