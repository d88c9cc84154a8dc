"""Which ranks are waited for in vain: what is concluded from where ranks stand and what others have begun."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.launchers import left, stalls

WORLD = {"0": {0, 1, 2}, "sub": {0, 1}}


def waits(
    name: str = "all_reduce", number: int | None = 5, group: str | None = "0", at: Any = "here"
) -> dict[str, Any]:
    return {"line": 3, "at": at, "waits": {"name": name, "number": number, "group": group}}


def gone(begun: dict[str, int], known: bool = True, threads: bool = False) -> dict[str, Any]:
    return {"line": None, "waits": None, "reached": (begun, known), "threads": threads}


RUNS: dict[str, Any] = {"line": 4, "at": "there", "waits": None}
ENDED = gone({"0": 4, "sub": 9})


@pytest.mark.parametrize(
    ("running", "ended", "missed"),
    [
        ({0: waits(), 1: waits()}, {2: ENDED}, {2}),
        ({0: waits(), 1: RUNS}, {2: ENDED}, {2}),  # whatever rank 1 does
        ({0: waits()}, {1: ENDED, 2: ENDED}, {1, 2}),
        ({0: waits()}, {1: gone({"0": 5}), 2: ENDED}, {2}),
        ({0: waits()}, {1: gone({"0": 5}), 2: gone({"0": 6})}, set()),  # they have begun it: it is on its way
        ({0: waits(group="sub"), 1: RUNS}, {2: ENDED}, set()),  # the group is without rank 2
        ({0: waits()}, {2: gone({"0": 4}, threads=True)}, set()),  # a thread there may still begin it
        ({0: waits()}, {2: gone({})}, {2}),  # none was begun there since the group is as it is
        ({0: waits()}, {2: gone({}, known=False)}, set()),  # or it is forgotten
        ({0: waits()}, {2: {"line": None, "waits": None, "silent": True}}, set()),
        ({0: waits("broadcast"), 1: RUNS}, {2: ENDED}, set()),  # rank 1 may be the root, and come
        ({0: waits("broadcast"), 1: waits("broadcast")}, {2: ENDED}, {2}),
        ({0: waits("recv", None, None)}, {1: ENDED, 2: ENDED}, set()),  # it may be on its way
        ({0: waits("new_group", None, None)}, {1: ENDED, 2: ENDED}, {1, 2}),
        ({0: waits("new_group", None, None), 1: RUNS}, {2: ENDED}, set()),  # it may be one of 0 and 1 alone
        ({0: RUNS}, {1: ENDED, 2: ENDED}, set()),
    ],
)
def test_who_is_missed(
    monkeypatch: pytest.MonkeyPatch, running: dict[int, Any], ended: dict[int, Any], missed: set[int]
) -> None:
    now = [100.0]
    monkeypatch.setattr(left.time, "monotonic", lambda: now[0])
    watch, found = left.Left(), []
    while now[0] < 103.0:
        found.append(watch.look(running, ended, WORLD))
        now[0] += watch.next_look(True)
    assert found[0] == frozenset() and found[-1] == missed  # never at the first look
    assert watch.next_look(False) == float("inf")


def test_who_moves_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(left.time, "monotonic", lambda: now[0])
    watch = left.Left()
    for step in range(20):
        now[0] += left.EVERY
        assert not watch.look({0: waits(at=step // 2)}, {2: ENDED}, WORLD)


def test_the_call_of_the_cell_is_named() -> None:
    text = stalls.cannot_go_on({0: {**waits("all_gather"), "call": "gather"}}, [1, 2], [0, 1])
    assert text.startswith("the ranks wait for each other and cannot go on: rank 0 is in gather at cell line 3; ")
    assert text.endswith("rank 1 has finished the cell; this needs rank 2 too, and the cell runs without (--ranks 0,1)")
