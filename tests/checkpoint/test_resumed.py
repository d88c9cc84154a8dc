"""A run that was saved anywhere and resumed, on any number of ranks, under any strategy, ends as one that was not."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.ranks import run_ranks

ROWS, STEP, EPOCHS = 22, 4, 2  # samples; samples that all ranks take at a step
STEPS = -(-ROWS // STEP)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.sin(torch.arange(3) + index)])


def trained(
    rank: int, ranks: int, strategy: str | None, folder: str, resume: str = "", workers: int = 0, window: int = 1
) -> tuple[list[float], list[list[int]]]:
    """Two epochs, with a checkpoint behind each batch; or the rest of them from one. The parameters, and what this rank
    was given.
    """
    from nbdist import Accelerator, ParallelismConfig, set_seed

    gc.freeze()
    warnings.simplefilter("ignore")
    set_seed(7 if not resume else 100)
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=ranks // 2) if strategy == "hybrid" else None
    accelerator = Accelerator(strategy=strategy, parallelism_config=config, gradient_accumulation_steps=window)
    torch.manual_seed(0 if not resume else 9)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(Rows(), batch_size=STEP // ranks, shuffle=True, num_workers=workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    first = 0
    if resume:
        accelerator.load_state(f"{folder}/{resume}")
        first = int(resume.split("-")[0])
    seen = []
    for epoch in range(first, EPOCHS):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, 1:]).pow(2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(batch[: accelerator._live[-1].local, 0].int().tolist())
            if not resume:
                accelerator.save_state(f"{folder}/{epoch}-{number}")
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return torch.cat([one.detach().flatten() for one in whole]).tolist(), seen


def resumed(
    rank: int, ranks: int, strategy: str | None, folder: str, cuts: list[str], window: int = 1
) -> list[tuple[list[float], list[list[int]]]]:
    return [trained(rank, ranks, strategy, folder, cut, 0, window) for cut in cuts]


def difference(first: list[float], second: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def together(runs: list[Any]) -> list[int]:
    """The samples that the ranks were given, step by step."""
    return [row for steps in zip(*(seen for _, seen in runs), strict=True) for step in steps for row in step]


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2), ("hybrid", 4)])
def test_cut_anywhere_and_resumed_on_as_many_and_other_ranks(tmp_path: Path, strategy: str, ranks: int) -> None:
    whole = run_ranks(trained, ranks, strategy, str(tmp_path))
    order = together(whole)
    assert sorted(order) == sorted(2 * list(range(ROWS)))
    for other, count in ((strategy, ranks), ("single", 1), ("ddp", 4)):
        cuts = ["0-0", "0-3", "0-5", "1-1"] if other == strategy else ["0-3"]
        runs = run_ranks(resumed, count, other, str(tmp_path), cuts)
        for cut, rest in zip(cuts, zip(*runs, strict=True), strict=True):
            done = sum(min(STEP, ROWS - STEP * at) for at in range(int(cut[2:]) + 1)) + int(cut[0]) * ROWS
            assert together(list(rest)) == order[done:], (cut, other)
            for parameters, _ in rest:
                assert difference(parameters, whole[0][0]) < 1e-6, (cut, other)


def test_cut_with_workers_in_one_process(tmp_path: Path) -> None:
    whole, seen = run_ranks(trained, 1, None, str(tmp_path), "", 2)[0]
    for rest, left in run_ranks(resumed, 1, None, str(tmp_path), ["0-1", "0-3", "1-0"])[0]:
        assert rest == whole and seen[-len(left) :] == left


def test_a_checkpoint_in_the_middle_of_a_window_begins_it_anew(tmp_path: Path) -> None:
    """Windows of 4 in 6 steps an epoch: 4, and then 2."""
    whole, seen = run_ranks(trained, 1, None, str(tmp_path), "", 0, 4)[0]
    cuts = {"0-0": 0, "0-2": 0, "0-3": 4, "0-4": 4, "1-1": 6}
    runs = run_ranks(resumed, 1, None, str(tmp_path), list(cuts), 4)[0]
    for (cut, begins), (rest, left) in zip(cuts.items(), runs, strict=True):
        assert left == seen[begins:], cut
        assert rest == whole, cut
    assert len(os.listdir(tmp_path)) == 12
