"""Kinds of objects whose class says what their state is: by `__getstate__`, or by how it reduces to a pickle."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from nbdist.shipping.errors import article
from nbdist.shipping.kinds import CannotApply, Kind, Snapshot, attributes_of, flat, put_attributes
from nbdist.shipping.reducers import REDUCERS


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
