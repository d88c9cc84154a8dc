"""Ctrl-C while something must not be left half done."""

from __future__ import annotations

import signal

import pytest

from nbdist.launchers.shield import on_press, shielded


def test_a_press_is_raised_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
        done.append("inside")
    assert done == ["inside"]


def test_within_another_the_outer_one_tells() -> None:
    """The inner one ends in the middle of what the outer one protects."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        with shielded():
            with shielded():
                signal.raise_signal(signal.SIGINT)
            done.append("between")
            with on_press(lambda: done.append("pressed")), shielded():
                signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["between", "pressed"]


def test_without_a_press_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with shielded():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_inside_gets_through() -> None:
    with pytest.raises(ValueError), shielded():
        raise ValueError
