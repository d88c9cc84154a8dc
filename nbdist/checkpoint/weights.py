"""A folder with the weights of a model, for any library: one file, or several and an index, by the names that
transformers and Accelerate look for.

    model.safetensors                       or    pytorch_model.bin
    model-00001-of-00002.safetensors  ...   or    pytorch_model-00001-of-00002.bin  ...
    model.safetensors.index.json            or    pytorch_model.bin.index.json

All files are written beside their names. Only when the last one is on the disk they get them, the index last; then what
an earlier save of another size has left is removed. Anything else in the folder stays. Killed at any moment, there is
the old save or the new one; or, of several files while they are renamed, no index: never files of both.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from nbdist import checks, state
from nbdist.checkpoint import tensorfiles
from nbdist.checkpoint.tensorfiles import Spec

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)-(?P<pid>\d+)\.saving")


def bytes_of(size: Any, where: str) -> int:
    """A size in bytes: a whole number, or a number with a unit ("500MB", "1.5 GiB").

    Args:
        where: the argument, for the error.

    Raises:
        TypeError: it is neither. ValueError: it is no such text, or less than one byte.
    """
    wants = 'a size of at least one byte: a whole number of bytes, or a text such as "10GB", "500MB" or "2GiB"'
    if not isinstance(size, str):
        return checks.whole(size, where, wants, 1)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    unit = _UNITS.get(match[2].upper()) if match else None
    count = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if count < 1:
        raise ValueError(f"{where} is {checks.short(size)}; it takes {wants}")
    return count


@dataclass(frozen=True)
class Kind:
    """How files are named."""

    safe: bool
    stem: str
    ending: str

    @property
    def single(self) -> str:
        return f"{self.stem}{self.ending}"

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def numbered(self, number: int, count: int) -> str:
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.ending}"

    def is_ours(self, name: str) -> bool:
        """Whether a save of this kind writes a file of this name."""
        pattern = rf"{re.escape(self.stem)}-\d{{5}}-of-\d{{5}}{re.escape(self.ending)}"
        return name in (self.single, self.index) or re.fullmatch(pattern, name) is not None


SAFE = Kind(True, "model", ".safetensors")
PICKLED = Kind(False, "pytorch_model", ".bin")


@dataclass
class Plan:
    """What goes into which file.

    Attributes:
        files: by name of a file the tensors in it.
        ties: for each name that is another one's tensor, that one.
        total: bytes of all tensors.
    """

    kind: Kind
    files: dict[str, dict[str, Spec]]
    ties: dict[str, str]
    total: int

    def tied_to(self, name: str) -> list[str]:
        return [other for other, kept in self.ties.items() if kept == name]

    def index(self) -> bytes | None:
        """The text of the index; None: there is one file, and none is needed."""
        if len(self.files) == 1:
            return None
        places = {name: file for file, specs in self.files.items() for name in specs}
        if not self.kind.safe:
            places |= {name: places[kept] for name, kept in self.ties.items()}
        told = {"metadata": {"total_size": self.total}, "weight_map": places}
        return (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def plan(specs: Mapping[str, Spec], ties: Mapping[str, str], limit: int, kind: Kind = SAFE) -> Plan:
    """Fill file after file in the order of the names.

    Args:
        specs: the tensors, without those that are another one.
        ties: those, and which one.
        limit: bytes of tensors in a file; a bigger tensor has one for itself.
    """
    groups: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.nbytes
    names = [kind.numbered(number, len(groups)) for number in range(1, len(groups) + 1)]
    files = dict(zip(names if len(groups) > 1 else [kind.single], groups, strict=True))
    return Plan(kind, files, dict(ties), sum(spec.nbytes for spec in specs.values()))


class Folder:
    """The files of a plan, written one by one. Use it as a context: what failed leaves nothing behind.

    Args:
        path: the folder; it is made.

    Raises:
        NotADirectoryError: there is a file. OSError: it cannot be made, or has no room.
    """

    def __init__(self, path: str, plan: Plan) -> None:
        self.path, self.plan = path, plan
        refuse_a_file(path)
        os.makedirs(path, exist_ok=True)
        self._token = f"{socket.gethostname().replace('.', '_').replace('/', '_')}-{os.getpid()}"
        self._beside: dict[str, str] = {}
        _remove_leftovers(path)
        room = os.statvfs(path)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < plan.total:
            raise self._named(
                OSError(errno.ENOSPC, f"no room: the weights have {plan.total:,} bytes, and {free:,} are free")
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for beside in self._beside.values():
            try:
                os.unlink(beside)
            except OSError:
                pass
        if isinstance(error, OSError):
            raise self._named(error) from error

    def file(self, name: str) -> File:
        """The next file, open for writing."""
        self._beside[name] = os.path.join(self.path, f".{name}.{self._token}.saving")
        return File(self._beside[name], self.plan, name)

    def commit(self) -> list[str]:
        """All files are written: give them their names, and remove what is left of an earlier save.

        Returns:
            Files of the other kind that are there: what loads the folder may take them instead.
        """
        index = self.plan.index()
        if index is not None:
            name = self.plan.kind.index
            self._beside[name] = os.path.join(self.path, f".{name}.{self._token}.saving")
            _write(self._beside[name], index)
            if os.path.lexists(os.path.join(self.path, name)):
                os.unlink(os.path.join(self.path, name))  # it would name files of both saves
        for name in list(self._beside):
            os.replace(self._beside[name], os.path.join(self.path, name))
            del self._beside[name]
        sync(self.path)
        kind, there = self.plan.kind, sorted(os.listdir(self.path))
        kept = {*self.plan.files, *((kind.index,) if index is not None else ())}
        # The index first: without it nobody looks for the others.
        for name in sorted(there, key=lambda name: name != kind.index):
            if kind.is_ours(name) and name not in kept and os.path.isfile(os.path.join(self.path, name)):
                os.unlink(os.path.join(self.path, name))
        other = PICKLED if kind.safe else SAFE
        return [name for name in there if other.is_ours(name)]

    def _named(self, error: OSError) -> OSError:
        """The error with the user's folder, and what that means."""
        told = f"{error.strerror or error}. What was there is as it was"
        return type(error)(error.errno or errno.EIO, told, self.path)


