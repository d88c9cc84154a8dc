"""What a micro-batch weighs when several loaders have delivered for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbdist import Accelerator
from tests.ranks import run_ranks
from tests.training import linear_at_zero


class Run:
    """SGD(lr=1) of one weight that starts at 0."""

    def __init__(self, steps: int = 1) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps)
        self.own = linear_at_zero()
        self.model, self.optimizer = self.accelerator.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=1.0))

    def loader(self, values: list[float], batch: int) -> Any:
        return self.accelerator.prepare(
            DataLoader(torch.tensor(values, dtype=torch.float32)[:, None], batch_size=batch)
        )

    def step(self, *batches: torch.Tensor, inside: bool = True) -> None:
        def act() -> None:
            self.accelerator.backward(-sum(self.model(batch).mean() for batch in batches))
            self.optimizer.step()
            self.optimizer.zero_grad()

        if inside:
            with self.accelerator.accumulate(self.model):
                act()
        else:
            act()

    @property
    def weight(self) -> float:
        return round(self.own.weight.item(), 5)


def _zipped(rank: int, ranks: int) -> list[float]:
    found = []
    for inside, steps in ((True, 1), (True, 2), (False, 1)):
        for turned in (False, True):
            run = Run(steps)
            many, one = run.loader([1, 1, 1, 5], 4 // ranks), run.loader([10], 4 // ranks)
            for pair in zip(one, many) if turned else zip(many, one):  # noqa: B905 - either may be longer
                run.step(*pair, inside=inside)
            found.append(run.weight)
    return found


@pytest.mark.ranks
def test_zip_weighs_the_same_either_way_round() -> None:
    """One of the two has only a stand-in on rank 1."""
    assert _zipped(0, 1) == [12.0] * 6
    assert run_ranks(_zipped, 2) == [[12.0] * 6] * 2


@pytest.mark.parametrize("turned", [False, True])
def test_micro_batches_weigh_by_the_largest_of_those_beside(turned: bool) -> None:
    run = Run(2)
    large, small = run.loader([1, 1, 1, 4], 3), run.loader([0, 0], 1)
    for pair in zip(small, large, strict=True) if turned else zip(large, small, strict=True):
        run.step(pair[turned])
    assert run.weight == 7 / 4


def test_what_is_not_beside_does_not_weigh() -> None:
    """A loop around it, and one that was peeked at and is still held."""
    run = Run(2)
    peeked = iter(run.loader([0] * 16, 8))
    next(peeked)
    for _ in run.loader([0] * 8, 8):
        for batch in run.loader([1, 1, 4], 2):
            run.step(batch)
    assert run.weight == 2


def test_asked_once_it_weighs_once() -> None:
    """Four, then one by one: the first window has 4 + 1 rows."""
    run = Run(2)
    now_and_then = iter(run.loader([0] * 8, 4))
    for number, batch in enumerate(run.loader([1, 6, 1, 1], 1)):
        if number == 0:
            next(now_and_then)
        run.step(batch)
    assert run.weight == (4 * 1 + 6) / 5 + 1
