"""Copies of tensors that a save in the background writes, so that training may go on and change its own.

The memory is kept for the next save: pages that are there already take a copy several times faster than fresh ones
(which the kernel has to find and clear), and a training loop that saves once saves again. Huge pages are not asked for:
where memory is fragmented they take several times longer than small ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ALIGNED = 64  # bytes


class Staging:
    """Memory on the host for one copy of what is saved. One copy at a time: `copy` writes over the last one."""

    def __init__(self) -> None:
        self._memory: dict[bool, torch.Tensor] = {}  # by whether it is pinned

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """The tensors' values as they are now, in memory of this object, contiguous.

        From the CPU they are there when this returns. From a GPU they are on their way, on a stream of their own: what
        runs on the current stream later waits for them, and the host does not.

        Args:
            tensors: what is one tensor under two names is copied once and is one again.

        Returns:
            The copies by name; and what is to be waited for (`synchronize()` of each) before they are read.
        """
        held = [(name, tensor.detach().resolve_conj().resolve_neg()) for name, tensor in tensors.items()]
        places: dict[Any, tuple[bool, int]] = {}
        sizes = {False: 0, True: 0}
        for _, tensor in held:
            pinned = tensor.device.type == "cuda"
            if _identity(tensor) not in places:
                places[_identity(tensor)] = pinned, sizes[pinned]
                sizes[pinned] += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        for pinned, size in sizes.items():
            self._make_room(size, pinned)
        copies: dict[Any, torch.Tensor] = {}
        streams: dict[torch.device, Any] = {}
        found = {}
        for name, tensor in held:
            key = _identity(tensor)
            if key not in copies:
                copies[key] = self._at(*places[key], tensor)
                if tensor.device.type == "cuda":
                    self._bring(copies[key], tensor, streams)
                else:
                    copies[key].copy_(tensor)  # in several threads
            found[name] = copies[key]
        return found, [_left(device, stream) for device, stream in streams.items()]

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return sum(memory.numel() for memory in self._memory.values())

    def forget(self) -> None:
        """Give the memory back. Copies that are still in use keep it alive."""
        self._memory.clear()

    def _make_room(self, size: int, pinned: bool) -> None:
        memory = self._memory.get(pinned)
        if memory is None or memory.numel() < size or memory.numel() > 2 * size:
            self._memory.pop(pinned, None)
            del memory  # before the new one: never both
            if size:
                self._memory[pinned] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _at(self, pinned: bool, start: int, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if not size:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._memory[pinned][start : start + size].view(tensor.dtype).view(tensor.shape)

    def _bring(self, copy: torch.Tensor, tensor: torch.Tensor, streams: dict[torch.device, Any]) -> None:
        device = tensor.device
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
            streams[device].wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(streams[device]):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(streams[device])  # freed by the loop, it is not given away before it was read


def _left(device: torch.device, stream: Any) -> Any:
    """Let what comes later on the current stream wait for the copies; returns what the host can wait for."""
    done = torch.cuda.Event()
    done.record(stream)
    torch.cuda.current_stream(device).wait_event(done)
    return done


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for what is the same memory seen the same way."""
    if not tensor.numel():
        return (tensor.dtype, tuple(tensor.shape))
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
