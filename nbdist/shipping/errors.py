"""What can go wrong when objects travel, as the user reads it."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def in_words(size: int) -> str:
    """A number of bytes as one reads it: 512 B, 3.1 KiB, 2.0 GiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def article(word: str) -> str:
    """A word behind its article: a list, an array."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


class CannotShip(TypeError):
    """A name that the cell surely reads cannot leave the notebook.

    Attributes:
        name: the notebook's name.
        path: where inside it the trouble is, as one would write it (`cfg['a'][1]['lock']`).
        type_name: the type of the named value.
    """

    def __init__(self, name: str, path: str, type_name: str, reason: str, advice: str = "") -> None:
        self.name, self.path, self.type_name, self.reason = name, path, type_name, reason
        where = "" if path == name else f"{path} is "
        text = f"cannot ship {name!r} ({type_name}): {where}{reason}"
        super().__init__(f"{text}. {advice}" if advice else text)

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.name, self.path, self.type_name, self.reason)


class CannotReceive(Exception):
    """A rank could not decode what it was sent; nothing was bound.

    Attributes:
        name: the notebook's name that failed, "" when it is not one name.
        reason: the error, in one line.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        what = repr(name) if name else "what the notebook sent"
        super().__init__(f"cannot receive {what}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.name, self.reason)


class NeedsMore(CannotReceive):
    """A rank's own objects differ from what a change was made against: it needs more than the change.

    Attributes:
        missing: token -> "all" (the object's bytes that were not sent) or "anew" (the object has another shape here).
    """

    def __init__(self, missing: dict[Any, str]) -> None:
        self.missing = missing
        super().__init__("", f"{len(missing)} objects differ here")

    def __reduce__(self) -> tuple[type, tuple[dict[Any, str]]]:
        return type(self), (self.missing,)


class NotEnoughMemory(MemoryError):
    """The machine has not the memory for a shared copy of what is to travel. Nothing was sent.

    Attributes:
        needed: bytes that the copy takes.
        free: bytes that can be had.
    """

    def __init__(self, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"the ranks need a copy of {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free. "
            "Free some memory, or make the data inside the cell"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.needed, self.free)


class StaysOnRank(TypeError):
    """Raised while packing an object that never leaves its process; the message is the reason."""
