"""Training the same samples on any number of ranks, and the same in plain torch: what the gradient tests compare."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

SEED = 3


def linear_at_zero() -> nn.Linear:
    """One weight, 0: with SGD(lr=1) and the loss -m(x).mean() each mean gradient of ones adds 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def flat(model: nn.Module) -> list[float]:
    """All parameters, whole: a collective where they are spread over the ranks."""
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()]).tolist()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Ragged:
    """A user's own batch sampler: batches of 1 to 4, no length, drawn anew from the global generators at each epoch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[list[int]]:
        at = 0
        while at < self.rows:
            size = random.randint(1, 4)
            yield list(range(at, min(self.rows, at + size)))
            at += size


class Shuffling(Sampler):
    """A user's own sampler that draws from torch's global generator."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.rows).tolist())

    def __len__(self) -> int:
        return self.rows


class Stream(IterableDataset):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def data(case: dict[str, Any]) -> torch.Tensor:
    """Rows of four: an index, two features, and how many tokens the row has."""
    rows = torch.randn(case["rows"], 4, generator=torch.Generator().manual_seed(case["rows"]))
    rows[:, 0] = torch.arange(case["rows"])
    counts = torch.randint(-40, 50, (case["rows"],), generator=torch.Generator().manual_seed(1))
    rows[:, 3] = counts.clamp(min=0)  # many rows have none, so that whole batches may weigh nothing
    return rows


def loader(case: dict[str, Any]) -> DataLoader:
    rows, kind = data(case), case["sampler"]
    if kind == "ragged":
        return DataLoader(rows, batch_sampler=Ragged(len(rows)))
    options = {"batch_size": case["batch"], "drop_last": case["drop_last"]}
    if kind == "stream":
        return DataLoader(Stream(rows), **options)
    if kind == "weighted":
        return DataLoader(rows, sampler=WeightedRandomSampler(rows[:, 3] + 1, len(rows) + 3), **options)
    if kind == "own":
        return DataLoader(rows, sampler=Shuffling(len(rows)), **options)
    return DataLoader(rows, shuffle=kind == "shuffled", **options)


def loss_of(model: nn.Module, rows: torch.Tensor, tokens: bool, least: int = 0) -> tuple[torch.Tensor, Any]:
    """The mean over rows, or over tokens (at least so many of them: 0/0 otherwise), and the explicit weight if there
    is one.
    """
    inputs = rows[:, :3] / torch.tensor([10.0, 1.0, 1.0])
    each = model(inputs).pow(2).mean(1)
    if not tokens:
        return each.mean(), None
    counts = rows[:, 3]
    return (each * counts).sum() / counts.sum().clamp(min=least), counts.sum()


def windows(case: dict[str, Any], epochs: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each optimizer step: so many micro-batches of an epoch, or of all of them in a row."""
    size = case.get("accumulation", 1)
    if case.get("across_epochs"):
        steps = [step for steps in epochs for step in steps]
        epochs = [steps[: len(steps) // size * size]]  # what is gathered at the end waits for more
    grouped = [steps[at : at + size] for steps in epochs for at in range(0, len(steps), size)]
    return [[row for step in group for row in step] for group in grouped]


def in_plain_torch(case: dict[str, Any], epochs: list[list[list[int]]]) -> list[float]:
    """One process that takes the samples of each window at once."""
    rows = data(case)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=case["momentum"])
    for window in windows(case, epochs):
        loss, _ = loss_of(model, rows[window], case["tokens"], least=1)
        loss.backward()
        if case.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def prepared(case: dict[str, Any], strategy: str | None = None) -> tuple[list[float], list[list[list[int]]]]:
    """The case through the Accelerator. Returns the parameters, and this rank's real samples by epoch and step."""
    from nbdist import Accelerator, set_seed
    from nbdist.kwargs import GradientAccumulationPlugin

    set_seed(SEED)
    torch.rand(Accelerator().process_index)  # ranks whose generators differ must not differ in order
    plugin = GradientAccumulationPlugin(
        num_steps=case.get("accumulation", 1),
        sync_with_dataloader=not case.get("across_epochs"),
        sync_each_batch=case.get("sync_each_batch", False),
    )
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_plugin=plugin)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=case["momentum"])
    optimizer, batches, wrapped = accelerator.prepare(optimizer, loader(case), model)
    seen = []
    for _ in range(case["epochs"]):
        steps = []
        for batch in batches:
            with accelerator.accumulate(wrapped):
                if case.get("zero_grad_first"):
                    optimizer.zero_grad()
                loss, weight = loss_of(wrapped, batch, case["tokens"])
                accelerator.backward(loss, weight=weight)
                if case.get("clip"):
                    accelerator.clip_grad_norm_(wrapped.parameters(), case["clip"])
                optimizer.step()
                if not case.get("zero_grad_first"):
                    optimizer.zero_grad()
            real = accelerator._live[-1].local
            steps.append(batch[:real, 0].int().tolist())
        seen.append(steps)
    return flat(model), seen


def prepared_on_rank(rank: int, ranks: int, cases: list[dict[str, Any]], strategy: str | None = None) -> list[Any]:
    return [prepared(case, strategy) for case in cases]
