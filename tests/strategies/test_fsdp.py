"""Sharded models: units, gradients of windows, methods, edits; and what stays of it where torch has other insides."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from nbdist import state, strategies
from nbdist.strategies import fsdp_repair, sharded
from tests import training
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _without_the_insides(rank: int, ranks: int) -> dict[str, Any]:
    sharded.state = lambda unit: None  # type: ignore[assignment]
    case = {"rows": 13, "batch": 2, "sampler": "in order", "drop_last": False, "tokens": False, "momentum": 0.9}
    return training.prepared({**case, "epochs": 2, "accumulation": 2}, "fsdp")[0], case


def test_without_the_insides_of_torch_it_trains_all_the_same() -> None:
    for found, case in run_ranks(_without_the_insides, 2):
        steps = [list(range(13))[at : at + 4] for at in range(0, 13, 4)]
        right = training.in_plain_torch({**case, "accumulation": 2}, [steps] * 2)
        assert found == pytest.approx(right, abs=1e-6)


def _without_repairing(rank: int, ranks: int) -> str:
    fsdp_repair.can_repair = lambda: False
    strategy = strategies.create("fsdp", state.current())
    strategy.after_interrupt()  # there is nothing to repair
    model = strategy.wrap(nn.Linear(2, 2))
    assert isinstance(model, nn.Linear)
    with pytest.raises(NotImplementedError) as error:
        strategy.after_interrupt()
    return str(error.value)


def test_without_repairing_it_says_so() -> None:
    (told,) = run_ranks(_without_repairing, 1)
    assert "cannot be put right after an interrupt: make the model again" in told
