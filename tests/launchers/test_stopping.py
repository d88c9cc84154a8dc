"""Are ranks in step? Asked of what they told at their end."""

from __future__ import annotations

from typing import Any

from nbdist.launchers.stopping import in_step
from nbdist.shipping.link import Message


def done(groups: dict[str, tuple[int, int]] | None, **status: Any) -> Message:
    told = None if groups is None else {"groups": groups, "point to point": False, "known": True, **status}
    return Message("done", {"status": told})


def test_in_step() -> None:
    assert in_step([done({"a": (3, 3), "b": (0, 0)}), done({"a": (3, 3), "b": (0, 0)})])
    assert in_step([done({}), done({})])


def test_nothing_ran() -> None:
    """Stop came before any rank had begun."""
    assert in_step([])


def test_not_in_step() -> None:
    assert not in_step([done({"a": (3, 3)}), done({"a": (4, 4)})])
    assert not in_step([done({"a": (3, 3)}), done({"a": (3, 3), "b": (1, 1)})])
    assert not in_step([done({"a": (4, 3)}), done({"a": (4, 3)})])


def test_not_known_is_not_in_step() -> None:
    assert not in_step([done({"a": (1, 1)}), done(None)])
    assert not in_step([done({"a": (1, 1)}, known=False), done({"a": (1, 1)})])
    assert not in_step([done({"a": (1, 1)}, **{"point to point": True}), done({"a": (1, 1)})])
