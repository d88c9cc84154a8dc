"""Random state of its own: what draws inside draws from it, and outside nothing has changed."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from nbdist.data import sandbox
from nbdist.data.sandbox import Sandbox


def drawn() -> list[Any]:
    """From each generator, one of a pair, the rest of which is kept."""
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.randn(()).item()]


def seeded() -> None:
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)


def check() -> None:
    seeded()
    alone = [drawn() for _ in range(8)]
    inside = Sandbox(7)
    with inside:
        whole = [drawn() for _ in range(6)]
    seeded()
    mine, theirs = Sandbox(7), []
    for count in range(8):
        theirs.append(drawn())
        with mine:
            if count % 2:
                assert drawn() == whole[count // 2]
    assert theirs == alone
    seeded()
    with Sandbox(7):
        assert drawn() == whole[0]
        with Sandbox(8):
            assert drawn() != whole[1]
        assert drawn() == whole[1]
    assert drawn() == alone[0]


def test_what_draws_outside_is_not_disturbed() -> None:
    check()


def test_a_failure_inside_leaves_all_as_it_was() -> None:
    seeded()
    alone = drawn()
    seeded()
    with pytest.raises(ZeroDivisionError), Sandbox(1):
        drawn()
        raise ZeroDivisionError
    assert drawn() == alone


def test_where_states_cannot_be_exchanged_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_exchanges", False)
    monkeypatch.delattr(numpy.random, "set_bit_generator")
    check()


def test_another_bit_generator_of_numpy() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(5))
    try:
        alone = [numpy.random.rand() for _ in range(3)]
        numpy.random.set_bit_generator(numpy.random.PCG64(5))
        mine, theirs = Sandbox(1), []
        for _ in range(3):
            theirs.append(numpy.random.rand())
            with mine:
                numpy.random.rand()
        assert theirs == alone
    finally:
        numpy.random.set_bit_generator(usual)
