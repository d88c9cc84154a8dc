"""What a checkpoint consists of, in one file: `manifest.json`. It is written last: where there is none, there is no
checkpoint.

    {"checksum": "...", "manifest": {
        "format": "nbdist checkpoint", "version": 1, "id": "...", "nbdist": "...", "torch": "...", "created": "...",
        "world_size": 2, "strategy": "ddp",
        "contents": {"models": {"model": {"class": "Net", "keys": {"0.weight": "model/model/0.weight"}, ...}}, ...},
        "ranks": [{"rng": ...}, {"rng": ...}],
        "tensors": {"model/model/0.weight": {"dtype": "float32", "shape": [5, 3], "chunks": [
            {"offsets": [0, 0], "sizes": [5, 3], "file": "rank-00000.safetensors", "at": 1234, "sums": ["..."]}]}},
        "files": {"rank-00000.safetensors": {"bytes": 2345}},
        "other": {"notes.txt": {"bytes": 12}}}}

Values that are no tensors are trees of `nbdist.checkpoint.tree`. A tensor that is another one (a tied weight) is only
named once.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

FORMAT, VERSION = "nbdist checkpoint", 1
NAME = "manifest.json"


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be loaded as it is: damaged, incomplete, or of a format that is not known here."""


@dataclass
class Chunk:
    """A part of a tensor, and where its bytes are.

    Attributes:
        offsets, sizes: which part, in each dimension.
        file: in the checkpoint's folder.
        at: the first byte in it.
        sums: checksums of its bytes, in blocks of `tensors.BLOCK`.
    """

    offsets: list[int]
    sizes: list[int]
    file: str
    at: int
    sums: list[str]


@dataclass
class Tensor:
    """A tensor as a whole: its dtype by name ("float32"), its shape, and the chunks that it consists of."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


@dataclass
class Manifest:
    """See the top of this module. `contents` by kind and name; `ranks`: what is each rank's own, None
    of those that have saved on another disk."""

    id: str
    world_size: int
    strategy: str
    contents: dict[str, Any]
    ranks: list[Any]
    tensors: dict[str, Tensor]
    files: dict[str, dict[str, Any]]
    other: dict[str, dict[str, Any]] = field(default_factory=dict)
    nbdist: str = ""
    torch: str = ""
    created: str = ""


def dumped(manifest: Manifest) -> bytes:
    """The file's bytes."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({"checksum": _sum(body), "manifest": body}, separators=(",", ":")).encode()


def parsed(data: bytes, where: str) -> Manifest:
    """The manifest of these bytes.

    Args:
        where: the file, for the error.

    Raises:
        BadCheckpoint: it is damaged, or no manifest, or of another version.
    """
    try:
        whole = json.loads(data)
        body = whole["manifest"]
        known, version = body["format"], body["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadCheckpoint(f"{where} is damaged, or no manifest of nbdist: it cannot be read") from None
    if known != FORMAT:
        raise BadCheckpoint(f"{where} is the manifest of {known!r}, not of {FORMAT!r}")
    if not isinstance(version, int) or version > VERSION:
        raise BadCheckpoint(
            f"{where} has version {version!r} of the format, and this nbdist knows {VERSION}: load it with a newer one"
        )
    try:
        if whole["checksum"] != _sum(body):
            raise BadCheckpoint(f"{where} is damaged: its checksum is not that of its content")
        tensors = {key: _tensor(one) for key, one in body["tensors"].items()}
        given = {one.name: body[one.name] for one in fields(Manifest)}
        held = Manifest(**{**given, "tensors": tensors})
        for key, tensor in tensors.items():
            _check(key, tensor, held.files)
        return held
    except BadCheckpoint:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BadCheckpoint(f"{where} is damaged: {error!r}") from None


def read(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        BadCheckpoint: there is none, or it is damaged.
    """
    path = Path(folder, NAME)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{os.fspath(folder)} is no checkpoint: {NAME} cannot be read ({error.strerror})") from None
    return parsed(data, str(path))


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a whole checkpoint in it."""
    try:
        read(folder)
    except BadCheckpoint:
        return False
    return True


def _tensor(one: dict[str, Any]) -> Tensor:
    return Tensor(one["dtype"], one["shape"], [Chunk(**chunk) for chunk in one["chunks"]])


def _check(key: str, tensor: Tensor, files: dict[str, dict[str, Any]]) -> None:
    """What it says can be: parts inside of the tensor, in files of this folder. Raises ValueError."""
    for chunk in tensor.chunks:
        numbers = (*tensor.shape, *chunk.offsets, *chunk.sizes, chunk.at)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{key} has sizes {numbers}")
        if not len(tensor.shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        ):
            raise ValueError(f"{key} of shape {tensor.shape} has a part {chunk.sizes} at {chunk.offsets}")
        if os.path.basename(chunk.file) != chunk.file or chunk.at + math.prod(chunk.sizes) > files[chunk.file]["bytes"]:
            raise ValueError(f"{key} is said to be in {chunk.file!r} at {chunk.at}")


def _sum(body: dict[str, Any]) -> str:
    # JSON's own way with floats and texts is exact, so what was read is dumped to the same bytes.
    return xxhash.xxh3_128_hexdigest(json.dumps(body, separators=(",", ":")).encode())
