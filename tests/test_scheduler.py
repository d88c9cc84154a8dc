"""Prepared schedulers: one step of theirs is one optimizer step."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from nbdist import Accelerator
from nbdist.scheduler import PreparedScheduler, is_scheduler
from nbdist.shipping.exporters import exporter_of
from nbdist.strategies.optimizer import PreparedOptimizer
from tests.ranks import run_ranks
from tests.training import linear_at_zero


class Duck:
    """What a library of its own may bring: no class of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.updates = optimizer, 0

    def step(self, add: int = 1) -> int:
        self.updates += add
        return self.updates

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batches: Any) -> list[float]:
    rates = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(-model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def _rates(rank: int, ranks: int) -> dict[str, list[float]]:
    """SC1, with its variant; and the scheduler bound to the bare and to the prepared optimizer, before and after."""
    found = {}
    for steps, rows in ((1, 4 * ranks), (2, 8)):
        for how in ("together", "scheduler last", "scheduler first", "on the prepared one"):
            accelerator = Accelerator(gradient_accumulation_steps=steps)
            own = linear_at_zero()
            sgd: Any = torch.optim.SGD(own.parameters(), lr=1.0)
            if how == "on the prepared one":
                sgd = accelerator.prepare(sgd)
            decay: Any = lr_scheduler.LambdaLR(sgd, lambda step: 1 - step / 8)
            if how == "scheduler first":
                decay = accelerator.prepare(decay)
            model, sgd, loader = accelerator.prepare(own, sgd, torch.utils.data.DataLoader(torch.ones(rows, 1)))
            if how in ("together", "scheduler last", "on the prepared one"):
                decay = accelerator.prepare(decay)
            found[f"{steps} {how}"] = train(accelerator, model, sgd, decay, loader)
    return found


@pytest.mark.ranks
def test_one_step_is_one_optimizer_step() -> None:
    """SC1."""
    for found in run_ranks(_rates, 2):
        assert len(found) == 8
        for name, rates in found.items():
            assert rates == ([0.875, 0.75, 0.625, 0.5] if name.startswith("1") else [1, 0.875, 0.875, 0.75]), name


SGD = {"lr": 1.0, "momentum": 0.9}
MADE: dict[str, Any] = {
    "LambdaLR": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step),
    "MultiplicativeLR": lambda sgd: lr_scheduler.MultiplicativeLR(sgd, lambda step: 0.5),
    "StepLR": lambda sgd: lr_scheduler.StepLR(sgd, 2),
    "MultiStepLR": lambda sgd: lr_scheduler.MultiStepLR(sgd, [1, 3]),
    "ConstantLR": lambda sgd: lr_scheduler.ConstantLR(sgd, 0.1, 2),
    "LinearLR": lambda sgd: lr_scheduler.LinearLR(sgd, 0.1),
    "ExponentialLR": lambda sgd: lr_scheduler.ExponentialLR(sgd, 0.5),
    "SequentialLR": lambda sgd: lr_scheduler.SequentialLR(
        sgd, [lr_scheduler.ConstantLR(sgd, 0.1, 1), lr_scheduler.ExponentialLR(sgd, 0.5)], [1]
    ),
    "PolynomialLR": lambda sgd: lr_scheduler.PolynomialLR(sgd),
    "CosineAnnealingLR": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 10),
    "ChainedScheduler": lambda sgd: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(sgd, 0.5)]),
    "ReduceLROnPlateau": lambda sgd: lr_scheduler.ReduceLROnPlateau(sgd, patience=0),
    "CyclicLR": lambda sgd: lr_scheduler.CyclicLR(sgd, 0.1, 1.0),
    "CosineAnnealingWarmRestarts": lambda sgd: lr_scheduler.CosineAnnealingWarmRestarts(sgd, 3),
    "OneCycleLR": lambda sgd: lr_scheduler.OneCycleLR(sgd, 1.0, 10),
}


