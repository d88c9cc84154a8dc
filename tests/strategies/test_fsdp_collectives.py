"""What sharded training exchanges in a window: a stated count, for each way to shard."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_ranks

UNITS = 3  # two blocks, and the rest with the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(self.up(rows).tanh())


class Counted(TorchDispatchMode):
    """The collectives of process groups, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def _counts(rank: int, ranks: int, cases: list[tuple[str, int, Any, bool]]) -> list[dict[str, int]]:
    found = []
    for strategy, window, reshard, each in cases:
        plugin = FullyShardedDataParallelPlugin(reshard_after_forward=reshard)
        accelerator = Accelerator(strategy=strategy, fsdp_plugin=plugin, gradient_accumulation_steps=window)
        if each:
            accelerator._windows.switches = accelerator._windows.defers = False
        model = nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def one_window(model: Any = model, optimizer: Any = optimizer, accelerator: Any = accelerator) -> None:
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 3)).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()

        one_window()  # the first backward of a cell has words besides
        with Counted() as counted:
            one_window()
        found.append(dict(counted.names))
    return found


CASES = [
    ("fsdp", 1, True, False),
    ("fsdp", 4, True, False),
    ("fsdp", 1, False, False),
    ("fsdp", 4, True, True),
    ("hybrid", 1, True, False),
    ("hybrid", 4, True, False),
    ("hybrid", 4, False, False),
]


@pytest.mark.ranks
def test_a_window_exchanges_what_is_stated() -> None:
    for counts in run_ranks(_counts, 4, CASES):
        for (strategy, window, reshard, each), found in zip(CASES, counts, strict=True):
            # The rest is needed again at once when backward begins, and stays; blocks are gathered once more.
            gathers = window * (UNITS + (UNITS - 1 if reshard else 0))
            scatters = UNITS * (window if strategy == "hybrid" or each else 1)
            right = {"_allgather_base_": gathers, "_reduce_scatter_base_": scatters}
            if strategy == "hybrid":
                right["allreduce_"] = UNITS
            assert found == right, (strategy, window, reshard, each)
