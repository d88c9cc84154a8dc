"""A run that is cut behind any step of any epoch and resumed ends as the one that was not: under every strategy, with
windows, workers of the loader, dropout, running statistics. Bit by bit on as many ranks, where those are at most two;
to rounding on others.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.checkpoint.layouts import LAYOUTS, accelerator_of, state_of
from tests.ranks import run_ranks

ROWS, STEP, EPOCHS = 44, 8, 2  # samples; those that all ranks take at a step
STEPS = -(-ROWS // STEP)
ROUNDING = {False: 1e-6, True: 1e-5}  # by whether Adam divides it by gradients that may be near zero


@dataclass(frozen=True)
class Case:
    """A run, and where it is cut: behind this step, counted from 0 through all epochs."""

    layout: str
    cut: int
    window: int = 1
    workers: int = 0
    noisy: bool = False
    adam: bool = True
    persistent: bool = False

    @property
    def whole_windows(self) -> bool:
        """Whether the cut is where an optimizer step is."""
        at = self.cut % STEPS + 1
        return at % self.window == 0 or at == STEPS


def drawn(layouts: list[str], count: int, noise: bool = True) -> list[Case]:
    """Other cases each time; a failure says which. Each layout has its turn."""
    cases = []
    for number in range(count):
        case = Case(
            layouts[number % len(layouts)],
            cut=random.randrange(EPOCHS * STEPS),
            window=random.choice([1, 1, 2, 3, 4]),
            workers=random.choice([0, 0, 2]),
            adam=random.random() < 0.7,
            persistent=random.random() < 0.5,
        )
        # What a window's micro-batches have drawn and counted before the cut is not taken back when they come again.
        cases.append(replace(case, noisy=noise and case.whole_windows and random.random() < 0.7))
    return cases


class Net(nn.Module):
    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6) if noisy else nn.Identity()
        self.noisy = noisy
        self.tp_plan = {"first": "colwise_rep", "last": "colwise_rep"}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows).tanh()
        if self.noisy:
            rows = nn.functional.dropout(self.norm(rows), 0.4, self.training)
        return self.last(rows)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.sin(torch.arange(3) + index)])


def trained(case: Case, rank: int, ranks: int, folder: str, resume: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """The state at the end, and the samples that this rank was given."""
    from nbdist import set_seed

    warnings.simplefilter("ignore")
    set_seed(100 if resume else 7, device_specific=case.noisy)
    accelerator = accelerator_of(case.layout, ranks, gradient_accumulation_steps=case.window)
    model = Net(case.noisy)
    rate = {"lr": 0.02} if case.adam else {"lr": 0.05, "momentum": 0.9}
    optimizer: Any = (torch.optim.AdamW if case.adam else torch.optim.SGD)(model.parameters(), **rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    parts = ranks // 2 if "tp" in case.layout else ranks
    loader = DataLoader(
        Rows(STEPS * STEP if case.noisy else ROWS), batch_size=STEP // parts, shuffle=True, num_workers=case.workers,
        persistent_workers=case.persistent and case.workers > 0,
    )  # fmt: skip
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if resume:
        accelerator.load_state(folder)
    seen = []
    for epoch in range(case.cut // STEPS if resume else 0, EPOCHS):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, 1:]).pow(2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(batch[: accelerator._live[-1].local, 0].int().tolist())
            if not resume and epoch * STEPS + number == case.cut:
                accelerator.save_state(folder)
    return state_of({"": accelerator.unwrap_model(model)}, {"": optimizer}), seen


def begins(case: Case) -> int:
    """The step that comes first when it is resumed."""
    epoch, at = divmod(case.cut, STEPS)
    at += 1
    return epoch * STEPS + (at if case.whole_windows else at // case.window * case.window)


def alike(case: Case, name: str, one: torch.Tensor, other: torch.Tensor, rank: int, ranks: int) -> bool:
    if rank and "running" in name:
        return True  # where they are each rank's own, rank 0's are loaded on all
    if ranks <= 2:
        return torch.equal(one, other)
    # In a fresh process buckets are laid out anew, so four ranks add up in another order.
    return torch.allclose(one, other, atol=ROUNDING[case.adam], rtol=0)


def on_as_many(rank: int, ranks: int, folder: str, cases: list[Case]) -> list[str]:
    """What is not as it would have been."""
    wrong = []
    for number, case in enumerate(cases):
        whole, seen = trained(case, rank, ranks, f"{folder}/{number}", False)
        resumed, rest = trained(case, rank, ranks, f"{folder}/{number}", True)
        odd = sorted(whole.keys() ^ resumed.keys()) or [
            name for name, one in whole.items() if not alike(case, name, one, resumed[name], rank, ranks)
        ]
        if odd or rest != seen[begins(case) :]:
            wrong.append(f"{case}: {odd} {rest} {seen}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_cut_anywhere_and_resumed_on_as_many_ranks(tmp_path: Path, ranks: int) -> None:
    wrong = run_ranks(on_as_many, ranks, str(tmp_path), drawn(LAYOUTS[ranks], 6))
    told = "\n".join(one for rank in wrong for one in rank)
    assert not told, told


def cut_and_whole(rank: int, ranks: int, folder: str, cases: list[Case]) -> list[Any]:
    return [plain(trained(case, rank, ranks, f"{folder}/{number}", False)) for number, case in enumerate(cases)]


def resumed_elsewhere(rank: int, ranks: int, folder: str, cases: list[Case]) -> list[Any]:
    """Each under another strategy."""
    layouts = [LAYOUTS[ranks][number % len(LAYOUTS[ranks])] for number in range(len(cases))]
    return [
        plain(trained(replace(case, layout=layout), rank, ranks, f"{folder}/{number}", True))
        for number, (case, layout) in enumerate(zip(cases, layouts, strict=True))
    ]


def plain(run: tuple[dict[str, torch.Tensor], list[list[int]]]) -> Any:
    return {name: one.tolist() for name, one in run[0].items()}, run[1]


def together(runs: list[Any], ranks: int, layout: str) -> list[int]:
    """The samples in the order in which all ranks were given them; a group of tensor parallel ranks takes one part."""
    parts = runs[:: 2 if "tp" in layout else 1]
    return [row for steps in zip(*(seen for _, seen in parts), strict=True) for step in steps for row in step]


@pytest.mark.ranks
def test_cut_anywhere_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    cases = drawn(LAYOUTS[2], 6, noise=False)
    whole = run_ranks(cut_and_whole, 2, str(tmp_path), cases)
    for ranks in (1, 4):
        resumed = run_ranks(resumed_elsewhere, ranks, str(tmp_path), cases)
        for number, case in enumerate(cases):
            layout = LAYOUTS[ranks][number % len(LAYOUTS[ranks])]
            said = f"{case}, resumed on {ranks} under {layout}"
            order = together([one[number] for one in whole], 2, case.layout)
            done = begins(case) // STEPS * ROWS + begins(case) % STEPS * STEP
            assert together([one[number] for one in resumed], ranks, layout) == order[done:], said
            for one in resumed:
                assert_near(case, one[number][0], whole[0][number][0], said)


def assert_near(case: Case, found: dict[str, Any], expected: dict[str, Any], said: str) -> None:
    assert found.keys() == expected.keys(), said
    for name, one in found.items():
        off = (torch.tensor(one) - torch.tensor(expected[name])).abs().max().item()
        assert off <= ROUNDING[case.adam], f"{said}: {name} by {off}"
