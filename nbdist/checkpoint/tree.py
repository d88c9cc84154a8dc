"""Plain Python values as JSON, with the tensors in them put aside, and back. Nothing is pickled.

What a value is comes back: tuples, sets, keys that are no text, infinities, arrays and their scalars. A type that is
not known here is refused by name, where it is saved.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy
import torch

_MARK = "$"  # the key that says what a JSON object stands for
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str, bool, tuple)}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}

KNOWN = "None, bools, numbers, texts, bytes, tensors, numpy arrays, and lists, tuples, sets, deques and dicts of these"


class Unsaveable(TypeError):
    """A value that no checkpoint can hold."""


def encode(value: Any, put: Callable[[torch.Tensor, str], str], path: str = "") -> Any:
    """The value as JSON.

    Args:
        put: takes a tensor and where it is in the value ("state/0/exp_avg"); returns the key under which it is kept.
        path: where the value is, for `put` and for the error.

    Raises:
        Unsaveable: there is something in it that is none of `KNOWN`; says what, and where.
    """
    return _encode(value, put, path, ())


def _encode(value: Any, put: Callable[[torch.Tensor, str], str], path: str, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_MARK: "float", "is": repr(value)}
    if isinstance(value, torch.Tensor):
        return {_MARK: "tensor", "key": put(value.detach(), path)}
    if id(value) in above:
        raise Unsaveable(f"{path or 'the value'} contains itself")
    above = (*above, id(value))

    def inner(item: Any, name: Any) -> Any:
        return _encode(item, put, f"{path}/{name}" if path else str(name), above)

    if kind is list:
        return [inner(item, at) for at, item in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and _MARK not in value:
        return {key: inner(item, key) for key, item in value.items()}
    if kind in _MAPPINGS.values() or kind is defaultdict:
        items = [[inner(key, "a key"), inner(item, key)] for key, item in value.items()]
        if kind is not defaultdict:
            return {_MARK: kind.__name__, "items": items}
        factory = value.default_factory
        if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
            return {_MARK: "defaultdict", "items": items, "of": factory and factory.__name__}
        raise Unsaveable(f"{path or 'the value'} is a defaultdict of {factory!r:.80}; what fills it cannot be kept")
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {_MARK: name, "items": [inner(item, at) for at, item in enumerate(value)]}
    if kind is deque:
        return {_MARK: "deque", "items": [inner(item, at) for at, item in enumerate(value)], "most": value.maxlen}
    if kind in (bytes, bytearray):
        return {_MARK: kind.__name__, "is": _text(value)}
    if kind is complex:
        return {_MARK: "complex", "is": [inner(value.real, "real"), inner(value.imag, "imag")]}
    if kind is range:
        return {_MARK: "range", "is": [value.start, value.stop, value.step]}
    if kind in (torch.dtype, torch.device):
        return {_MARK: kind.__name__, "is": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return {_MARK: "path", "is": str(value)}
    if isinstance(value, numpy.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return {_MARK: "scalar", "dtype": value.dtype.str, "is": _text(value.tobytes())}
    if kind is numpy.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        flat = bytearray(value.tobytes())
        held = torch.frombuffer(flat, dtype=torch.uint8) if flat else torch.empty(0, dtype=torch.uint8)
        return {_MARK: "array", "dtype": value.dtype.str, "shape": list(value.shape), "key": put(held, path)}
    raise Unsaveable(f"{path or 'the value'} is {_told(value)}; a checkpoint holds {KNOWN}")


def decode(tree: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """The value again.

    Args:
        get: the tensor that is kept under a key.

    Raises:
        ValueError: it is no tree of `encode`.
    """
    if isinstance(tree, list):
        return [decode(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: decode(item, get) for key, item in tree.items()}
    try:
        return _decode_marked(tree, get)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this part of a checkpoint cannot be read: {tree!r:.100} ({error!r})") from error


def _decode_marked(tree: dict[str, Any], get: Callable[[str], torch.Tensor]) -> Any:
    kind = tree[_MARK]
    if kind == "tensor":
        return get(tree["key"])
    if kind in _MAPPINGS or kind == "defaultdict":
        pairs = [(decode(key, get), decode(item, get)) for key, item in tree["items"]]
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[tree["of"]] if tree["of"] is not None else None, pairs)
        return _MAPPINGS[kind](dict(pairs))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(item, get) for item in tree["items"]])
    if kind == "deque":
        return deque([decode(item, get) for item in tree["items"]], tree["most"])
    if kind == "float":
        return float(tree["is"])
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(tree["is"])
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*(decode(part, get) for part in tree["is"]))
    if kind == "range":
        return range(*tree["is"])
    if kind == "dtype":
        return dtype(tree["is"])
    if kind == "device":
        return torch.device(tree["is"])
    if kind == "path":
        from pathlib import Path

        return Path(tree["is"])
    if kind == "scalar":
        return numpy.frombuffer(base64.b64decode(tree["is"]), dtype=_plain(tree["dtype"]))[0]
    if kind == "array":
        flat = get(tree["key"]).cpu().numpy().tobytes()
        return numpy.frombuffer(bytearray(flat), dtype=_plain(tree["dtype"])).reshape(tree["shape"])
    raise ValueError(f"this checkpoint holds a {kind!r}, which this version of nbdist does not know")


def keys(tree: Any) -> list[str]:
    """The keys of all tensors in it."""
    if isinstance(tree, list):
        return [key for item in tree for key in keys(item)]
    if not isinstance(tree, dict):
        return []
    if tree.get(_MARK) in ("tensor", "array"):
        return [tree["key"]]
    return [key for item in tree.values() for key in keys(item)]


def dtype(name: str) -> torch.dtype:
    """The dtype of this name, as "float32".

    Raises:
        ValueError: this torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this checkpoint holds tensors of dtype {name!r}, which torch {torch.__version__} has not")
    return found


def _plain(name: str) -> numpy.dtype[Any]:
    found = numpy.dtype(name)
    if found.hasobject:
        raise ValueError(f"an array of objects ({name!r}) is not read")
    return found


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _told(value: Any) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