class File:
    """One of them. Tensors are put in the order of `order`."""

    def __init__(self, path: str, plan: Plan, name: str) -> None:
        self._plan, self._specs = plan, plan.files[name]
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._held: dict[str, Any] = {}
        self._writer: tensorfiles.Writer | None = None
        if plan.kind.safe:
            ties = {other: kept for other, kept in plan.ties.items() if kept in self._specs}
            self._writer = tensorfiles.Writer(self._file, self._specs, {**ties, "format": "pt"})

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                if self._writer is None:
                    self._pickle()
                os.fsync(self._file)
        finally:
            self.close()

    def close(self) -> None:
        self._held.clear()
        os.close(self._file)

    def _pickle(self) -> None:
        with os.fdopen(os.dup(self._file), "wb") as file:
            try:
                torch.save(self._held, file)
            except RuntimeError as error:  # torch's own, about the file that it could not complete
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if self._writer is not None:
            self._writer.put(name, tensor)
            return
        value = tensor.detach().cpu()
        strided = value.layout is torch.strided
        if strided and value.untyped_storage().nbytes() > value.numel() * value.element_size():
            value = value.clone()  # torch.save writes the whole storage of a view
        for one in (name, *self._plan.tied_to(name)):
            self._held[one] = value

    def put_other(self, values: Mapping[str, Any]) -> None:
        """What is no tensor; only a pickled file takes it."""
        self._held.update(values)


def order(specs: Mapping[str, Spec], kind: Kind) -> list[str]:
    """In which order the tensors of a file are put."""
    return tensorfiles.in_order(specs) if kind.safe else list(specs)


def refuse_a_file(path: str) -> None:
    """Raises NotADirectoryError where something else than a folder is."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, and weights are saved in a folder", path)


def write(folder: Folder, tensor_of: Callable[[str], torch.Tensor], others: Mapping[str, Any] | None = None) -> None:
    """All files of the plan, from tensors that are asked for one by one. The last file gets what is no tensor."""
    for at, (name, specs) in enumerate(folder.plan.files.items(), 1):
        with folder.file(name) as file:
            for one in order(specs, folder.plan.kind):
                file.put(one, tensor_of(one))
            if others and at == len(folder.plan.files):
                file.put_other(others)


def note_other(other: list[str], path: str, kind: Kind) -> None:
    """Say that files of the other kind are there, where they are what is loaded first."""
    if other and not kind.safe:
        state.note_once(
            f"{path} also has {other[0]} of another save, and most libraries load that in place of {kind.single}: "
            "remove it if it is not wanted"
        )


def sync(folder: str) -> None:
    """Bring a folder's entries to the disk, where that can be done."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(folder: str) -> None:
    """Delete what saves of this machine that were killed have left in it."""
    host = socket.gethostname().replace(".", "_").replace("/", "_")
    for name in os.listdir(folder):
        match = _BESIDE.fullmatch(name)
        if match is None or match["host"] != host or psutil.pid_exists(int(match["pid"])):
            continue
        if SAFE.is_ours(match["name"]) or PICKLED.is_ours(match["name"]):
            os.unlink(os.path.join(folder, name))
