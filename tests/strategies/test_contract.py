"""What every strategy must do alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbdist import state, strategies, views
from nbdist.kwargs import PrecisionType
from nbdist.precision import Precision
from nbdist.registry import UnknownName
from tests import training
from tests.ranks import run_ranks

WHERE = pytest.mark.parametrize(
    ("name", "ranks"), [("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hybrid", 4)]
)


class _Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(3, 1), 3

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).mean()


def _steps(rank: int, ranks: int, name: str) -> dict[str, Any]:
    strategy = strategies.create(name, state.current())
    assert strategy.data_parallel_size == ranks and strategy.data_parallel_rank == rank
    module = training.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = strategy.wrap(module)
    strategy.rebind(optimizer)
    found: dict[str, Any] = {"own object": strategy.unwrap(model) is module, "bare": strategy.unwrap(module) is module}
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    part = {1: [rows], 2: [rows[:2], rows[2:]], 4: [rows[:1], rows[1:2], rows[2:3], rows[3:]]}[ranks][rank]

    def backward(factor: float) -> None:
        loss = model(part).pow(2).mean()
        strategy.backward(loss, torch.full_like(loss, factor))

    factor = len(part) * ranks / len(rows)
    for _ in range(3):
        backward(factor)
        found["norm"] = strategy.clip(model.parameters(), 0.05).item()
        optimizer.step()
        optimizer.zero_grad()
    found["trained"] = training.flat(module)

    for sync in (False, True):  # two micro-batches, shared once
        strategy.set_sync(model, sync)
        backward(factor / 2)
    strategy.scale_gradients(model.parameters(), 3.0)
    found["window"] = [value for one in module.parameters() for value in training.whole(one.grad).flatten().tolist()]

    optimizer.zero_grad()
    narrow = _Narrow()
    seen = strategy.wrap(narrow, lambda module: views.view(module, Precision(PrecisionType.BF16, keep_outputs=True)))
    loss = seen.loss(part)  # a method other than forward, in bfloat16
    found["precision"] = (str(loss.dtype), strategy.unwrap(seen) is narrow or views.bare(seen) is narrow, seen.size)
    strategy.backward(loss.float(), torch.tensor(factor))
    found["method"] = training.whole(narrow.linear.weight.grad).flatten().tolist()

    strategy.after_interrupt()
    optimizer.zero_grad()
    backward(factor)
    optimizer.step()
    found["after an interrupt"] = training.flat(module)
    strategy.teardown()
    return found


def _in_plain_torch() -> dict[str, Any]:
    module = training.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"own object": True, "bare": True}
    for _ in range(3):
        module(rows).pow(2).mean().backward()
        found["norm"] = nn.utils.clip_grad_norm_(module.parameters(), 0.05).item()
        optimizer.step()
        optimizer.zero_grad()
    found["trained"] = training.flat(module)
    (module(rows).pow(2).mean() * 3).backward()
    found["window"] = [value for one in module.parameters() for value in one.grad.flatten().tolist()]
    optimizer.zero_grad()
    found["precision"] = ("torch.bfloat16", True, 3)
    found["method"] = pytest.approx(rows.mean(0).tolist(), abs=0.02)
    module(rows).pow(2).mean().backward()
    optimizer.step()
    found["after an interrupt"] = training.flat(module)
    return found


@pytest.mark.ranks
@WHERE
def test_it_trains_as_plain_torch_does(name: str, ranks: int) -> None:
    right = _in_plain_torch()
    for found in run_ranks(_steps, ranks, name):
        assert found.keys() == right.keys()
        for key, value in right.items():
            numbers = key not in ("precision", "method")
            assert found[key] == (pytest.approx(value, abs=1e-6) if numbers else value), key


REST = {"drop_last": False, "momentum": 0.9, "epochs": 2}
CASES = [
    {"rows": rows, "batch": batch, "sampler": sampler, "tokens": tokens, **REST}
    for rows, batch in [(1, 4), (3, 1), (7, 2), (11, 3)]
    for sampler in ("in order", "stream")
    for tokens in (False, True)
]


@pytest.mark.ranks
@WHERE
def test_ragged_tails_through_the_accelerator(name: str, ranks: int) -> None:
    answers = run_ranks(training.prepared_on_rank, ranks, CASES, name)
    for index, case in enumerate(CASES):
        whole = case["batch"] * ranks
        steps = [list(range(case["rows"]))[at : at + whole] for at in range(0, case["rows"], whole)]
        right = training.in_plain_torch(case, [steps] * 2)
        for by_case in answers:
            assert by_case[index][0] == pytest.approx(right, abs=1e-6), case


def test_the_choice_comes_with_its_reason() -> None:
    one = state.Process(0, 0, 1, torch.device("cpu"), "", None, "")
    two = state.Process(0, 0, 2, torch.device("cpu"), "", "gloo", "")
    assert strategies.choose(one) == strategies.Choice("single", "there is one process")
    choice = strategies.choose(two)
    assert choice.name == "ddp" and "2 processes" in choice.reason
    assert strategies.create(None, one).reason == "there is one process"


def test_a_strategy_that_cannot_run_here_says_why() -> None:
    two = state.Process(0, 0, 2, torch.device("cpu"), "", "gloo", "")
    with pytest.raises(RuntimeError, match="train a model of its own"):
        strategies.create("single", two)
    on_mps = state.Process(0, 0, 1, torch.device("mps"), "", None, "")
    with pytest.raises(RuntimeError, match="runs on cpu, cuda, and the device is mps"):
        strategies.create("ddp", on_mps)
    with pytest.raises(UnknownName, match="did you mean 'ddp'"):
        strategies.create("dpp", two)
