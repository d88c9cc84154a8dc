"""The kind of a class that was made in the notebook."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from typing import Any

from nbdist.shipping.kinds import MISSING, Kind, Snapshot, mapping_change

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
