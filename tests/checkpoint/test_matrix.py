"""What was saved under one strategy and number of ranks loads under every other one: two models, two optimizers and a
scheduler, bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, Net, accelerator_of, as_it_is, same, state_of
from tests.ranks import run_ranks
from tests.training import whole


class Run:
    """Two models, two optimizers (one with groups), a scheduler."""

    def __init__(self, layout: str, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.accelerator = accelerator_of(layout, ranks)
        student, teacher = Net(), Net(4)
        for model in (student, teacher):
            torch.nn.init.normal_(model.frozen), torch.nn.init.normal_(model.temperature)
        groups = [
            {"params": [*student.blocks[0].parameters(), student.temperature], "lr": 0.02},
            {"params": [student.embed.weight, student.bias, *student.blocks[1].parameters()], "weight_decay": 0.1},
            {"params": [*student.norm.parameters(), student.frozen]},
        ]
        adam = torch.optim.AdamW(groups, lr=0.01 * (1 + seed))
        sgd = torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
        student, sgd, adam, scheduler, teacher = self.accelerator.prepare(student, sgd, adam, scheduler, teacher)
        self.models, self.optimizers, self.scheduler = (student, teacher), (adam, sgd), scheduler

    def train(self, steps: int) -> None:
        for _ in range(steps):
            numbers = torch.randint(7, (8,))
            for model in self.models:
                self.accelerator.backward(model(numbers).square().mean())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()

    def state(self, of: Callable[[torch.Tensor], torch.Tensor] = whole) -> tuple[dict[str, torch.Tensor], Any]:
        models = dict(zip(("student", "teacher"), map(self.accelerator.unwrap_model, self.models), strict=True))
        optimizers = dict(zip(("adam", "sgd"), self.optimizers, strict=True))
        rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]
        return state_of(models, optimizers, of), (rates, self.scheduler.get_last_lr())


def names(layout: str) -> list[str]:
    return [layout, f"{layout}, behind"] if "fsdp" in layout else [layout]


def saved(rank: int, ranks: int, folder: str) -> None:
    """A checkpoint of each layout; and what was in it, as this rank sees it, in a file beside them."""
    found = {}
    for layout in LAYOUTS[ranks]:
        run = Run(layout, ranks, seed=len(found))
        run.train(3)
        for name in names(layout):
            found[f"{ranks} {name}"] = run.state()
            run.accelerator.save_state(os.path.join(folder, f"{ranks} {name}"), async_save=name != layout)
            run.train(2)  # what the loop does then is not in it
        run.accelerator.wait_for_checkpoint()
    torch.save(found, os.path.join(folder, f"expected-{ranks}-{rank}"))


def expected(folder: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    return torch.load(os.path.join(folder, f"expected-{ranks}-{rank}"), weights_only=True)


def loaded(rank: int, ranks: int, folder: str) -> list[str]:
    """What is not as it was saved."""
    wrong = []
    saved = [one for world in LAYOUTS for one in expected(folder, world).items()]
    for layout in LAYOUTS[ranks]:
        run = Run(layout, ranks, seed=99)
        for number, (name, (tensors, rates)) in enumerate(saved):
            run.accelerator.load_state(os.path.join(folder, name))
            found, own_rates = run.state(whole if number == 0 else as_it_is)  # gathering takes most of the time
            odd = sorted(tensors.keys() ^ found.keys()) or [
                key for key, one in found.items() if not same(one, tensors[key])
            ]
            if odd or own_rates != rates:
                wrong.append(f"{name} under {layout} of {ranks}: {odd[:5]} {own_rates} {rates}")
            if number == 0:
                run.train(1)  # with what was loaded into it, it trains
                assert run.models[0] and run.state()[1] != rates
    return wrong


@pytest.mark.ranks
@pytest.mark.slow
def test_every_layout_loads_under_every_other_one(tmp_path: Path) -> None:
    for ranks in LAYOUTS:
        run_ranks(saved, ranks, str(tmp_path))
        found = expected(str(tmp_path), ranks)
        assert len(found) == sum(len(names(layout)) for layout in LAYOUTS[ranks])
        for name, (tensors, _) in found.items():
            moments = {key for key in tensors if key.endswith(("/exp_avg", "/step", "/momentum_buffer"))}
            assert len(moments) == 2 * 13 + 13, (name, moments)
        for rank in range(1, ranks):  # running statistics too: the ranks have seen the same rows
            for name, (tensors, _) in expected(str(tmp_path), ranks, rank).items():
                assert [key for key, one in tensors.items() if not torch.equal(one, found[name][0][key])] == [], name
    for ranks in LAYOUTS:
        assert [wrong for one in run_ranks(loaded, ranks, str(tmp_path)) for wrong in one] == []


def in_shards(rank: int, ranks: int, folder: str) -> None:
    run = Run("fsdp", ranks, seed=0)
    run.train(1)
    run.accelerator.save_state(folder)


@pytest.mark.ranks
def test_each_rank_writes_its_shards_and_no_more(tmp_path: Path) -> None:
    from nbdist.checkpoint import manifest

    run_ranks(in_shards, 2, str(tmp_path / "ck"))
    sizes = [os.path.getsize(tmp_path / "ck" / f"rank-0000{rank}.safetensors") for rank in range(2)]
    assert max(sizes) < 1.5 * min(sizes)
    for key, tensor in manifest.read(tmp_path / "ck").tensors.items():
        elements = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
        assert elements == torch.Size(tensor.shape).numel(), key
