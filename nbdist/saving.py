"""One object in one file: written beside its place and renamed, so that a file is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from nbdist import checks, state


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save on the main process; the others return at once.

    Args:
        obj: anything that torch.save takes; with `safe_serialization` a dict of tensors.
        f: a path, or a file that is open for writing bytes.
        save_on_each_node: on each machine's first process.
        safe_serialization: as safetensors. Tensors that share memory are written each by itself.

    Raises:
        ImportError: safetensors is asked for and not there. OSError: it cannot be written; what was there stays.
    """
    if not isinstance(f, str | os.PathLike) and not callable(getattr(f, "write", None)):
        raise checks.wrong("save: f", f, "a path, or a file that is open for writing bytes")
    safe_serialization = checks.flag(safe_serialization, "save: safe_serialization")
    me = state.current()
    if (me.local_rank if save_on_each_node else me.rank) != 0:
        return
    if safe_serialization:
        data = _as_safetensors(obj)
        _write(f, lambda file: file.write(data))
    else:
        _write(f, lambda file: torch.save(obj, file))


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """What `save` has written (either kind).

    Args:
        f: a path, or a file that is open for reading bytes.
        map_location: the device that tensors come to. Default: that they were saved from, with safetensors the CPU.
        **kwargs: as torch.load has them; only tensors and plain objects are loaded unless weights_only=False.
    """
    if not isinstance(f, str | os.PathLike) and not callable(getattr(f, "read", None)):
        raise checks.wrong("load: f", f, "a path, or a file that is open for reading bytes")
    if isinstance(f, str | os.PathLike) and os.fspath(f).endswith(".safetensors"):
        return _safetensors().load_file(os.fspath(f), device="cpu" if map_location is None else str(map_location))
    return torch.load(f, map_location=map_location, **kwargs)


def _write(f: Any, write: Callable[[BinaryIO], Any]) -> None:
    if not isinstance(f, str | os.PathLike):
        write(f)
        return
    path = os.path.realpath(f)  # what a link points to is replaced, not the link
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    except OSError as error:  # it speaks of a file that the user has never named
        raise type(error)(error.errno, error.strerror, os.fspath(f)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, _mode(path))
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _mode(path: str) -> int:
    """The permissions of the file that is replaced, or those of a new one."""
    try:
        return os.stat(path).st_mode & 0o7777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("safe_serialization needs the package safetensors: pip install safetensors") from None
    return safetensors.torch


def _as_safetensors(tensors: Any) -> bytes:
    checks.kind(tensors, Mapping, "save: obj", "a dict of tensors where safe_serialization=True")
    wrong = [str(key) for key, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise TypeError(f"safetensors hold tensors only; these are none: {', '.join(wrong[:5])}")
    seen: set[int] = set()
    whole = {}
    for key, tensor in tensors.items():
        whole[key] = tensor.detach().contiguous()
        if whole[key].untyped_storage().data_ptr() in seen:
            whole[key] = whole[key].clone()
        seen.add(whole[key].untyped_storage().data_ptr())
    return _safetensors().save(whole, metadata={"format": "pt"})
