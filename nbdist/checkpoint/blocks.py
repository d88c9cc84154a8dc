"""A rank's tensors in one file of the safetensors format, with a checksum for each block; read in parts, each checked.

Anything that reads safetensors reads these files too; where a tensor is a part of a bigger one its name says which, and
the manifest has the checksums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash

from nbdist.checkpoint import tensorfiles
from nbdist.checkpoint.manifest import BadCheckpoint, Chunk

BLOCK = 4 * 2**20  # bytes that one checksum is of
_AT_ONCE = 64 * 2**20  # bytes a read


def write(
    path: str, tensors: dict[str, torch.Tensor], wrote: Callable[[int], Any] = lambda count: None
) -> dict[str, tuple[int, list[str]]]:
    """Write the file and bring it to the disk.

    Args:
        wrote: is told of bytes that were written.

    Returns:
        For each name the place of its first byte, and the checksums of its blocks.

    Raises:
        OSError: it cannot be written.
    """
    held = {name: _writable(tensor) for name, tensor in tensors.items()}
    places = {}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        specs = {name: tensorfiles.Spec.of(tensor) for name, tensor in held.items()}
        writer = tensorfiles.Writer(handle, specs, {"format": "pt"})
        for name in writer.order:
            tensor = held.pop(name).cpu()
            at, data = writer.written, tensorfiles.data_of(tensor)
            sums = [xxhash.xxh3_64_hexdigest(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
            writer.put(name, tensor)
            places[name] = at, sums
            wrote(len(data))
        os.fsync(handle)
    finally:
        os.close(handle)
    return places


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """As the format can hold it: what has no dtype there goes as bytes, complex numbers as pairs."""
    tensor = tensor.detach()
    if tensor.dtype in tensorfiles.NAMES and not tensor.dtype.is_complex:
        return tensor
    if tensor.dtype in (torch.complex64, torch.complex128):
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


class Files:
    """The files of a checkpoint, open for reading.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._handles: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def check(self, files: Iterable[tuple[str, int]]) -> None:
        """They are there, with so many bytes each.

        Raises:
            BadCheckpoint: one is not.
        """
        for name, size in files:
            try:
                there = os.stat(os.path.join(self._folder, name)).st_size
            except OSError as error:
                raise BadCheckpoint(f"{name} of {self._folder} cannot be read: {error.strerror}") from None
            if there != size:
                raise BadCheckpoint(
                    f"{name} of {self._folder} has {there} bytes, and was written with {size}: it is damaged"
                )

    def read(self, chunk: Chunk, dtype: torch.dtype, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a chunk (counted in its memory), flat.

        Args:
            key: of the tensor, for the error.

        Raises:
            BadCheckpoint: the bytes are not those that were written, or cannot be read.
        """
        size = dtype.itemsize
        whole = size * math.prod(chunk.sizes)
        first, last = start * size // BLOCK, -(-stop * size // BLOCK)
        begin, end = first * BLOCK, min(last * BLOCK, whole)
        held = torch.empty(max(end - begin, 0), dtype=torch.uint8)
        view = memoryview(held.numpy())
        at = 0
        while at < len(view):
            try:
                count = os.preadv(self._open(chunk.file), [view[at : at + _AT_ONCE]], chunk.at + begin + at)
            except OSError as error:
                raise self._damaged(chunk, key, f"it cannot be read ({error.strerror})") from None
            if not count:
                raise self._damaged(chunk, key, "it ends too early")
            at += count
        for block in range(first, last):
            data = view[(block - first) * BLOCK : (block - first + 1) * BLOCK]
            if block >= len(chunk.sums) or xxhash.xxh3_64_hexdigest(data) != chunk.sums[block]:
                raise self._damaged(chunk, key, "its checksum is not that of what was written")
        return held[start * size - begin : stop * size - begin].view(dtype)

    def _open(self, name: str) -> int:
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = os.open(os.path.join(self._folder, name), os.O_RDONLY)
        return handle

    def _damaged(self, chunk: Chunk, key: str, how: str) -> BadCheckpoint:
        return BadCheckpoint(f"{key} in {chunk.file} of {self._folder} is damaged: {how}")
