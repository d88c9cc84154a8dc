"""Kinds of objects: by attribute where the class says nothing else, by their own state where it does, classes of the
notebook.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import is_
from typing import Any

from nbdist.shipping.errors import article
from nbdist.shipping.kinds import (
    MISSING,
    CannotApply,
    Kind,
    Snapshot,
    attributes_of,
    flat,
    mapping_change,
    put_attributes,
)
from nbdist.shipping.reducers import REDUCERS

Strip = Callable[[dict[str, Any]], Collection[str]]


class ObjectKind(Kind):
    """An object that pickles the default way: each attribute is compared and sent alone.

    So `trainer.epoch = 2` in the notebook does not put the bare module back over the wrapper that a rank keeps in
    `trainer.model`.
    """

    letter = "O"

    def __init__(self, strip: Strip | None = None) -> None:
        self.strip = strip

    def attributes(self, value: Any) -> dict[str, Any]:
        found = attributes_of(value)
        if self.strip is not None:
            for name in self.strip(found):
                found.pop(name, None)
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = self.attributes(value)
        return tuple(own), (type(value), *own.values())

    def shape(self, value: Any) -> Any:
        return tuple(self.attributes(value))

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        now = self.attributes(value)
        cls = type(value)
        if old is None or old[0] != self.letter:
            return cls, list(now.items()), None, list(now)  # None: everything else is to go
        before = dict(zip(old[1], old[2][1:], strict=True))
        return (cls if old[2][0] is not cls else None, *mapping_change(before, now))

    def sent(self, change: Any) -> Iterable[Any]:
        return (change[0], *(value for _, value in change[1]))

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        return [(f".{pair[0]}", pair) for pair in change[1]]

    def join(self, change: Any, parts: list[Any]) -> Any:
        kept = {id(part) for part in parts}
        names = {pair[0] for pair in change[1] if id(pair) not in kept}
        order = change[3] and [name for name in change[3] if name not in names]
        return change[0], [pair for pair in change[1] if id(pair) in kept], change[2] or [], order

    def apply(self, value: Any, change: Any) -> None:
        cls, put, removed, order = change
        if removed is None:
            kept = {name for name, _ in put}
            removed = [name for name in self.attributes(value) if name not in kept]
        if cls is not None and type(value) is not cls:
            value.__class__ = cls
        put_attributes(value, (put, removed, order))


# What every nn.Module has many of, nearly all empty. An empty one needs no token: it is found through its module.
MODULE_PARTS = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
_PARTS = frozenset(MODULE_PARTS)


class ModuleKind(ObjectKind):
    """torch.nn.Module: by attribute although it has `__getstate__`, which only leaves out what is compiled."""

    letter = "M"

    def attributes(self, value: Any) -> dict[str, Any]:
        found = super().attributes(value)
        found.pop("_compiled_call_impl", None)
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = self.attributes(value)
        return tuple(own), (type(value), *(None if name in _PARTS and not v else v for name, v in own.items()))

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        cls, put, removed, order = super().change(value, old, new)
        if old is not None and old[0] == self.letter:
            # The parts are there on the other side; what is in them is a change of their own.
            put = [pair for pair in put if not (pair[0] in _PARTS and pair[0] in old[1])]
        return cls, put, removed, order

    def reduced(self, value: Any) -> Any:
        """How a new one is made when its class forbids pickling; None for the usual way."""
        if not parametrized(type(value)):
            return None
        return copyreg.__newobj__, (type(value),), self.attributes(value)  # type: ignore[attr-defined]


def parametrized(cls: type) -> bool:
    """Is this the class that torch makes for one module with parametrizations? Its `__getstate__` only raises."""
    own = cls.__dict__.get("__getstate__")
    return cls.__module__ == "torch.nn.utils.parametrize" and getattr(own, "__module__", None) == cls.__module__


class ScalerKind(ObjectKind):
    """torch.amp.GradScaler: by attribute although it has `__getstate__`, after which it would have to begin anew."""

    letter = "A"

    def reduced(self, value: Any) -> Any:
        return copyreg.__newobj__, (type(value),), self.attributes(value)  # type: ignore[attr-defined]


class OptimizerKind(ObjectKind):
    """torch.optim.Optimizer: by attribute although it has `__getstate__`, which keeps three attributes only.

    A `step` on the instance is a wrapper that a scheduler or a scaler has put there: each side keeps its own.
    """

    letter = "P"

    def attributes(self, value: Any) -> dict[str, Any]:
        found = super().attributes(value)
        found.pop("step", None)
        return found

    def reduced(self, value: Any) -> Any:
        """How a new one is made: `__setstate__` gives the class its step hooks."""
        return copyreg.__newobj__, (type(value),), self.attributes(value)  # type: ignore[attr-defined]


class GetStateKind(Kind):
    """An object with its own `__getstate__`: the state is compared by identity, and goes whole through
    `__setstate__`.
    """

    letter = "G"

    def state(self, value: Any) -> Any:
        return value.__getstate__()

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        try:
            state, again = self.state(value), self.state(value)
        except Exception as error:
            return ("unreadable", type(error).__name__), ()
        names, held = _opened(state)
        _, held_again = _opened(again)
        if len(held) != len(held_again) or not all(map(is_, held, held_again)):
            # Made afresh at each call: identity says nothing, so the content is compared.
            from nbdist.shipping.pickler import digest_of_pickle

            try:
                return (names, None if light else digest_of_pickle(state)), (type(value),)
            except Exception:
                pass
        return names, (type(value), *held)

    def shape(self, value: Any) -> Any:
        return None

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        state = self.state(value)
        return dict(state) if isinstance(state, dict) else state

    def sent(self, change: Any) -> Iterable[Any]:
        return flat([change])

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        return None

    def apply(self, value: Any, change: Any) -> None:
        if hasattr(value, "__setstate__"):
            value.__setstate__(change)
        elif isinstance(change, tuple) and len(change) == 2:
            for state in change:
                if state:
                    put_attributes(value, (list(state.items()), [], None))
        else:
            put_attributes(value, (list(change.items()), [], None))


def _opened(state: Any) -> tuple[Any, Sequence[Any]]:
    """(the names of a state, what it refers to)."""
    if isinstance(state, dict):
        return tuple(state), tuple(state.values())
    return None, flat([state])


class Twin:
    """Stands for an object in a change: rebuilds an equal one next to it, as the object's own reduce says."""

    def __init__(self, value: Any, reduced: Any) -> None:
        self.value, self.reduced = value, reduced

    def __reduce__(self) -> Any:
        # The pickler wants to see __newobj__ for the object itself only.
        plain = _PLAIN_NEW.get(self.reduced[0])
        return self.reduced if plain is None else (plain, *self.reduced[1:])


