"""Kinds of objects that are compared and sent attribute by attribute."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Iterable
from typing import Any

from nbdist.shipping.kinds import (
    Kind,
    Snapshot,
    attributes_of,
    mapping_change,
    put_attributes,
)
from nbdist.shipping.spread import hides_hooks, home_class, put_there_by_a_strategy

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
        if cls is not None and home_class(type(value)) is not cls:
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
HOOKS = MODULE_PARTS[4:]


class ModuleKind(ObjectKind):
    """torch.nn.Module: by attribute although it has `__getstate__`, which only leaves out what is compiled.

    Of one that a strategy has sharded in place, its class and its hooks are left out: they belong to its rank.
    """

    letter = "M"

    def attributes(self, value: Any) -> dict[str, Any]:
        found = super().attributes(value)
        found.pop("_compiled_call_impl", None)
        for name in put_there_by_a_strategy(found):
            del found[name]
        if hooks_stay(found):
            found.update({name: type(found[name])() for name in HOOKS if name in found})
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        own = self.attributes(value)
        cls = home_class(type(value))
        return tuple(own), (cls, *(None if name in _PARTS and not v else v for name, v in own.items()))

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        cls, put, removed, order = super().change(value, old, new)
        cls = home_class(cls) if cls is not None else None
        if cls is not None and old is not None and old[0] == self.letter and old[2][0] is cls:
            cls = None
        if old is not None and old[0] == self.letter:
            # The parts are there on the other side; what is in them is a change of their own.
            put = [pair for pair in put if not (pair[0] in _PARTS and pair[0] in old[1])]
        return cls, put, removed, order

    def reduced(self, value: Any) -> Any:
        """How a new one is made when its class forbids pickling, or stays here; None for the usual way."""
        cls = type(value)
        own = value.__dict__
        if not (parametrized(cls) or home_class(cls) is not cls or put_there_by_a_strategy(own) or hooks_stay(own)):
            return None
        if home_class(cls) is not cls:  # pickle insists that what `__newobj__` makes is of the object's own class
            return make_bare, (home_class(cls),), self.attributes(value)
        return copyreg.__newobj__, (cls,), self.attributes(value)  # type: ignore[attr-defined]


def make_bare(cls: type) -> Any:
    """A new object of a class, without attributes."""
    made: Any = cls
    return made.__new__(made)


def hooks_stay(attributes: dict[str, Any]) -> bool:
    """Has a strategy put hooks on the module with these attributes?"""
    return hides_hooks([attributes.get(name) for name in HOOKS])


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
