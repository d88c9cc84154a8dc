"""Taking the backends out of a ProcessGroup, so that those that were replaced can end.

A ProcessGroup keeps every backend that was ever registered in it, and a gloo backend holds 3 threads and 4
descriptors until it is destroyed: without this, each healing leaves them behind. torch has no call for it, but the
method that clears a group's tables, `ProcessGroup::release_resources`, is exported from its library. It is called only
on an object whose virtual table is that of `c10d::ProcessGroup`, and only after it was tried on a group of one;
`works` is False where any of this is not as it was with the torch that this was written for, and the old backends
then stay.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_VTABLE, _RELEASE = "_ZTVN4c10d12ProcessGroupE", "_ZN4c10d12ProcessGroup17release_resourcesEv"
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FIRST_MEMBERS = range(1, 6)  # words of a group among which its store is looked for; word 0 is the virtual table
_library: Any = None  # False when it was looked for and does not do


def works() -> bool:
    """Can backends be taken out of a group with this torch? Tried once."""
    global _library
    if _library is None:
        try:
            _library = _open()
            if not _self_test():
                _library = False
        except Exception:  # another torch, another platform: everything goes on without
            _library = False
    return _library is not False


def take_out(group: Any) -> bool:
    """Empty a group's tables of backends, keeping its store. False: it could not be done, and nothing is changed.

    The caller holds the backends meanwhile: none is destroyed here, see `bury`.
    """
    address = _address(group)
    if _library is False or _read(address) != _vtable():
        return False
    store = _address(group.get_group_store())
    place = next((address + i * _WORD for i in _FIRST_MEMBERS if _read(address + i * _WORD) == store), None)
    if place is None:
        return False
    # Emptied without the store, which is put back as it was: its count of references does not change.
    _write(place, 0)
    _release(address)
    _write(place, store)
    return True


def bury(backends: list[Any]) -> None:
    """Destroy backends that nothing but this list refers to, from a thread of its own. The list is emptied.

    Destroying one waits for its threads, and a thread of gloo may want Python's lock, so it must not be held then: the
    backends move into groups that nobody knows, and those are emptied by a call that has given the lock back.
    """
    graves = []
    while backends:
        grave = c10d.ProcessGroup(dist.HashStore(), 0, 1)
        grave._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backends.pop())
        graves.append(grave)

    def empty() -> None:
        for grave in graves:
            _release(_address(grave))

    threading.Thread(target=empty, daemon=True, name="nbdist-bury").start()


def _open() -> Any:
    suffix = ".dylib" if os.uname().sysname == "Darwin" else ".so"
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"libtorch_cpu{suffix}"))
    release = getattr(library, _RELEASE)
    release.argtypes, release.restype = [ctypes.c_void_p], None
    return library


def _release(address: int) -> None:
    getattr(_library, _RELEASE)(address)


def _vtable() -> int:
    # An object points behind the two words with which a virtual table begins.
    return ctypes.addressof(ctypes.c_char.in_dll(_library, _VTABLE)) + 2 * _WORD


def _address(wrapper: Any) -> int:
    """The C++ object of a pybind11 wrapper: the first word after what every Python object has."""
    return _read(id(wrapper) + object.__basicsize__)


def _read(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def _write(address: int, value: int) -> None:
    ctypes.c_void_p.from_address(address).value = value


def _self_test() -> bool:
    store = dist.HashStore()
    group = c10d.ProcessGroup(store, 0, 1)
    cpu = torch.device("cpu")

    def backend(key: str) -> Any:
        options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_default_device()]
        options.group_name, options.global_ranks_in_group = "self test", [0]
        return c10d.ProcessGroupGloo(dist.PrefixStore(key, store), 0, 1, options)

    held = [backend("a"), backend("b")]
    for position in (0, 1):
        if position and not take_out(group):
            return False
        group._register_backend(cpu, c10d.ProcessGroup.BackendType.GLOO, held[position])
        value = torch.ones(2)
        group.allreduce([value]).wait()
    group.get_group_store().set("key", "value")
    good = group._get_backend(cpu) is held[1] and store.get("key") == b"value" and value.tolist() == [1.0, 1.0]
    good = take_out(group) and good
    bury(held)
    return good