def _new(cls: type, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


def _new_with_keywords(cls: type, arguments: Any, keywords: Any) -> Any:
    return cls.__new__(cls, *arguments, **keywords)


_PLAIN_NEW: dict[Any, Any] = {
    copyreg.__newobj__: _new,  # type: ignore[attr-defined]
    copyreg.__newobj_ex__: _new_with_keywords,  # type: ignore[attr-defined]
}


class OpaqueKind(Kind):
    """Any other object: compared by the hash of its pickle, updated whole by giving it the state of its twin."""

    letter = "X"

    def reduced(self, value: Any) -> Any:
        reducer = REDUCERS.get(type(value)) or copyreg.dispatch_table.get(type(value))
        return reducer(value) if reducer is not None else value.__reduce_ex__(5)

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if light:
            return (), ()
        try:
            reduced = self.reduced(value)
            if isinstance(reduced, str):
                return (reduced,), ()
            from nbdist.shipping.pickler import digest_of_pickle

            return (digest_of_pickle(reduced),), ()
        except Exception:
            return ("opaque",), ()

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        try:
            reduced = self.reduced(value)
        except Exception:
            return ()
        if isinstance(reduced, str):
            return ()
        parts = [part for part in reduced[1:3] if part is not None]
        parts += [list(part) for part in reduced[3:5] if part is not None]
        found: list[Any] = []
        for part in flat(parts):
            found.extend(flat([part]) if isinstance(part, tuple | list | dict) else [part])
        return (type(value), *found)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return Twin(value, self.reduced(value))

    def sent(self, change: Any) -> Iterable[Any]:
        return self.children(change.value, ())

    def apply(self, value: Any, change: Any) -> None:
        if type(change) is not type(value):
            raise CannotApply(f"{article(type(value).__name__)} cannot be changed in place", change)
        own = getattr(value, "__dict__", None)
        if own is not None:
            own.clear()
            own.update(change.__dict__)
        elif hasattr(value, "__setstate__") and hasattr(change, "__getstate__") and not slots_only(value):
            reduced = change.__reduce_ex__(5)
            if len(reduced) < 3:
                raise CannotApply(f"{article(type(value).__name__)} cannot be changed in place", change)
            value.__setstate__(reduced[2])
        elif attributes_of(change):
            put_attributes(value, (list(attributes_of(change).items()), [], None))
        else:
            raise CannotApply(f"{article(type(value).__name__)} cannot be changed in place", change)


class FrameKind(OpaqueKind):
    """pandas: one piece.

    Its blocks and indices change places among themselves, and views into them are not followed.
    """

    letter = "E"

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return ()

    def apply(self, value: Any, change: Any) -> None:
        if type(change) is type(value) and hasattr(value, "__setstate__"):
            state = [*change.__reduce_ex__(5), None, None][2]
            if isinstance(state, tuple):  # Categorical: nothing of it is in `__dict__`
                value.__setstate__(state)
                return
        super().apply(value, change)


def slots_only(value: Any) -> bool:
    """Has an object slots and nothing else?"""
    return bool(attributes_of(value)) and getattr(value, "__dict__", None) is None


_CLASS_OWN = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "_abc_impl",
        "__firstlineno__",
        "__static_attributes__",
        "__annotate_func__",
        "__annotate__",
        "__annotations_cache__",
        "__qualname__",
        "__slots__",
        "__slotnames__",  # written down by copyreg when an instance is pickled
        "__abstractmethods__",
        "__classcell__",
    ]
)


