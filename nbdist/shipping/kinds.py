"""Kinds: what has identity and a shallow state, and how that state is seen, sent and written into another copy.

The two sides hold copies of one object graph. For each mutable object a shallow *snapshot* is kept: a letter for the
kind, scalars compared by value, and references compared by identity (and held, so that an address cannot be reused
unseen). What differs from its snapshot is sent as a *change*, made by `change` and applied by `apply` to the very
object on the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from types import CellType, FunctionType
from typing import Any

Snapshot = tuple[str, Any, tuple[Any, ...]]
MISSING = object()


class CannotApply(TypeError):
    """A change cannot be written into the object there is. `instead`, if set, is a new object to bind in its place."""

    def __init__(self, message: str, instead: Any = MISSING) -> None:
        super().__init__(message)
        self.instead = instead


def same(one: Snapshot, other: Snapshot) -> bool:
    """Is an object as its snapshot says?"""
    return (
        one[0] == other[0]
        and len(one[2]) == len(other[2])
        and all(map(is_, one[2], other[2]))
        and bool(one[1] == other[1])
    )


class Kind:
    """How objects of some types are walked, compared and changed. Stateless; one instance each.

    Attributes:
        letter: names the kind in snapshots and messages.
        token: objects of this kind have an identity that both sides know; False for what is only walked through.
        unordered: the order of what it holds says nothing to another process.
    """

    letter = "?"
    token = True
    unordered = False

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """(scalars, references).

        `digest`: the hash of the content where it is known. `light`: content need not be hashed.
        """
        raise NotImplementedError

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        """The objects to walk to, in an order that is the same on every rank."""
        return references

    def shape(self, value: Any) -> Any:
        """What must be equal on two ranks for their objects to be the same one in structure."""
        return None

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        """What to send; for `old` None the whole state."""
        raise NotImplementedError

    def sent(self, change: Any) -> Iterable[Any]:
        """The objects that a change refers to."""
        return ()

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        """A change in pieces that can be sent alone, each with a label ('.lock'); None when it is one piece."""
        return None

    def join(self, change: Any, parts: list[Any]) -> Any:
        """The change with only some of its parts."""
        raise NotImplementedError

    def apply(self, value: Any, change: Any) -> None:
        """Write a change into an object, in place."""
        raise NotImplementedError


class Through(Kind):
    """Immutable containers: walked through, sent by value, never a node."""

    letter, token = "i", False

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return (), ()


class TupleKind(Through):
    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return value if type(value) is tuple else (*value, type(value))

    def shape(self, value: Any) -> Any:
        return len(value)


class FrozenSetKind(Through):
    """Elements have no order that two processes share: what is born inside has no place on other ranks."""

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return value

    def shape(self, value: Any) -> Any:
        return len(value)


class MethodKind(Through):
    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return value.__self__, value.__func__


class BuiltinMethodKind(Through):
    """`items.append`: what it belongs to may be changed by calling it."""

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return (value.__self__,)


class InstanceKind(Through):
    """Values like Enum members: only their class matters."""

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return (type(value),)


class Unwrapped(Through):
    """A wrapper that has a registered `unwrap`."""

    def __init__(self, unwrap: Any) -> None:
        self.unwrap = unwrap

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return (self.unwrap(value),)


class Stays(Through):
    """Never walked, never sent."""

    letter = "!"

    def __init__(self, reason: str) -> None:
        self.reason = reason


# -- mappings of names or keys: changes are per key, so that what only one side holds under another key survives


def mapping_change(
    old: dict[Any, Any], now: dict[Any, Any]
) -> tuple[list[tuple[Any, Any]], list[Any], list[Any] | None]:
    """(pairs to put, keys to remove, the order of all keys where putting alone does not give it)."""
    put = [(key, value) for key, value in now.items() if old.get(key, MISSING) is not value]
    removed = [key for key in old if key not in now]
    order: list[Any] | None = None
    grown = [key for key in old if key in now]
    if len(grown) != len(now):
        grown.extend(key for key in now if key not in old)
    if not all(map(is_, grown, now)):
        order = list(now)
    return put, removed, order


def put_items(
    target: dict[Any, Any],
    base: type[dict[Any, Any]],
    change: tuple[list[tuple[Any, Any]], list[Any], list[Any] | None],
) -> None:
    put, removed, order = change
    for key in removed:
        if dict.__contains__(target, key):
            base.__delitem__(target, key)
    for key, value in put:
        base.__setitem__(target, key, value)
    if order is not None:
        pairs = [(key, dict.__getitem__(target, key)) for key in order if dict.__contains__(target, key)]
        seen = {key for key, _ in pairs}
        pairs.extend((key, value) for key, value in base.items(target) if key not in seen)
        base.clear(target)
        for key, value in pairs:
            base.__setitem__(target, key, value)


def attributes_of(value: Any) -> dict[str, Any]:
    """The instance attributes: `__dict__` and slots, private names mangled as they are stored."""
    found = dict(getattr(value, "__dict__", None) or {})
    for name in slots_of(type(value)):
        content = getattr(value, name, MISSING)
        if content is not MISSING:
            found[name] = content
    return found


_SLOTS: dict[type, tuple[str, ...]] = {}


def slots_of(cls: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases, as getattr takes them."""
    names = _SLOTS.get(cls)
    if names is None:
        found: list[str] = []
        for base in cls.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else tuple(slots):
                if slot in ("__dict__", "__weakref__"):
                    continue
                private = slot.startswith("__") and not slot.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{slot}" if private else slot)
        names = tuple(found)
        if len(_SLOTS) > 10_000:  # classes of a notebook come and go
            _SLOTS.clear()
        _SLOTS[cls] = names
    return names


