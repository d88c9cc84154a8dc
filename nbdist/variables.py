"""What launchers say in environment variables, read with one error that names the variable."""

from __future__ import annotations

import os
from collections.abc import Sequence

_YES, _NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def text(name: str) -> str | None:
    """What a variable says; None where it is not set, is empty, or says None (a launcher's str(None))."""
    said = os.environ.get(name, "").strip()
    return None if said in ("", "None", "none", "null") else said


def flag(name: str) -> bool | None:
    """True or False; None where nothing is said.

    Raises:
        ValueError: it is neither.
    """
    said = text(name)
    if said is None or said.lower() in _YES + _NO:
        return None if said is None else said.lower() in _YES
    raise _wrong(name, said, "true or false")


def whole(name: str, least: int) -> int | None:
    """A whole number of at least `least`; None where nothing is said.

    Raises:
        ValueError: it is none.
    """
    said = text(name)
    if said is None:
        return None
    try:
        number = int(said)
    except ValueError:
        number = least - 1
    if number < least:
        raise _wrong(name, said, f"a whole number of at least {least}")
    return number


def one_of(name: str, known: Sequence[str]) -> str | None:
    """One of these, also written in other letters' cases; None where nothing is said.

    Raises:
        ValueError: it is another.
    """
    said = text(name)
    if said is None:
        return None
    for one in known:
        if one.lower() == said.lower():
            return one
    raise _wrong(name, said, f"one of {', '.join(known)}")


def _wrong(name: str, said: str, wants: str) -> ValueError:
    return ValueError(f"the environment variable {name} is {said!r}; it takes {wants}")
