"""Which rank failed first, and its exception raised again."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from typing import Any

import pytest

from nbdist.launchers import failures
from nbdist.launchers.errors import RankExited, RankLost
from nbdist.shipping import Away, Home
from nbdist.worker.failure import describe


def told(error: BaseException, rank: int = 0, time: float = 1.0, ours: bool = False) -> dict[str, Any]:
    try:
        raise error
    except BaseException as raised:
        return {**describe(raised, rank, ours, lambda name: name == __file__), "time": time}


def came_back(error: BaseException) -> BaseException:
    """As from a rank: in words, and itself."""
    away, home = Away({}, 0), Home({}, 1)
    return failures.rebuild(told(error), home.raised(away.raised(error, lead=True)))


BOX = {"line": 4, "file": "cell", "age": 0.1, "fault": ""}


def test_the_first_by_time_that_we_did_not_cause() -> None:
    all_told = [
        told(KeyboardInterrupt(), 0, 0.5, ours=True),
        told(ValueError("late"), 2, 2.0),
        told(KeyError("a"), 1, 1.0),
    ]
    failure = failures.choose(all_told, {}, {})
    assert failure is not None
    assert failure.first is not None
    assert failure.first["rank"] == 1
    assert failure.also == [(2, "ValueError: late")]
    assert failure.cut_off == [0]
    assert "rank 1 failed first" in failure.note()


def test_equal_errors_are_folded() -> None:
    failure = failures.choose([told(ValueError("x"), rank, rank) for rank in range(4)], {}, {})
    assert failure is not None
    assert failure.note() == "on ranks 0, 1, 2, 3"


def test_a_death_explains_what_its_peers_then_say() -> None:
    peer = told(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 0, 5.01)
    failure = failures.choose([peer], {1: (-9, BOX)}, {1: 5.0})
    assert failure is not None
    error = failures.raisable(failure)
    assert isinstance(error, RankLost)
    assert "rank 1 was killed by SIGKILL (signal 9) at cell line 4" in str(error)
    assert error.__notes__ == ["cut off by that: rank 0"]


def test_an_error_before_a_death_is_the_cause() -> None:
    failure = failures.choose([told(ValueError("mine"), 0, 1.0)], {1: (7, BOX)}, {1: 5.0})
    assert failure is not None
    assert failure.first is not None
    assert failure.first["text"] == "mine"


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exited with code 3"), (-signal.SIGSEGV, "was killed by SIGSEGV (signal 11)"), (None, "ended")],
)
def test_exit_codes_in_words(code: int | None, text: str) -> None:
    assert failures.how_it_ended(code) == text


class Custom(Exception):
    def __init__(self, a: int, b: int) -> None:  # does not survive pickling: args hold one
        super().__init__(f"{a}")
        self.b = b


class Keyword(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Loud(LookupError):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v"),
        KeyError("k"),
        OSError(2, "No such file", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        Custom(1, 2),
        Keyword(code=3),
        Loud("x"),
        ExceptionGroup("many", [ValueError("a"), KeyError("b")]),
        StopIteration(4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_and_text_survive(error: BaseException) -> None:
    again = came_back(error)
    assert type(again).__name__ == type(error).__name__
    nearest = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    assert isinstance(again, nearest)
    if isinstance(error, Loud):
        assert str(again) == "<its __str__ raised ZeroDivisionError: >" and isinstance(again, Loud)
    else:
        assert str(again) == str(error)


def test_an_attribute_that_does_not_pickle_leaves_type_and_text() -> None:
    error = ValueError("bad value")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    again = came_back(error)
    with pytest.raises(ValueError, match="bad value"):
        raise again
    assert again.__notes__ == ["left on rank 0: .lock (a lock)"]


def test_an_exception_is_what_it_was() -> None:
    cause, error = Keyword(code=4), Custom(1, 2)
    error.__cause__, error.place = cause, [3]  # type: ignore[attr-defined]
    error.add_note("look here")
    again: Any = came_back(error)
    assert type(again) is Custom and (again.args, again.b, again.place) == (("1",), 2, [3])
    assert type(again.__cause__) is Keyword and again.__notes__ == ["look here"]


def test_members_of_a_group_lose_only_what_cannot_travel() -> None:
    inner = Custom(1, 2)
    inner.lock = threading.Lock()  # type: ignore[attr-defined]
    again: Any = came_back(ExceptionGroup("many", [inner, ExceptionGroup("more", [Keyword(code=5)])]))
    assert (type(again.exceptions[0]), again.exceptions[0].b) == (Custom, 2)
    assert str(again.exceptions[1].exceptions[0]) == "code 5"


def test_an_argument_that_cannot_travel_is_told_in_words() -> None:
    again = came_back(Custom.__mro__[1](threading.Lock(), 3))
    assert again.args[1] == 3 and "lock" in again.args[0]


def test_what_only_looks_like_it_says_so() -> None:
    class Held(ValueError):
        lock = threading.Lock()

    again = came_back(Held("text"))
    assert isinstance(again, ValueError) and str(again) == "text" and type(again) is not Held
    assert "this test_what_only_looks_like_it_says_so.<locals>.Held has the text alone" in again.__notes__[0]


def test_system_exit_never_ends_the_notebook() -> None:
    again = failures.rebuild(told(SystemExit(3), rank=1))
    assert isinstance(again, RankExited)
    assert str(again).startswith("rank 1 exited with code 3")


def test_causes_and_notes_are_kept() -> None:
    try:
        try:
            {}["k"]
        except KeyError as inner:
            outer = RuntimeError("outer")
            outer.add_note("look here")
            raise outer from inner
    except RuntimeError as error:
        description = told(error)
    again = failures.raisable(failures.Failure(description))
    assert isinstance(again.__cause__, KeyError)
    assert "look here" in again.__notes__


def test_the_traceback_is_the_ranks() -> None:
    def deep() -> None:
        raise ValueError("deep")

    try:
        deep()
    except ValueError as error:
        description = describe(error, 0, False, lambda name: name == __file__)
    again = failures.raisable(failures.Failure(description))
    names = [frame.name for frame in traceback.extract_tb(again.__traceback__)]
    assert names == ["test_the_traceback_is_the_ranks", "deep"]
    assert failures.cell_line(description["frames"], {__file__}) == description["frames"][0][1]


def test_an_empty_black_box_says_nothing() -> None:
    fd = os.memfd_create("box")
    try:
        assert failures.read_black_box(fd)["line"] == 0
    finally:
        os.close(fd)
