"""LocalSGD: between two averages each rank trains its own replica, then all are the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbdist import Accelerator, LocalSGD
from nbdist.strategies.base import Strategy
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def _trained(rank: int, ranks: int, steps: int, accumulation: int, enabled: bool) -> dict[str, Any]:
    """Each micro-batch adds rank + 1 to the weight (divided by the accumulation)."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    own = nn.Sequential(linear_at_zero())
    own.register_buffer("mean", torch.zeros(1))
    own.register_buffer("count", torch.tensor(0))
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    rows, seen = torch.full((1, 1), 1.0 + rank), []
    with LocalSGD(accelerator, model, local_sgd_steps=steps, enabled=enabled) as local:
        for _ in range(5):
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    accelerator.backward(-model(rows).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            own.mean += rank
            own.count += 1 + rank
            local.step()
            seen.append(own[0].weight.item())
    left = own[0].weight.item(), own.mean.item(), own.count.item(), str(own.count.dtype)
    accelerator.backward(-model(rows).mean())
    return {"seen": seen, "left": left, "shared again": own[0].weight.grad.item()}


def _ways(rank: int, ranks: int) -> list[dict[str, Any]]:
    return [_trained(rank, ranks, 2, *way) for way in ((1, True), (2, True), (1, False))]


@pytest.mark.ranks
def test_parameters_are_averaged_now_and_then() -> None:
    """Also beside accumulation; disabled it changes nothing."""
    *enabled, disabled = zip(*run_ranks(_ways, 2), strict=True)
    assert [found["seen"] for found in disabled] == [[1.5, 3.0, 4.5, 6.0, 7.5]] * 2
    for first, second in enabled:
        assert first["seen"] == [1.0, 3.0, 4.0, 6.0, 7.0]  # 1 and 2 a step: after two steps the mean is 3
        assert second["seen"] == [2.0, 3.0, 5.0, 6.0, 8.0]
        assert first["left"] == second["left"] == (7.5, 2.5, 5, "torch.int64")
        assert first["shared again"] == second["shared again"] == -1.5


def test_one_process_and_bad_input() -> None:
    assert _trained(0, 1, 2, 1, True)["seen"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match="local_sgd_steps is 0"):
        LocalSGD(Accelerator(), linear_at_zero(), 0)
    with pytest.raises(NotImplementedError, match=r"LocalSGD.*strategy 'sharded'.*'ddp' and 'single'"):
        type("Sharded", (Strategy,), {"name": "sharded"})(Accelerator()._process).keep_local(linear_at_zero(), True)
