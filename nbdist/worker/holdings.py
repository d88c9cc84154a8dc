"""What a rank holds: the biggest names of its namespace with their bytes, told by the control thread while the main
thread may be at work. No code of the user's runs for it, and it looks for a moment only.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Collection, Iterator
from typing import Any

MOST = 4  # names that are told
LOOK = 0.1  # seconds for all of them
SMALL = 64 << 10  # bytes below which a name is not worth telling
_DEPTH = 4
_ITEMS = 1000  # of a container

_Piece = tuple[Any, int]  # what the bytes are known by (memory that two names share counts once), and how many
_PLAIN = (str, bytes, bytearray, int, float, complex)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NOTHING = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, types.CodeType)


def holdings(namespace: dict[str, Any], hide: Collection[str] = ()) -> dict[str, Any]:
    """{"names": [(name, type, bytes)], biggest first, "total": bytes of all, "complete": all of it was seen}."""
    end = time.monotonic() + LOOK
    told, seen, complete = [], {}, True
    for name, value in list(namespace.items()):  # a copy made in one step, whatever the main thread does
        if name.startswith("__") or name in hide or isinstance(value, _NOTHING):
            continue
        pieces: dict[Any, int] = {}
        try:
            for key, size in _pieces(value, _DEPTH, set()):
                pieces[key] = size
                if time.monotonic() > end:
                    complete = False
                    break
        except Exception:  # changed under our eyes, or a value that cannot be asked
            complete = False
        seen.update(pieces)
        told.append((name, type(value).__name__, sum(pieces.values())))
        if time.monotonic() > end:
            complete = False
            break
    told = sorted((entry for entry in told if entry[2] >= SMALL), key=lambda entry: -entry[2])
    return {"names": told[:MOST], "more": max(0, len(told) - MOST), "total": sum(seen.values()), "complete": complete}


def _pieces(value: Any, depth: int, above: set[int]) -> Iterator[_Piece]:
    if value is None or isinstance(value, _NOTHING) or id(value) in above:
        return
    torch, numpy, pandas = (sys.modules.get(name) for name in ("torch", "numpy", "pandas"))
    if torch is not None and isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        yield value.__array_interface__["data"][0], value.nbytes
    elif pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series):
        usage = value.memory_usage(index=True)
        yield id(value), int(usage if isinstance(value, pandas.Series) else usage.sum())
    elif isinstance(value, _PLAIN):
        yield id(value), sys.getsizeof(value)
    elif depth:
        above = above | {id(value)}
        yield id(value), sys.getsizeof(value) if type(value) in _CONTAINERS else 0
        for part in _parts(value):
            yield from _pieces(part, depth - 1, above)


def _parts(value: Any) -> Iterator[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for module in _modules(value, set()):
            for table in ("_parameters", "_buffers"):
                yield from list(module.__dict__.get(table, {}).values())
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        for state in list(value.state.values()):
            yield from list(state.values()) if isinstance(state, dict) else [state]
    elif isinstance(value, dict):
        yield from list(dict.values(value))[:_ITEMS]
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)[:_ITEMS]
    else:
        attributes = getattr(type(value), "__dict__", {}).get("__dict__")
        if attributes is not None:  # instances have a dict of their own; properties are not asked
            yield from list(object.__getattribute__(value, "__dict__").values())[:_ITEMS]


def _modules(module: Any, seen: set[int]) -> Iterator[Any]:
    """Not `module.modules()`: a class may define its own."""
    if module is None or id(module) in seen:
        return
    seen.add(id(module))
    yield module
    for child in list(module.__dict__.get("_modules", {}).values()):
        yield from _modules(child, seen)


def _tensor(tensor: Any) -> Iterator[_Piece]:
    if tensor.device.type == "meta":
        return
    try:
        storage = tensor.untyped_storage()
        yield storage.data_ptr() or id(tensor), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, wrappers
        yield id(tensor), tensor.element_size() * tensor.numel()
    if tensor.is_leaf and tensor.grad is not None:
        yield from _tensor(tensor.grad)


def device_memory(device: Any) -> dict[str, Any] | None:
    """Bytes that this process has on its device, by torch's allocator; None on the CPU. Starts nothing."""
    torch = sys.modules.get("torch")
    if torch is None or device.type == "cpu":
        return None
    if device.type == "cuda" and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "uuid": f"GPU-{getattr(properties, 'uuid', '')}",
            "total": properties.total_memory,
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    if device.type == "mps" and torch.backends.mps.is_available():
        return {
            "name": "MPS",
            "uuid": "",
            "total": torch.mps.recommended_max_memory(),
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }
    return None
