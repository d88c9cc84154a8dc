"""Kinds: what has identity and a shallow state, and how that state is seen, sent and written into another copy.

The two sides hold copies of one object graph. For each mutable object a shallow *snapshot* is kept: a letter for the
kind, scalars compared by value, and references compared by identity (and held, so that an address cannot be reused
unseen). What differs from its snapshot is sent as a *change*, made by `change` and applied by `apply` to the very
object on the other side.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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
    """

    letter = "?"
    token = True

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


def _put(
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
        _put(own, dict, ([], [], [name for name in order if name in own]))


class _Attributed(Kind):
    """Containers that may carry instance attributes when their class is a subclass."""

    def extra(self, value: Any) -> dict[str, Any]:
        return attributes_of(value) if type(value) not in _BARE else {}


_BARE = {list, dict, set, deque, bytearray, OrderedDict}


class ListKind(_Attributed):
    letter = "L"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if type(value) is list:
            return (), tuple(value)
        extra = self.extra(value)
        return tuple(extra), (*extra.values(), type(value), *list.__iter__(value))

    def shape(self, value: Any) -> Any:
        return list.__len__(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return list(list.__iter__(value)), self.extra(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (*change[0], *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        list.__setitem__(value, slice(None), change[0])
        if type(value) is not list:
            _replace_attributes(value, change[1])


class DequeKind(_Attributed):
    letter = "Q"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        extra = self.extra(value)
        return (value.maxlen, tuple(extra)), (*extra.values(), *value)

    def shape(self, value: Any) -> Any:
        return len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return list(value), self.extra(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (*change[0], *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        value.clear()
        value.extend(change[0])
        _replace_attributes(value, change[1])


def _replace_attributes(value: Any, now: dict[str, Any]) -> None:
    put_attributes(value, (list(now.items()), [name for name in attributes_of(value) if name not in now], None))


class SetKind(_Attributed):
    letter = "S"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        # Membership by identity: comparing two sets of user objects would call their __eq__.
        if light:
            return (), ()
        held = tuple(value)
        return (frozenset(map(id, held)), _Held(held)), ()

    def children(self, value: Any, references: tuple[Any, ...]) -> Iterable[Any]:
        return value

    def shape(self, value: Any) -> Any:
        return len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return list(value), self.extra(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (*change[0], *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        set.clear(value)
        set.update(value, change[0])
        _replace_attributes(value, change[1])


class _Held:
    """Keeps objects alive in a snapshot without taking part in its comparison."""

    __slots__ = ("objects",)

    def __init__(self, objects: Any) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    __hash__ = None  # type: ignore[assignment]


class DictKind(_Attributed):
    letter = "D"

    def extra(self, value: Any) -> dict[str, Any]:
        found = super().extra(value)
        if hasattr(value, "default_factory"):
            found["default_factory"] = value.default_factory
        return found

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if type(value) is dict:
            return (), (*value, *value.values())
        extra = self.extra(value)
        base = self._base(value)
        return tuple(extra), (*base.keys(value), *base.values(value), *extra.values())

    def shape(self, value: Any) -> Any:
        keys = list(self._base(value).keys(value))
        return tuple(key if type(key) in (str, int) else type(key).__name__ for key in keys)

    def _base(self, value: Any) -> type[dict[Any, Any]]:
        # An OrderedDict keeps its order beside the dict that it is.
        return OrderedDict if isinstance(value, OrderedDict) else dict

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        base = self._base(value)
        now = dict(zip(base.keys(value), base.values(value), strict=True))
        extra = self.extra(value)
        if old is None or old[0] != self.letter:
            return True, list(now.items()), [], list(now), extra
        references, count = old[2], (len(old[2]) - len(old[1])) // 2
        before = dict(zip(references[:count], references[count : 2 * count], strict=True))
        was = dict(zip(old[1], references[2 * count :], strict=True))
        unchanged = list(was) == list(extra) and all(map(is_, was.values(), extra.values()))
        return (False, *mapping_change(before, now), None if unchanged else extra)

    def sent(self, change: Any) -> Iterable[Any]:
        _, put, removed, order, extra = change
        found: list[Any] = [part for pair in put for part in pair]
        return (*found, *removed, *(order or ()), *(extra or {}).values())

    def parts(self, change: Any) -> list[tuple[str, Any]] | None:
        return [(f"[{pair[0]!r}]" if type(pair[0]) in (str, int) else "[...]", pair) for pair in change[1]]

    def join(self, change: Any, parts: list[Any]) -> Any:
        kept = {id(part) for part in parts}
        order = change[3] and [k for k in change[3] if all(k is not p[0] or id(p) in kept for p in change[1])]
        return change[0], [pair for pair in change[1] if id(pair) in kept], change[2], order, change[4]

    def apply(self, value: Any, change: Any) -> None:
        whole, put, removed, order, extra = change
        base = self._base(value)
        if whole:
            kept = {key for key, _ in put}
            removed = [key for key in list(dict.keys(value)) if key not in kept]
        _put(value, base, (put, removed, order))
        if extra is not None and type(value) is not dict:
            extra = dict(extra)
            if "default_factory" in extra:
                value.default_factory = extra.pop("default_factory")
            if hasattr(value, "__dict__"):
                _replace_attributes(value, extra)


class BytearrayKind(_Attributed):
    letter = "B"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return () if light else bytes(value), ()

    def shape(self, value: Any) -> Any:
        return len(value)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return bytes(value)

    def apply(self, value: Any, change: Any) -> None:
        value[:] = change


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
