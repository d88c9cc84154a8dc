"""Ranks that wait for each other: what is said, and when it is given up."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.launchers import stalls


def place(line: int, waits: str | None = None, number: int = 1, group: str = "0", **more: Any) -> dict[str, Any]:
    wait = {"name": waits, "number": number, "group": group} if waits else None
    return {"line": line, "function": "<module>", "top": "f", "waits": wait, **more}


class Done(dict):
    """A `done` message, as far as it is looked at."""


FINISHED = Done(ran=True, groups=[("0", (0, 1))])


def test_who_is_where() -> None:
    text = stalls.tell({1: place(14, "all_gather"), 0: place(22, "barrier")})
    assert text == "rank 0 is in barrier at cell line 22; rank 1 is in all_gather at cell line 14"


def test_a_rank_that_does_not_answer() -> None:
    assert "native code" in stalls.tell({0: {"silent": True}})


def test_a_function_of_the_cell_is_named() -> None:
    assert "at cell line 3 (step)" in stalls.tell({0: {**place(3), "function": "step"}})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])
    return now


def looks(clock: list[float], watch: stalls.Watch, places: dict, done: dict, seconds: float) -> stalls.Verdict:
    verdict, end = stalls.Verdict(), clock[0] + seconds
    while clock[0] < end and not verdict.line:
        clock[0] += max(0.1, watch.next_look())
        verdict = watch.look(places, done)
    return verdict


def test_two_different_collectives_are_given_up(clock: list[float]) -> None:
    watch = stalls.Watch(3.0)
    verdict = looks(clock, watch, {0: place(2, "all_gather"), 1: place(4, "barrier")}, {}, 10)
    assert verdict.hopeless
    assert "all_gather at cell line 2" in verdict.line
    assert "barrier at cell line 4" in verdict.line


def test_waiting_for_a_rank_that_has_finished_is_given_up(clock: list[float]) -> None:
    verdict = looks(clock, stalls.Watch(3.0), {1: place(2, "all_reduce")}, {0: FINISHED}, 10)
    assert verdict.hopeless
    assert "rank 0 has finished" in verdict.line


def test_a_slow_collective_that_all_are_in_is_said_and_goes_on(clock: list[float]) -> None:
    verdict = looks(clock, stalls.Watch(3.0), {0: place(2, "all_reduce"), 1: place(2, "all_reduce")}, {}, 10)
    assert verdict.line
    assert not verdict.hopeless


def test_waiting_for_a_rank_that_computes_is_said_and_goes_on(clock: list[float]) -> None:
    verdict = looks(clock, stalls.Watch(3.0), {0: place(2, "all_reduce"), 1: place(9)}, {}, 10)
    assert "rank 1 is in f() at cell line 9" in verdict.line
    assert not verdict.hopeless


def test_ranks_that_make_progress_are_left_alone(clock: list[float]) -> None:
    watch = stalls.Watch(3.0)
    for number in range(40):
        clock[0] += watch.next_look() or 0.1
        verdict = watch.look({0: place(2, "all_reduce", number), 1: place(2, "all_gather", number)}, {})
        assert not verdict.line


def test_other_groups_are_no_proof(clock: list[float]) -> None:
    places = {0: place(2, "all_reduce", group="1"), 1: place(4, "all_gather", group="2")}
    assert not looks(clock, stalls.Watch(3.0), places, {}, 10).hopeless