def put_attributes(value: Any, change: tuple[list[tuple[Any, Any]], list[Any], list[Any] | None]) -> None:
    """Set and remove instance attributes below any `__setattr__` of the class (frozen dataclasses, nn.Module)."""
    put, removed, order = change
    slots = slots_of(type(value))
    own = getattr(value, "__dict__", None)
    if own is None:
        own = {}
    for name in removed:
        if name in own:
            del own[name]
        elif name in slots and hasattr(value, name):
            object.__delattr__(value, name)
    for name, content in put:
        if name in slots:
            object.__setattr__(value, name, content)
        else:
            own[name] = content
    if order is not None:
        put_items(own, dict, ([], [], [name for name in order if name in own]))


class CellKind(Kind):
    letter = "C"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        try:
            return (), (value.cell_contents,)
        except ValueError:
            return (), ()

    def shape(self, value: CellType) -> Any:
        return len(self.snap(value)[1])

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return self.snap(value)[1]

    def sent(self, change: Any) -> Iterable[Any]:
        return tuple(change)

    def apply(self, value: Any, change: Any) -> None:
        if change:
            value.cell_contents = change[0]
        elif self.snap(value)[1]:
            del value.cell_contents


class FunctionKind(Kind):
    letter = "F"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        keywords = value.__kwdefaults__ or {}
        own = value.__dict__
        return (
            (tuple(keywords), tuple(own), value.__name__),
            (
                value.__code__,
                *(value.__defaults__ or ()),
                *keywords.values(),
                *(value.__closure__ or ()),
                *own.values(),
            ),
        )

    def shape(self, value: FunctionType) -> Any:
        return value.__qualname__

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return value.__code__, value.__defaults__, value.__kwdefaults__, dict(value.__dict__), value.__name__

    def sent(self, change: Any) -> Iterable[Any]:
        return (*(change[1] or ()), *(change[2] or {}).values(), *change[3].values())

    def apply(self, value: Any, change: Any) -> None:
        value.__code__, value.__defaults__, value.__kwdefaults__ = change[:3]
        value.__dict__.clear()
        value.__dict__.update(change[3])
        value.__name__ = change[4]


def flat(values: Iterable[Any]) -> Sequence[Any]:
    """Tuples, lists and dicts opened one level."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found.extend(value)
        elif isinstance(value, dict):
            found.extend(value.values())
        elif value is not None:
            found.append(value)
    return found
