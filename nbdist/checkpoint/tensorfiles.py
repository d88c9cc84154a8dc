"""Files of tensors in the safetensors format, written and read tensor by tensor.

A file is 8 bytes (the length of what follows), a JSON header that says of each tensor its dtype, shape and place, and
the tensors' bytes. So nothing has to be whole in memory, nothing runs when one is read, and the bytes go from a tensor
to the file without a copy and without Python's lock. Written here because safetensors' own functions take all tensors
of a file at once.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nbdist import checks
from nbdist.ends import name_of

_HEADER_LIMIT = 100_000_000  # bytes; what safetensors itself takes
_CHUNK = 1 << 24  # bytes a write: what one takes is what a signal waits for

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U8": "uint8",
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "C64": "complex64",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
    }.items()
    if hasattr(torch, torch_name)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BrokenFile(ValueError):
    """A file that is no safetensors file, or no whole one."""


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def obstacle(tensor: Any) -> str | None:
    """Why the format cannot hold this value; None when it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"it is {checks.short(tensor)} and no tensor"
    if tensor.is_meta:
        return "it is on the device meta and has no values"
    if tensor.is_quantized or tensor.layout is not torch.strided:
        return f"it is {'quantized' if tensor.is_quantized else name_of_layout(tensor)}"
    if tensor.dtype not in NAMES:
        return f"the format has no dtype {name_of(tensor.dtype)}"
    return None


def name_of_layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def in_order(specs: Mapping[str, Spec]) -> list[str]:
    """The names in the order of their bytes: large elements first, so that each tensor begins where its dtype may."""
    return sorted(specs, key=lambda name: -specs[name].dtype.itemsize)


def header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a file of these tensors, in the order of `in_order`, begins with."""
    told: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in in_order(specs):
        spec = specs[name]
        told[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Writer:
    """A file that tensors are put into one by one, in the order of `in_order`. Nothing is renamed or synced here.

    Args:
        file: a descriptor that is open for writing, at its start. It stays open.
        specs: what will be put, by name.
        metadata: texts by name.
        seen: called with each piece of bytes as it is written, for a checksum.
    """

    def __init__(
        self, file: int, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None, seen: Any = None
    ) -> None:
        self.file, self.specs, self.seen = file, specs, seen
        self.order = in_order(specs)
        self.written = 0
        self._at = 0
        self._bytes(header(specs, metadata))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor.

        Raises:
            ValueError: another one is due, or it is not as was said. OSError: it cannot be written.
        """
        due = self.order[self._at] if self._at < len(self.order) else None
        if due != name or Spec.of(tensor) != self.specs[name]:
            raise ValueError(f"{name} {Spec.of(tensor)} is put where {due} {self.specs.get(due or '')} is due")
        self._at += 1
        self._bytes(data_of(tensor))

    def _bytes(self, data: Any) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            if self.seen is not None:
                self.seen(piece)
            while len(piece):
                count = os.write(self.file, piece)  # without Python's lock
                self.written += count
                piece = piece[count:]


def write(
    file: int,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    seen: Any = None,
) -> int:
    """All tensors of a file, which are there already; returns the bytes written."""
    writer = Writer(file, {name: Spec.of(tensor) for name, tensor in tensors.items()}, metadata, seen)
    for name in writer.order:
        writer.put(name, tensors[name])
    return writer.written


def data_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's values as bytes, row by row: its own memory where that is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # of one element any stride counts as contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return memoryview(flat.view(torch.uint8).numpy()).cast("B") if flat.numel() else memoryview(b"")


class Reader(Mapping[str, torch.Tensor]):
    """The tensors of a file by name, each a private mapping of its bytes: read when it is used, a change stays in
    memory.

    Args:
        path: the file.

    Attributes:
        specs: dtype and shape by name, in the order of the bytes.
        metadata: texts by name.

    Raises:
        OSError: it cannot be read. BrokenFile: it is no whole safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        size = os.path.getsize(self.path)
        with open(self.path, "rb") as file:
            self.specs, self._places, self.metadata = _parsed(file.read(8), file, size, self.path)
        self._start = size - (max((end for _, end in self._places.values()), default=0))
        self._storage: torch.Tensor | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, (start, end) = self.specs[name], self._places[name]
        if start == end:
            return torch.empty(spec.shape, dtype=spec.dtype)
        if self._storage is None:
            with open(self.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._storage = torch.frombuffer(mapped, dtype=torch.uint8)
        piece = self._storage[self._start + start : self._start + end]
        return piece.view(spec.dtype).view(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


Places = dict[str, tuple[int, int]]


def _parsed(first: bytes, file: Any, size: int, path: str) -> tuple[dict[str, Spec], Places, dict[str, str]]:
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(_HEADER_LIMIT, size - 8):
        raise BrokenFile(f"{path} is no safetensors file, or not a whole one: it has {size} bytes")
    try:
        told = json.loads(file.read(length), object_pairs_hook=_once)
        metadata = told.pop("__metadata__", {})
        entries = {name: _entry(entry) for name, entry in told.items()}
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that are no texts")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenFile(f"{path} is no safetensors file: its header cannot be read ({error})") from None
    entries = dict(sorted(entries.items(), key=lambda item: item[1][1]))
    at = 0
    for name, (spec, (start, end)) in entries.items():
        if start != at or end - start != spec.nbytes:
            raise BrokenFile(f"{path} is broken: {name} is said to be in bytes {start} to {end}, and does not fit")
        at = end
    if size != 8 + length + at:
        raise BrokenFile(f"{path} is not whole: it has {size} bytes, and {8 + length + at} belong to it")
    specs = {name: spec for name, (spec, _) in entries.items()}
    return specs, {name: place for name, (_, place) in entries.items()}, metadata


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _entry(entry: Any) -> tuple[Spec, tuple[int, int]]:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"sizes {shape}, offsets {start} and {end}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {entry['dtype']!r} is not known")
    return Spec(DTYPES[entry["dtype"]], tuple(shape)), (start, end)