def test_the_list_has_all_of_torchs() -> None:
    """But for what is no scheduler by itself."""
    theirs = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert theirs == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_every_scheduler_of_torch(name: str) -> None:
    accelerator, own, right = Accelerator(gradient_accumulation_steps=2), linear_at_zero(), linear_at_zero()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), **SGD))
    plain = torch.optim.SGD(right.parameters(), **SGD)
    inner, expected = MADE[name](optimizer), MADE[name](plain)
    scheduler = accelerator.prepare(inner)
    assert type(scheduler) is PreparedScheduler and isinstance(scheduler, type(inner))
    metrics = (1.0,) if name == "ReduceLROnPlateau" else ()
    for _ in range(5):
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(-model(torch.ones(1, 1)).mean())
                optimizer.step()
                scheduler.step(*metrics)
                optimizer.zero_grad()
        (-right(torch.ones(1, 1)).mean()).backward()
        plain.step()
        expected.step(*metrics)
        plain.zero_grad()
        assert scheduler.get_last_lr() == expected.get_last_lr()
        assert own.weight.item() == pytest.approx(right.weight.item())
    assert scheduler.state_dict().keys() == expected.state_dict().keys()


def test_it_is_the_users_own_to_the_eye() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    inner = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 3)
    scheduler = accelerator.prepare(inner)
    assert isinstance(scheduler, lr_scheduler.LRScheduler) and "StepLR" in repr(scheduler)
    assert scheduler.scheduler is inner and scheduler.step_size == 3 and scheduler.optimizer is inner.optimizer
    scheduler.step_size = 1
    assert inner.step_size == 1 and "step_size" in dir(scheduler)
    kept = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(kept)
    assert inner.last_epoch == 0
    with pytest.raises(AttributeError, match="no_such"):
        scheduler.no_such  # noqa: B018
    with pytest.raises(TypeError, match="belongs to its rank"):
        pickle.dumps(scheduler)
    exporter = exporter_of(type(scheduler))
    assert exporter is not None and exporter.unwrap is not None and exporter.unwrap(scheduler) is inner


def test_what_looks_like_one() -> None:
    model = linear_at_zero()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    assert is_scheduler(Duck(sgd)) and is_scheduler(Duck(PreparedOptimizer(sgd)))
    assert not is_scheduler(Duck(None)) and not is_scheduler(sgd) and not is_scheduler(model)
    assert not is_scheduler(lr_scheduler.StepLR) and not is_scheduler("step")

    class OptimizerAround(Duck):  # it steps its optimizer itself
        def zero_grad(self) -> None: ...

    assert not is_scheduler(OptimizerAround(sgd))
    accelerator = Accelerator(gradient_accumulation_steps=2)
    duck = accelerator.prepare(Duck(sgd))
    assert isinstance(duck, Duck) and duck.step(3) == 3
    with accelerator.accumulate(model):
        assert duck.step() is None and duck.updates == 3


def test_a_scheduler_that_steps_by_itself() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = linear_at_zero()
    optimizer, scheduler = accelerator.prepare(
        optimizer := torch.optim.SGD(model.parameters(), lr=1.0), lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    assert train(accelerator, model, optimizer, scheduler, [torch.ones(1, 1)] * 3) == [0.5, 0.25, 0.125]


def test_stepped_twice_it_does_what_torch_does() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer, scheduler = accelerator.prepare(sgd, lr_scheduler.ExponentialLR(sgd, 0.5))
    accelerator.backward(-model(torch.ones(1, 1)).mean())
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


class Skipping:
    """Stands where a loss scaler would: the second step overflows."""

    def __init__(self) -> None:
        self.steps = 0

    def seed(self, factor: float) -> float:
        return factor * 2

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 2

    def step(self, optimizer: torch.optim.Optimizer, closure: Any) -> tuple[Any, bool]:
        self.steps += 1
        self.unscale(optimizer)
        if self.steps == 2:
            return None, True
        return optimizer.step(), False


@pytest.mark.parametrize("on_prepared", [True, False])
def test_a_skipped_step_with_a_mocked_scaler(on_prepared: bool) -> None:
    from nbdist.state import step_boundary

    accelerator, own = Accelerator(gradient_accumulation_steps=2), linear_at_zero()
    accelerator._windows.scaler = Skipping()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    bound = optimizer if on_prepared else optimizer.optimizer
    scheduler = accelerator.prepare(lr_scheduler.LambdaLR(bound, lambda step: 1.0 / (1 + step)))
    before, skipped = step_boundary.made, []
    rates = []
    for _ in range(3):
        rates += train(accelerator, model, optimizer, scheduler, [torch.ones(1, 1)] * 2)[1:]
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert rates == [0.5, 0.5, pytest.approx(1 / 3)] and skipped == [False, True, False]
    assert step_boundary.made - before == 2 and own.weight.item() == 1.5
