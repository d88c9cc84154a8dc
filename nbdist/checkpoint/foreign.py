"""Folders that torch.distributed.checkpoint has written, such as those of Accelerate's FSDP, read without running
anything of theirs.

What is in one is told by `.metadata`, a pickle. torch unpickles it freely; here it only fills records without
behaviour: no class or function that it names is imported, but for torch's dtypes. Tensors are read by torch.load with
weights_only.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

METADATA = ".metadata"


class NotReadable(ValueError):
    """A folder of torch.distributed.checkpoint that is damaged, or holds what is not read here."""


class _Record:
    """What an object of theirs was made of. Nothing of its class is here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None) if name.isidentifier() else None
            if isinstance(found, torch.dtype):
                return found
            if name == "Size":
                return tuple
        elif module.startswith("torch.") or (module.partition(".")[0] == "pathlib" and name.endswith("Path")):
            return _Record
        elif (module, name) == ("collections", "OrderedDict"):
            return dict
        elif module == "builtins" and name in ("set", "frozenset", "list", "dict", "tuple", "bytearray"):
            return {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple,
                    "bytearray": bytearray}[name]  # fmt: skip
        raise NotReadable(f"its {METADATA} names {module}.{name}, which has no place there")


class Foreign(Mapping[str, Any]):
    """The tensors of such a folder by name, each read when it is asked for, whole.

    Args:
        folder: it has a file `.metadata`.

    Attributes:
        shapes, dtypes: of the tensors, by name.
        others: names of what is no tensor.

    Raises:
        NotReadable: it is damaged, or of a kind that is not read here.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            with open(os.path.join(folder, METADATA), "rb") as file:
                told = _Unpickler(file).load()
            self._fill(told)
        except NotReadable as error:
            raise NotReadable(f"{folder} is not read: {error}") from None
        except OSError as error:
            raise NotReadable(f"{folder} cannot be read: {error}") from None
        except Exception as error:
            raise NotReadable(f"{folder} is damaged: its {METADATA} cannot be read ({error!r:.200})") from None

    def _fill(self, told: Any) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.others: list[str] = []
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._places: dict[tuple[str, Any], tuple[str, int, int]] = {}
        names = _names(dict(told.state_dict_metadata), getattr(told, "planner_data", None) or {})
        for key, one in told.state_dict_metadata.items():
            if not hasattr(one, "chunks"):
                self.others.append(names[key])
                continue
            self.shapes[names[key]] = _sizes(one.size)
            self.dtypes[names[key]] = next(iter(one.properties.state))  # the first of what is pickled
            if not isinstance(self.dtypes[names[key]], torch.dtype):
                raise NotReadable(f"{key} has no dtype")
            self._chunks[names[key]] = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in one.chunks]
        for index, info in told.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise NotReadable(f"{index.fqn} is stored as {info.transform_descriptors}, which is not read here")
            offset = getattr(index, "offset", None)
            offset = None if offset is None else _sizes(offset)
            path = info.relative_path
            if not isinstance(path, str) or os.path.isabs(path) or ".." in path.split("/"):
                raise NotReadable(f"{index.fqn} is said to be in {path!r}, outside of the folder")
            self._places[names[index.fqn], offset] = path, int(info.offset), int(info.length)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.shapes[name], self.dtypes[name]
        filled = sum(math.prod(sizes) for _, sizes in self._chunks[name])
        if filled != math.prod(shape):
            raise NotReadable(f"{self.folder} has {filled} of {math.prod(shape)} elements of {name}: it is damaged")
        places = {offsets: self._place(name, offsets, dtype, sizes) for offsets, sizes in self._chunks[name]}
        whole = torch.empty(shape, dtype=dtype)
        for offsets, sizes in self._chunks[name]:
            piece = self._piece(name, *places[offsets])
            if tuple(piece.shape) != sizes or piece.dtype != dtype:
                raise NotReadable(f"{self.folder} is damaged: a part of {name} is {piece.dtype} {tuple(piece.shape)}")
            into = whole
            for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
                if at + size > shape[dim]:
                    raise NotReadable(f"{self.folder} is damaged: a part of {name} is outside of it")
                into = into.narrow(dim, at, size)
            into.copy_(piece)
        return whole

    def _place(
        self, name: str, offsets: tuple[int, ...], dtype: torch.dtype, sizes: tuple[int, ...]
    ) -> tuple[str, int, int]:
        """File, first byte and bytes of a part, when they are there."""
        place = self._places.get((name, offsets)) or self._places.get((name, None))
        if place is None:
            raise NotReadable(f"{self.folder} is damaged: nothing says where {name} is")
        path, start, length = place
        try:
            there = os.stat(os.path.join(self.folder, path)).st_size
        except OSError as error:
            raise NotReadable(f"{path} of {self.folder} cannot be read: {error.strerror}") from None
        if not (0 <= start <= start + length <= there and math.prod(sizes) * dtype.itemsize <= length):
            raise NotReadable(f"{path} of {self.folder} has {there} bytes, and {name} is not in it: it is not whole")
        return place

    def _piece(self, name: str, path: str, start: int, length: int) -> torch.Tensor:
        try:
            with open(os.path.join(self.folder, path), "rb") as file:
                file.seek(start)
                data = file.read(length)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise NotReadable(f"{name} in {path} of {self.folder} cannot be read: {error!r:.200}") from None
        if not isinstance(found, torch.Tensor):
            raise NotReadable(f"{self.folder} is damaged: {name} is no tensor in {path}")
        return found


def _sizes(value: Any) -> tuple[int, ...]:
    numbers = tuple(value)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NotReadable(f"{numbers} are no sizes")
    return numbers


def _names(keys: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, str]:
    """For each key its name; without the first part where that is the same for all, as in {"model": {...}}."""
    parts = {key: tuple(map(str, paths.get(key) or (key,))) for key in keys}
    if parts and len({path[0] for path in parts.values()}) == 1 and all(len(path) > 1 for path in parts.values()):
        parts = {key: path[1:] for key, path in parts.items()}
    return {key: ".".join(path) for key, path in parts.items()}
