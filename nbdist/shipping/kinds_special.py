"""Kinds of what refers to others, or is more than its attributes: weak containers and other views, hooks' handles,
modules made by hand, exceptions.
"""

from __future__ import annotations

import array
import gc
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

from nbdist.shipping.errors import StaysOnRank
from nbdist.shipping.kinds import Kind, Snapshot, Through, attributes_of
from nbdist.shipping.kinds_object import ObjectKind
from nbdist.shipping.kinds_state import GetStateKind


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


def refers_weakly(cls: type) -> bool:
    """Is this torch's class of the handles of hooks, with a state that leads to the dicts of hooks?"""
    hooks = sys.modules.get("torch.utils.hooks")
    return hooks is not None and cls is hooks.RemovableHandle and "__getstate__" in cls.__dict__


def _new(cls: type) -> Any:
    return object.__new__(cls)


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


class ArrayOfNumbersKind(Kind):
    """array.array."""

    letter = "J"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return () if light else value.tobytes(), ()

    def shape(self, value: Any) -> Any:
        return value.typecode, len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return value.tobytes()

    def apply(self, value: Any, change: Any) -> None:
        del value[:]
        value.frombytes(change)


class ViewKind(Through):
    """A memoryview of all of something. One of a part does not say where it begins."""

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return (value.obj,)

    def reduced(self, value: Any) -> Any:
        whole = isinstance(value.obj, bytes | bytearray | array.array) and memoryview(value.obj).nbytes == value.nbytes
        if not whole or not value.c_contiguous:
            raise StaysOnRank("it is a view of a part of some memory; what it looks at can travel")
        return make_view, (value.obj, value.format, value.shape, value.readonly)


def make_view(value: Any, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    view = memoryview(value)
    if (view.format, view.shape) != (form, shape):
        view = view.cast("B").cast(form, shape)  # type: ignore[call-overload]
    return view.toreadonly() if readonly else view


class ExceptionKind(Kind):
    """Exceptions: their arguments, attributes, notes and causes. The traceback stays with its process.

    Python makes a copy by calling the class with `args`, which fails where `__init__` takes something else.
    """

    letter = "V"

    def state(self, value: Any) -> dict[str, Any]:
        found = attributes_of(value)
        for name in OF_THE_PROCESS:
            found.pop(name, None)
        for name in ("__cause__", "__context__", "__suppress_context__"):
            found[name] = getattr(value, name)
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        state = self.state(value)
        return tuple(state), (type(value), value.args, *state.values())

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return value.args, self.state(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (change[0], *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        value.args, state = change
        for name in [name for name in self.state(value) if name not in state]:
            delattr(value, name)
        fill_exception(value, state)

    def reduced(self, value: Any) -> Any:
        _, arguments, *more = value.__reduce__()
        state = {**(more[0] if more and isinstance(more[0], dict) else {}), **self.state(value)}
        made = (make_exception, (type(value), arguments))
        return (*made, state, None, None, fill_exception)


# How IPython is told to show it: a function of the shell's.
OF_THE_PROCESS = ("_render_traceback_",)


def make_exception(cls: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    interpreters: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    try:
        value = cls.__new__(cls, *arguments)
    except TypeError:  # a `__new__` of the class's own, which takes something else
        value = interpreters.__new__(cls, *arguments)
    interpreters.__init__(value, *arguments)
    return value


def put_attribute(value: BaseException, name: str, content: Any) -> None:
    """Set an attribute, also where the class does not let it be set (a frozen dataclass)."""
    try:
        setattr(value, name, content)
    except Exception:
        try:
            object.__setattr__(value, name, content)
        except Exception:  # behind a property
            vars(value)[name] = content


def fill_exception(value: BaseException, state: dict[str, Any]) -> None:
    suppress = state.get("__suppress_context__", False)
    for name, content in state.items():
        put_attribute(value, name, content)
    value.__suppress_context__ = suppress  # to set a cause sets it too


def pickles_as_exception(cls: type) -> bool:
    """Is this a class of exceptions that says nothing of its own about pickling?"""
    if not issubclass(cls, BaseException) or cls.__reduce_ex__ is not object.__reduce_ex__:
        return False
    makers = [base for base in cls.__mro__ if "__reduce__" in base.__dict__ or "__getstate__" in base.__dict__]
    return makers[0].__module__ == "builtins"
