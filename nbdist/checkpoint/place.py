"""The folder of a checkpoint: made beside its place and renamed, so that under its name there is a whole one or the one
before it.

    NAME                the checkpoint
    NAME.partial-ID     one that is being written; it counts when its manifest is there, which is written last
    NAME.old-ID         the one before, while the new one takes its name
    NAME.deleted-ID     one that is being deleted

Whatever was being done when a process was killed, `found` has the last whole one, and the next save cleans up.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from nbdist.checkpoint import manifest

_PARTIAL, _OLD, _DELETED = ".partial-", ".old-", ".deleted-"
_OWNER = ".saving"  # in a partial one: who writes it
_SILENCE = 3600  # seconds after which a partial one of another machine, in which nothing happens, is a leftover
AUTOMATIC = re.compile(r"checkpoint_(\d+)")

_writing: set[str] = set()  # the partial ones of this process


class NotACheckpoint(ValueError):
    """A folder that holds something else: it is never written over."""


def as_path(folder: str | os.PathLike[str]) -> str:
    """The folder's absolute path; what a link points to, and not the link."""
    return os.path.realpath(os.path.expanduser(os.fspath(folder)))


def found(path: str) -> str | None:
    """Where the checkpoint of this name is: there, or beside it when a save was killed at its last step; None: there is
    none.
    """
    if os.path.exists(path):
        return path if os.path.isfile(os.path.join(path, manifest.NAME)) else None
    for kind in (_PARTIAL, _OLD):
        for beside in _beside(path, kind):
            if manifest.is_checkpoint(beside):
                return beside
    return None


