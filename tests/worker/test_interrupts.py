"""Signals raise KeyboardInterrupt in user code, and nowhere else."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.shipping.wire import HARD_SIGNAL
from nbdist.worker.interrupts import Interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM, HARD_SIGNAL)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    trace = sys.gettrace()
    made = Interrupts()
    made.files.add("cell")
    made.begin()
    yield made
    made.end()
    sys.settrace(trace)
    for number, handler in before.items():
        signal.signal(number, handler)


def run(interrupts: Interrupts, source: str, **names: Any) -> dict[str, Any]:
    """A cell, as the rank runs it; `hard()` and `soft()` signal this process."""
    names.update(hard=lambda: signal.raise_signal(HARD_SIGNAL), soft=lambda: signal.raise_signal(signal.SIGINT), log=[])
    try:
        interrupts.running = True
        exec(compile(source, "cell", "exec"), names)
    finally:
        interrupts.end()
    return names


@pytest.mark.parametrize("number", [signal.SIGINT, HARD_SIGNAL])
def test_outside_of_user_code_nothing_happens(interrupts: Interrupts, number: int) -> None:
    interrupts.end()
    signal.raise_signal(number)
    assert not interrupts.asked


def test_user_code_is_interrupted_and_marked(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupts, "soft()")
    assert interrupts.asked
    interrupts.begin()
    assert not interrupts.asked


def test_what_a_cell_did_to_the_handlers_is_undone(interrupts: Interrupts) -> None:
    run(interrupts, "import signal\nfor it in numbers: signal.signal(it, signal.SIG_IGN)", numbers=SIGNALS)
    interrupts.begin()
    with pytest.raises(KeyboardInterrupt):
        run(interrupts, "soft()")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_rarer_signal_gets_out_of_code_that_swallows(interrupts: Interrupts) -> None:
    """At every line of the cell, `except` bodies and functions of the cell included."""
    log: list[str] = []
    source = """
def work():
    while True:
        try:
            if len(rounds) > 5: hard()
            rounds.append(1)
        except BaseException:
            log.append("swallowed")
            continue
work()
"""
    with pytest.raises(KeyboardInterrupt):
        run(interrupts, source, rounds=log)
    assert "swallowed" not in log
    assert len(log) == 6


def test_the_plain_signal_can_be_swallowed(interrupts: Interrupts) -> None:
    names = run(interrupts, "try: soft()\nexcept KeyboardInterrupt: log.append('swallowed')")
    assert names["log"] == ["swallowed"]


def test_code_of_libraries_is_not_traced(interrupts: Interrupts) -> None:
    """Only lines of cells raise: a library's `finally` runs to its end."""
    library: dict[str, Any] = {"log": []}
    code = "def work(hard):\n    try: hard()\n    finally:\n        log.append('tidy')\n        log.append('up')\n"
    exec(compile(code, "library", "exec"), library)
    with pytest.raises(KeyboardInterrupt):
        run(interrupts, "work(hard)", work=library["work"])
    assert library["log"] == ["tidy", "up"]


def test_the_next_cell_is_not_traced(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupts, "hard()")
    assert sys.gettrace() is None
    interrupts.begin()
    assert run(interrupts, "log.append(1)\nlog.append(2)")["log"] == [1, 2]


def test_a_stop_that_comes_before_the_cells_code_is_not_lost(interrupts: Interrupts) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.start()
    assert interrupts.asked


def test_a_stop_of_the_last_cell_does_not_stop_the_next(interrupts: Interrupts) -> None:
    interrupts.end()
    signal.raise_signal(signal.SIGINT)
    interrupts.begin()
    interrupts.start()
    assert interrupts.running
