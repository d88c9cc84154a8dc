"""Accumulation windows over two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nbdist import Accelerator, state
from nbdist.kwargs import GradientAccumulationPlugin
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def made(steps: int, data: Any = None, batch: int = 1, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    own = linear_at_zero()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    loader = None if data is None else accelerator.prepare(DataLoader(data, batch_size=batch))
    return accelerator, model, optimizer, loader


def trained(
    accelerator: Any, model: Any, optimizer: Any, batches: Any, weigh: Any = None, last: Any = None
) -> list[float]:
    """The weight after every micro-batch."""
    weights = []
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model, last=None if last is None else last(number)):
            accelerator.backward(-model(batch).mean(), None if weigh is None else weigh(batch, number))
            optimizer.step()
            optimizer.zero_grad()
        weights.append(round(model.module.weight.item(), 5))
    return weights


class Reductions:
    """Counts how often DDP shares a model's gradients; it has one bucket."""

    def __init__(self, model: Any) -> None:
        self.count = 0

        def hook(state: Any, bucket: Any) -> Any:
            self.count += 1
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        hook.__annotations__.clear()  # as text they are not what DDP compares them with
        model.register_comm_hook(None, hook)


def _windows(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = torch.tensor([[1.0]]) if rank == 0 else torch.full((3, 1), 5.0)
    numbers = torch.arange(1.0, 9.0)[:, None]

    accelerator, model, *_ = made(1)
    accelerator.backward(model(rows).mean(), weight=len(rows))
    found["GA1"] = model.module.weight.grad.item()
    model.zero_grad()
    with accelerator.accumulate(model):
        accelerator.backward(model(rows).mean(), weight=len(rows))
    found["GA1 in a window"] = model.module.weight.grad.item()

    found["GA3"] = trained(*made(2, torch.ones(6, 1)))
    found["GA10"] = [trained(*made(2, numbers, 2))[-1], trained(*made(4, numbers, 1))[-1]]
    found["DL5"] = trained(*made(1, torch.ones(3, 1)))

    # token counts, with a stand-in at the end that says 7
    tokens = torch.tensor([1.0, 5, 5, 5, 2, 7, 1])[:, None]
    found["tokens"] = trained(*made(2, tokens), lambda batch, _: batch.sum())[-1]
    found["none here"] = trained(*made(2, torch.ones(4, 1)), lambda *_: rank)[-1]
    found["nobody"] = trained(*made(2, torch.ones(4, 1)), lambda *_: 0)[-1]

    accelerator, model, optimizer, loader = made(3, torch.ones(7, 1))
    counted = Reductions(model)
    trained(accelerator, model, optimizer, loader)  # 3 on each rank, and 1: two windows
    found["shared"] = counted.count
    accelerator, model, optimizer, loader = made(
        1, torch.ones(8, 1), gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    )
    counted = Reductions(model)
    found["shared each time"] = trained(accelerator, model, optimizer, loader), counted.count
    accelerator, model, optimizer, loader = made(
        1, torch.arange(8.0)[:, None],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
    )  # fmt: skip
    found["shared each time, weighed"] = trained(accelerator, model, optimizer, loader, lambda *_: 1 + rank)[-1]

    # rows of a batch, by the number of steps and by hand
    accelerator, model, optimizer, loader = made(4, torch.arange(1.0, 17.0)[:, None], 4)
    found["slices"] = trained(accelerator, model, optimizer, (row for batch in loader for row in batch.split(1)))
    accelerator, model, optimizer, loader = made(1, torch.arange(1.0, 7.0)[:, None], 3)
    parts = (part for batch in loader for part in batch.split(2))
    found["by hand"] = trained(
        accelerator, model, optimizer, parts, lambda part, _: len(part), lambda number: number % 2 == 1
    )

    accelerator, model, optimizer, loader = made(2, torch.arange(1.0, 9.0)[:, None], 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if number or rank == 0:
                    accelerator.backward(-model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    found["left out on one"] = model.module.weight.item(), any("no backward in a micro" in str(one) for one in told)
    return found


@pytest.mark.ranks
def test_windows_over_two_ranks() -> None:
    for rank, found in enumerate(run_ranks(_windows, 2)):
        assert found["left out on one"] == ((1 + 2 + 5 + 6 + 7 + 8) / 8, rank == 1)
        assert found["GA1"] == found["GA1 in a window"] == 4.0
        assert found["GA3"] == [0, 1, 2]
        assert found["GA10"] == [4.5, 4.5]
        assert found["DL5"] == [1, 2]
        first, second = torch.tensor([1.0, 5, 5, 5]), torch.tensor([2.0, 7, 1])
        right = sum((one.pow(2).sum() / one.sum()).item() for one in (first, second))
        assert found["tokens"] == pytest.approx(right, abs=1e-5)
        assert found["none here"] == 1 and found["nobody"] == 0
        assert found["shared"] == 2
        assert found["shared each time"] == ([0, 1, 1, 2], 4)
        assert found["shared each time, weighed"] == pytest.approx((2 + 2 * 1 + 2 * 3) / 6 + (4 + 6 + 2 * 12) / 6)
        assert found["slices"] == [0, 0, 0, 4.5, 4.5, 4.5, 4.5, 17]
        assert found["by hand"] == [0, 3.5]


def _sharing(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    accelerator, model, *_ = made(3)
    one = torch.full((1, 1), 1.0 + 2 * rank)

    def gradient() -> float:
        return model.module.weight.grad.item()

    def backward() -> float:
        accelerator.backward(model(one).mean())
        value = gradient()
        model.module.weight.grad.zero_()  # zero_grad would not wipe an open window
        return value

    with accelerator.no_sync(model):
        found["no_sync"] = backward()
    found["after it"] = backward()
    with accelerator.accumulate(model):
        found["in a window"] = backward()
        with accelerator.trigger_sync_in_backward(model):
            found["triggered"] = backward()
        found["in it again"] = backward()
    found["outside of the open window"] = backward()
    with accelerator.accumulate(model), accelerator.no_sync(model.module):
        found["in both"] = backward()
    found["flag"] = model.require_backward_grad_sync
    try:
        with accelerator.accumulate(model, last=False):
            raise ValueError
    except ValueError:
        found["flag after an exception"] = model.require_backward_grad_sync
    with accelerator.no_sync(model):
        a = model(one).mean()
        accelerator.backward(a)
        b = model(one).mean()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(b)
    found["two forwards"] = gradient()
    return found


@pytest.mark.ranks
def test_where_gradients_are_shared() -> None:
    for rank, found in enumerate(run_ranks(_sharing, 2)):
        mine = 1.0 + 2 * rank
        third = pytest.approx(mine / 3)
        assert found == {
            "no_sync": mine,
            "after it": 2.0,
            "in a window": third,
            "triggered": pytest.approx(2 / 3),
            "in it again": third,
            "outside of the open window": 2.0,
            "in both": third,
            "flag": True,
            "flag after an exception": True,
            "two forwards": 4.0,
        }, found


def _bad(rank: int, ranks: int) -> list[Any]:
    """One rank says something that is no weight: everybody hears of it, and goes on."""
    told = []
    bad = [-1, float("nan"), float("inf"), "x", torch.ones(2), torch.tensor(-2.0)]
    for steps in (1, 2):
        for weight in bad:
            for at in range(steps):
                accelerator, model, optimizer, _ = made(steps)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        trained(
                            accelerator, model, optimizer, [torch.ones(1, 1)] * steps,
                            lambda _, number, at=at, weight=weight: weight if rank and number == at else 1,
                        )  # fmt: skip
                    told.append(None)
                except ValueError as error:
                    told.append(str(error))
                told.append(trained(accelerator, model, optimizer, [torch.ones(1, 1)] * steps, lambda *_: 3)[-1])
    accelerator, model, *_ = made(2)
    try:
        accelerator.backward(model(torch.ones(1, 1)).mean(), bad[rank - 1] if rank else 1)
    except ValueError as error:
        told.append(str(error))
    accelerator, model, optimizer, _ = made(2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).mean())
    try:
        with warnings.catch_warnings(), accelerator.accumulate(model):
            warnings.simplefilter("ignore")
            optimizer.step()
    except RuntimeError as error:
        told.append(str(error))
    return told + _on_some(rank)


def _on_some(rank: int) -> list[Any]:
    """Only one rank gives a weight, in a cell that begins with a backward of that rank alone, of another model."""
    told = []
    for steps in (1, 2):
        accelerator, model, optimizer, _ = made(steps)
        rows = torch.ones(1, 1)
        state.step_boundary.reset()
        if rank and steps == 1:
            accelerator.backward(torch.nn.Linear(1, 1)(rows).mean())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trained(accelerator, model, optimizer, [rows] * steps, lambda *_: 1 if rank else None)
        except RuntimeError as error:
            told.append(str(error))
        told.append(trained(accelerator, model, optimizer, [rows] * steps, lambda *_: 3)[-1])
    return told


@pytest.mark.ranks
def test_a_bad_weight_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(_bad, 2)
    assert first[-4:] == second[-4:]
    for text, weight in zip(first[-4::2], first[-3::2], strict=True):
        assert "by all ranks or by none: rank 0 gives none; rank 1 gives one." in text and weight == 1
    del first[-4:], second[-4:]
    assert len(first) == len(second) == 2 * 6 + 2 * 12 + 2
    assert all("another rank has passed a weight" in text for text in first[:-2:2])
    assert all(text.startswith("weight ") for text in second[:-2:2])
    assert set(first[1:-2:2]) == set(second[1:-2:2]) == {1}
    assert "another rank" in first[-2] and "weight is -1" in second[-2]
    assert "called no backward" in first[-1] and first[-1] == second[-1]