def begin(path: str, token: str) -> str:
    """The folder in which the checkpoint of this name is to be written; leftovers of killed saves are gone behind it.

    Args:
        token: of this save; no other one has it.

    Raises:
        NotACheckpoint: there is something else under this name. RuntimeError: another process writes it just now.
        OSError: it cannot be made.
    """
    _refuse_what_is_not_ours(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    recover(path)
    clean(path)
    partial = f"{path}{_PARTIAL}{token}"
    os.mkdir(partial)
    _writing.add(partial)
    try:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
        Path(partial, _OWNER).write_text(json.dumps(owner))
    except BaseException:
        discard(partial)
        raise
    return partial


def _refuse_what_is_not_ours(path: str) -> None:
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise NotACheckpoint(f"{path} is a file; a checkpoint is a folder. Nothing was written: give another name")
    there = sorted(os.listdir(path))
    if there and not _is_ours(path):
        told = ", ".join(there[:3]) + (" ..." if len(there) > 3 else "")
        raise NotACheckpoint(
            f"{path} is no checkpoint of nbdist: it has no {manifest.NAME}, and it is not empty ({told}). Nothing was "
            "written: give another name, or delete it"
        )


def _is_ours(path: str) -> bool:
    """Whether there is a manifest of ours, maybe a damaged one."""
    try:
        with open(os.path.join(path, manifest.NAME), "rb") as file:
            return manifest.FORMAT.encode() in file.read(4096)
    except OSError:
        return False


def recover(path: str) -> None:
    """Give the last whole checkpoint its name again, where a save was killed while they were exchanged."""
    if not os.path.lexists(path):
        beside = found(path)
        if beside is not None and beside not in _writing:
            _forget_owner(beside)
            os.rename(beside, path)
            sync(os.path.dirname(path))


def clean(path: str) -> None:
    """Delete what killed saves of this name have left.

    Raises:
        RuntimeError: another process writes it just now.
    """
    for partial in _beside(path, _PARTIAL):
        writer = None if partial in _writing else _alive(partial)
        if partial in _writing:
            raise RuntimeError(f"{path} is being written already: an earlier save_state(async_save=True) is not done")
        if writer is not None:
            raise RuntimeError(
                f"{path} is being written by {writer}. Nothing was written: give another name, or wait for it"
            )
        shutil.rmtree(partial, ignore_errors=True)
    for kind in (_OLD, _DELETED):
        for beside in _beside(path, kind):
            if kind == _DELETED or os.path.lexists(path):
                shutil.rmtree(beside, ignore_errors=True)


def _alive(partial: str) -> str | None:
    """The process that writes it, in words; None: nobody does any more."""
    try:
        owner = json.loads(Path(partial, _OWNER).read_text())
        host, pid, began = owner["host"], int(owner["pid"]), float(owner["began"])
    except (OSError, ValueError, KeyError, TypeError):
        host, pid, began = "", 0, 0.0
    if host == socket.gethostname():
        if pid == os.getpid():
            return None
        try:
            process = psutil.Process(pid)
            alive = process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return f"process {pid}" if alive else None
    times = [os.stat(partial).st_mtime, *(entry.stat().st_mtime for entry in os.scandir(partial))]
    if not host or time.time() - max(times) > _SILENCE:
        return None
    return f"process {pid} on {host}"


def commit(partial: str, path: str, held: manifest.Manifest) -> None:
    """The last step: all files are in `partial`. Its manifest is written, and it gets its name; what had the name
    before is deleted.

    Raises:
        OSError: it could not be done; under the name is what was there.
    """
    write(os.path.join(partial, manifest.NAME), manifest.dumped(held))
    _forget_owner(partial)
    sync(partial)
    old = f"{path}{_OLD}{held.id}"
    try:
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(partial, path)
    finally:
        _writing.discard(partial)
        recover(path)
    sync(os.path.dirname(path))
    shutil.rmtree(old, ignore_errors=True)


def discard(partial: str) -> None:
    """It failed: delete what there is of it."""
    _writing.discard(partial)
    shutil.rmtree(partial, ignore_errors=True)


def delete(path: str, token: str) -> None:
    """Delete a checkpoint: at no time there is half of it under its name."""
    gone = f"{path}{_DELETED}{token}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean_all(folder: str) -> None:
    """`recover` and `clean` for all automatically named checkpoints in a folder, but for those that another process
    writes.
    """
    names = {match[0] for entry in _listed(folder) if (match := AUTOMATIC.match(entry)) and match[0] != entry}
    for name in sorted(names):
        path = os.path.join(folder, name)
        if not any(partial in _writing or _alive(partial) for partial in _beside(path, _PARTIAL)):
            recover(path)
            clean(path)


def numbered(folder: str) -> dict[int, str]:
    """The automatically named checkpoints in a folder, by number, lowest first: where each of them is."""
    names = set()
    for entry in os.listdir(folder) if os.path.isdir(folder) else ():
        match = AUTOMATIC.match(entry)
        rest = entry[match.end() :] if match else "?"
        if match and (not rest or rest.startswith((_PARTIAL, _OLD))):
            names.add((int(match[1]), match[0]))
    places = {number: found(os.path.join(folder, name)) for number, name in sorted(names)}
    return {number: place for number, place in places.items() if place is not None}


def taken(folder: str) -> int:
    """The lowest number that no automatically named folder has, nor a higher one."""
    numbers = [int(match[1]) for entry in _listed(folder) if (match := AUTOMATIC.fullmatch(entry))]
    return max([*numbers, *numbered(folder)], default=-1) + 1


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def write(path: str, data: bytes) -> None:
    """A new small file, on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(folder: str) -> None:
    """Bring a folder's entries to the disk, where that can be done."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def _forget_owner(folder: str) -> None:
    try:
        os.unlink(os.path.join(folder, _OWNER))
    except FileNotFoundError:
        pass


def _beside(path: str, kind: str) -> list[str]:
    folder, name = os.path.split(path)
    return [os.path.join(folder, entry) for entry in sorted(_listed(folder)) if entry.startswith(name + kind)]


def others(folder: str, known: set[str]) -> dict[str, dict[str, Any]]:
    """The files in a checkpoint's folder that the user's hooks have put there."""
    there = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            relative = os.path.relpath(path, folder)
            if relative not in known and relative != _OWNER:
                there[relative] = {"bytes": os.stat(path).st_size}
    return there
