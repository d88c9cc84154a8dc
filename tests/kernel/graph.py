"""A namespace written down as lines: values, types, which objects are one, and which memory is shared.

Two namespaces in which the same program ran have equal lines. Used in the test's process and inside kernels.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import random
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

# A shell's own names, and what a rank reads without the notebook having it.
_NOT_THE_USERS = set(
    "In Out exit quit get_ipython open rank local_rank world_size device ranks".split()  # noqa: SIM905
)
_VALUES = (int, float, complex, str, bytes, bool, type(None), types.CodeType, range, torch.dtype, torch.Size, np.dtype)
# What Python keeps in a class beside what the user wrote.
_CLASS_OWN = set(
    "__dict__ __weakref__ __module__ __qualname__ __doc__ __static_attributes__ __firstlineno__ __annotations__ "  # noqa: SIM905
    "__match_args__ __slots__ __slotnames__ __hash__ __new__".split()
)


def names_of(namespace: dict[str, Any]) -> list[str]:
    """The user's names."""
    return sorted(name for name in namespace if not name.startswith("_") and name not in _NOT_THE_USERS)


class Graph:
    """What is reachable from some roots, in an order that depends on the structure alone.

    Attributes:
        lines: one for each root and each object.
        objects: those with an identity, in the order in which they were met.
    """

    def __init__(self, namespace: dict[str, Any], roots: Iterable[tuple[str, Any]]) -> None:
        self.namespace = namespace
        self.lines: list[str] = []
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._pending: collections.deque[Any] = collections.deque()
        self._held: list[Any] = []
        self._memory: list[tuple[int, int, str]] = []
        for label, value in roots:
            self.lines.append(f"{label} = {self.draw(value)}")
        while self._pending:
            value = self._pending.popleft()
            number = self._numbers[id(value)]
            self.lines.append(f"#{number}: {self._describe(value)}")
        self._sharing()

    def draw(self, value: Any) -> str:
        """A value inline, an object as its number."""
        if isinstance(value, _VALUES) and type(value) in _VALUES:
            if type(value) is types.CodeType:
                inner = [part.co_name if isinstance(part, types.CodeType) else repr(part) for part in value.co_consts]
                return f"code {value.co_name} {value.co_varnames} {value.co_names} {inner}"
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, np.generic):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, enum.Enum) and type(value).__module__ == "__main__":
            return f"member {value.name} of {self.draw(type(value))} {getattr(type(value), value.name) is value}"
        if isinstance(value, tuple):
            return f"{type(value).__name__}({', '.join(map(self.draw, value))})"
        if isinstance(value, frozenset):
            return f"frozenset({', '.join(sorted(map(self.draw, value)))})"
        if isinstance(value, types.MethodType):
            return f"method {value.__name__} of {self.draw(value.__self__)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self.draw(value.__func__)}"
        if isinstance(value, property):
            return f"property {self.draw(value.fget)} {self.draw(value.fset)}"
        if isinstance(value, functools.partial):
            return f"partial {self.draw(value.func)} {self.draw(value.args)} {sorted(value.keywords)}"
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and value.__module__ != "__main__":
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType | types.WrapperDescriptorType):
            return f"descriptor {value.__name__}"
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self.objects.append(value)
            self._pending.append(value)
        return f"#{number}"

    def _describe(self, value: Any) -> str:
        cls = type(value)
        kind = self.draw(cls) if cls.__module__ == "__main__" else cls.__name__
        parts: list[str] = []
        if isinstance(value, torch.Tensor):
            return f"{kind} {self._tensor(value)}"
        if isinstance(value, np.ndarray):
            return f"{kind} {self._array(value)}"
        if isinstance(value, types.FunctionType):
            return f"function {self._function(value)}"
        if isinstance(value, types.CellType):
            try:
                return f"cell {self.draw(value.cell_contents)}"
            except ValueError:
                return "cell empty"
        if isinstance(value, type):
            own = {k: v for k, v in value.__dict__.items() if k not in _CLASS_OWN and "abc" not in k}
            if isinstance(value, enum.EnumMeta):
                own = {}
            own = dict(sorted(own.items()))  # cloudpickle sorts them
            return f"class {value.__qualname__} {self.draw(value.__bases__)} {self._mapping(own)}"
        if isinstance(value, random.Random):
            return f"Random {hashlib.md5(repr(value.getstate()).encode()).hexdigest()}"
        if isinstance(value, np.random.Generator):
            return f"Generator {value.bit_generator.state}"
        if isinstance(value, torch.Generator):
            return f"Generator {value.get_state().tolist()[:40]}"
        if isinstance(value, torch.optim.Optimizer):
            return f"{kind} {self.draw(value.param_groups)} {self.draw(value.state)} {self.draw(value.defaults)}"
        if isinstance(value, bytearray):
            parts.append(repr(bytes(value)))
        elif isinstance(value, list | collections.deque):
            if len(value) > 500:
                text = ", ".join(map(self.draw, value))
                parts.append(f"{len(value)} items {hashlib.md5(text.encode()).hexdigest()} {text[-60:]}")
            else:
                parts.append(f"[{', '.join(map(self.draw, value))}]")
            if isinstance(value, collections.deque):
                parts.append(f"maxlen {value.maxlen}")
        elif isinstance(value, dict):
            parts.append(self._mapping(value))
            if isinstance(value, collections.defaultdict):
                parts.append(f"makes {self.draw(value.default_factory)}")
        elif isinstance(value, set):
            parts.append(f"{{{', '.join(sorted(map(self.draw, value)))}}}")
        own = dict(getattr(value, "__dict__", {}))
        for base in cls.__mro__:
            for slot in _slots(base):
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    own[slot] = getattr(value, slot)
        if own:
            parts.append(self._mapping(own))
        return f"{kind} {' '.join(parts)}"

    def _mapping(self, value: dict[Any, Any]) -> str:
        # An OrderedDict keeps its order beside the dict that it is.
        items = value.items() if isinstance(value, collections.OrderedDict) else dict.items(value)
        pairs = [f"{self.draw(key)}: {self.draw(content)}" for key, content in items]
        return "{" + ", ".join(pairs) + "}"

    def _function(self, value: types.FunctionType) -> str:
        here = "here" if value.__globals__ is self.namespace else "elsewhere"
        own = [value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items())), value.__closure__]
        drawn = " ".join(map(self.draw, own))
        return f"{value.__qualname__} {here} {self.draw(value.__code__)} {drawn} {self._mapping(value.__dict__)}"

    def _tensor(self, value: torch.Tensor) -> str:
        leaf = value.requires_grad and value.is_leaf  # what is not a leaf comes home without its graph
        flat = value.detach()
        low = flat.data_ptr()
        span = sum((n - 1) * s for n, s in zip(flat.shape, flat.stride(), strict=True)) + 1 if flat.numel() else 0
        self._memory.append((low, low + span * flat.element_size(), f"#{self._numbers[id(value)]}"))
        grad = self.draw(value.grad if value.is_leaf else None)
        facts = f"{value.dtype} {tuple(value.shape)} {value.stride()} {leaf} {grad}"
        return f"{facts} {self._mapping(value.__dict__)} {_content(flat.numpy())}"

    def _array(self, value: np.ndarray) -> str:
        # Where one element at most lies, numpy gives what it likes.
        strides = [s for n, s in zip(value.shape, value.strides, strict=True) if n > 1 and value.size]
        facts = f"{value.dtype} {value.shape} {strides} {value.flags.writeable}"
        if value.dtype.hasobject:
            facts = f"{value.dtype} {value.shape} {value.flags.writeable}"
            return f"{facts} [{', '.join(self.draw(item) for item in value.ravel().tolist())}]"
        address, low, high = value.__array_interface__["data"][0], 0, value.itemsize if value.size else 0
        for size, stride in zip(value.shape, value.strides, strict=True):
            if value.size and stride < 0:
                low += (size - 1) * stride
            elif value.size:
                high += (size - 1) * stride
        self._memory.append((address + low, address + high, f"#{self._numbers[id(value)]}"))
        return f"{facts} {_content(value)}"

    def _sharing(self) -> None:
        """For each piece of memory, which earlier ones it overlaps, and how far it is from them."""
        known: list[tuple[int, int, str]] = []
        for low, high, label in self._memory:
            with_ = [f"{other}{low - start:+d}" for start, end, other in known if low < end and start < high]
            if with_ and low < high:
                self.lines.append(f"memory of {label}: {' '.join(with_)}")
            if low < high:
                known.append((low, high, label))


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    found = []
    for slot in (slots,) if isinstance(slots, str) else tuple(slots):
        private = slot.startswith("__") and not slot.endswith("__")
        found.append(f"_{cls.__name__.lstrip('_')}{slot}" if private else slot)
    return found


def _content(value: np.ndarray) -> str:
    if value.size <= 40:
        return repr(value.tolist())
    return hashlib.md5(np.ascontiguousarray(value).tobytes()).hexdigest()


class Watch:
    """Draws a namespace again and again, together with every object that it has held at an earlier look.

    So the lines also say whether an object is still the very one that it was.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.held: list[Any] = []
        self._known: set[int] = set()

    def look(self) -> list[str]:
        roots = [(name, self.namespace[name]) for name in names_of(self.namespace)]
        roots += [(f"held {index}", value) for index, value in enumerate(self.held)]
        graph = Graph(self.namespace, roots)
        for value in graph.objects:
            if id(value) not in self._known:
                self._known.add(id(value))
                self.held.append(value)
        return graph.lines