class ClassKind(Kind):
    """A class of the notebook: by value once, then attribute by attribute."""

    letter = "K"

    def attributes(self, value: type) -> dict[str, Any]:
        import enum

        if isinstance(value, enum.EnumMeta):
            return {}
        return {
            name: content
            for name, content in value.__dict__.items()
            if name not in _CLASS_OWN
            and not isinstance(content, types.GetSetDescriptorType | types.MemberDescriptorType)
        }

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = self.attributes(value)
        return tuple(own), tuple(own.values())

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        found: list[Any] = []
        for name, content in zip(self.attributes(value), references, strict=False):
            if isinstance(content, staticmethod | classmethod):
                found.append(content.__func__)
            elif isinstance(content, property):
                found.extend(f for f in (content.fget, content.fset, content.fdel) if f is not None)
            elif isinstance(content, types.FunctionType) or not name.startswith("__"):
                found.append(content)
        found.extend(value.__bases__)
        return found

    def shape(self, value: Any) -> Any:
        return value.__qualname__, tuple(self.attributes(value))

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        now = self.attributes(value)
        before = dict(zip(old[1], old[2], strict=True)) if old is not None and old[0] == self.letter else {}
        return mapping_change(before, now)[:2]

    def sent(self, change: Any) -> Iterable[Any]:
        return [value for _, value in change[0]]

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        return [(f".{pair[0]}", pair) for pair in change[0]]

    def join(self, change: Any, parts: list[Any]) -> Any:
        kept = {id(part) for part in parts}
        return [pair for pair in change[0] if id(pair) in kept], change[1]

    def apply(self, value: Any, change: Any) -> None:
        for name in change[1]:
            if name in value.__dict__:
                delattr(value, name)
        for name, content in change[0]:
            if value.__dict__.get(name, MISSING) is not content:
                setattr(value, name, content)
