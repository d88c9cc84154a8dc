"""Gradients that an open window of another model has gathered stay as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbdist import Accelerator
from nbdist.kwargs import DistributedDataParallelKwargs, GradientAccumulationPlugin
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def pair(steps: int = 2, each: bool = False, buckets: bool = False) -> tuple[Any, ...]:
    """An accelerator, a critic and a maker of weight 1, and their optimizers; the maker's does nothing."""
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
    options = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)] if buckets else []
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, kwargs_handlers=options)
    models = [linear_at_zero(), linear_at_zero()]
    for model in models:
        model.weight.data.fill_(1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(models, (1.0, 0.0), strict=True)]
    return accelerator, *accelerator.prepare(*models, *optimizers)


def _gan(rank: int, ranks: int) -> set[float]:
    """The critic's weight after a window of two, and the maker's pass through it in between, in all idioms."""
    found = set()
    for number in range(16):
        frozen, outside, each, buckets = (bool(number >> bit & 1) for bit in range(4))
        accelerator, critic, maker, one, other = pair(2, each, buckets)
        for x in accelerator.prepare(DataLoader(1 + torch.arange(2.0 * ranks)[:, None])):
            with accelerator.accumulate(critic):
                one.zero_grad()
                accelerator.backward(critic(x).mean())
                one.step()
            if frozen:
                critic.requires_grad_(False)
            if outside:
                accelerator.backward(100 * critic(maker(x)).mean())
            else:
                with accelerator.accumulate(maker):
                    accelerator.backward(100 * critic(maker(x)).mean())
                    other.step()
                    other.zero_grad()
            critic.requires_grad_(True)
        found.add(round(accelerator.unwrap_model(critic).weight.item(), 5))
    return found


@pytest.mark.ranks
def test_the_pass_of_a_maker_leaves_the_critics_window_alone() -> None:
    assert _gan(0, 1) == {-0.5}  # 1 - (1 + 2) / 2
    assert run_ranks(_gan, 2) == [{-1.5}] * 2  # 1 - (1 + 2 + 3 + 4) / 4


def test_also_when_the_backward_raises() -> None:
    accelerator, critic, maker, *_ = pair()
    one = torch.ones(1, 1)
    with accelerator.accumulate(critic):
        accelerator.backward(critic(one).mean())
    gradient = critic.weight.grad
    x = maker(one)
    x.register_hook(lambda _: 1 / 0)  # when the critic has its gradient of it
    with pytest.raises(ZeroDivisionError), accelerator.accumulate(maker):
        accelerator.backward(critic(x).mean())
    assert critic.weight.grad is gradient and gradient.item() == 0.5


def test_a_backward_outside_that_is_for_the_open_window_itself_is_added() -> None:
    """There is a maker too, but this loss does not go through it."""
    accelerator, critic, maker, one, _ = pair()
    x = torch.ones(1, 1)
    for _ in range(2):
        with accelerator.accumulate(critic):
            accelerator.backward(critic(x).mean())
            one.step()
        if accelerator.sync_gradients:
            break
        accelerator.backward(10 * critic(x).mean())
    assert critic.weight.item() == 1 - (1 + 10)
    assert maker.weight.grad is None


def test_blocks_around_each_other_are_for_one_loss() -> None:
    accelerator, first, second, *_ = pair()
    for _ in range(2):
        with accelerator.accumulate(first), accelerator.accumulate(second):
            accelerator.backward(second(first(torch.ones(1, 1))).mean())
    assert first.weight.grad.item() == second.weight.grad.item() == 1


def test_what_is_shared_between_models_gathers_from_both() -> None:
    accelerator, first, second, *_ = pair()
    second.register_parameter("tied", first.weight)
    for model in (first, second):
        with accelerator.accumulate(model):
            accelerator.backward(first(torch.ones(1, 1)).mean())
    assert first.weight.grad.item() == 1


def test_a_window_whose_loop_is_over_holds_nothing() -> None:
    accelerator, critic, maker, one, _ = pair()
    for x in accelerator.prepare(DataLoader(torch.ones(4, 1))):
        with accelerator.accumulate(critic):
            accelerator.backward(critic(x).mean())
        break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        critic.zero_grad()
        accelerator.backward(3 * critic(maker(torch.ones(1, 1))).mean())
        one.step()
    assert critic.weight.item() == 1 - 3
