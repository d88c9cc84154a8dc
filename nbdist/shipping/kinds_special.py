"""Kinds that refer weakly, or are more than their attributes: weak containers, hooks' handles, modules made by hand."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

from nbdist.shipping.kinds import Kind, Snapshot, Through
from nbdist.shipping.kinds_object import GetStateKind, ObjectKind


class WeakKind(Kind):
    """Weak dicts and sets of the standard library. What only they refer to is gone on the other side at once."""

    letter = "W"

    def __init__(self, unordered: bool = False) -> None:
        self.unordered = unordered

    def items(self, value: Any) -> list[Any]:
        return list(value) if isinstance(value, weakref.WeakSet) else list(value.items())

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        # A snapshot may not keep them alive either; an object has one weak reference without a callback.
        found: list[Any] = []
        for item in self.items(value):
            if isinstance(value, weakref.WeakSet):
                found.append(weakref.ref(item))
            elif isinstance(value, weakref.WeakKeyDictionary):
                found += weakref.ref(item[0]), item[1]
            else:
                found += item[0], weakref.ref(item[1])
        return (), tuple(found)

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        items = self.items(value)
        return items if isinstance(value, weakref.WeakSet) else [part for pair in items for part in pair]

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return self.items(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return [part for item in change for part in (item if type(item) is tuple else (item,))]

    def apply(self, value: Any, change: Any) -> None:
        value.clear()
        fill_weak(value, change)

    def reduced(self, value: Any) -> Any:
        return type(value), (), self.items(value), None, None, fill_weak


def fill_weak(value: Any, items: list[Any]) -> None:
    value.update(items if isinstance(value, weakref.WeakSet) else dict(items))


class ProxyKind(Through):
    """types.MappingProxyType: a view of a dict, which is what has identity."""

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return (behind_proxy(value),)


def behind_proxy(value: Any) -> Any:
    """The mapping itself, or a copy where the interpreter does not say which it is."""
    found = gc.get_referents(value)
    return found[0] if len(found) == 1 else dict(value)


class RemovableHandleKind(GetStateKind):
    """What torch's `register_hook` functions return. It refers weakly to dicts of hooks, some of which are gone."""

    letter = "H"

    def state(self, value: Any) -> Any:
        state = value.__getstate__()
        return (*state[:2], tuple(d for d in state[2] if d is not None)) if len(state) > 2 and state[2] else state

    def reduced(self, value: Any) -> Any:
        return _new, (type(value),), self.state(value)


def _new(cls: type) -> Any:
    return cls.__new__(cls)


class MadeModuleKind(ObjectKind):
    """A module that was made by hand (`types.ModuleType`): its variables are its attributes."""

    letter = "Y"

    def attributes(self, value: Any) -> dict[str, Any]:
        return {name: content for name, content in value.__dict__.items() if name not in _MODULES_OWN}

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = self.attributes(value)
        return tuple(own), (None, *own.values())

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return (None, *super().change(value, old, new)[1:])

    def reduced(self, value: Any) -> Any:
        return make_module, (value.__name__,), self.attributes(value), None, None, fill_module


_MODULES_OWN = frozenset({"__builtins__", "__loader__", "__spec__", "__name__", "__cached__"})


def make_module(name: str) -> types.ModuleType:
    return types.ModuleType(name)


def fill_module(module: types.ModuleType, variables: dict[str, Any]) -> None:
    module.__dict__.update(variables)


class VariablesOf:
    """Stands for the variables of a module that was made by hand: the globals of its functions."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return vars, (self.module,)


def made_by_hand(module: types.ModuleType) -> bool:
    """Is a module not to be found by its name, on any side?"""
    own = module.__dict__
    known = sys.modules.get(own.get("__name__", ""))
    return known is None or (known is not module and own.get("__spec__") is None and "__file__" not in own)
