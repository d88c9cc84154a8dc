"""The ways to spread a model over ranks that checkpoints are moved between, and a training run with all that has a
state: what the tests of the folder compare.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from tests.training import whole

# By the number of ranks: the strategies, and the sizes of a mesh.
LAYOUTS: dict[int, list[str]] = {
    1: ["single", "ddp", "fsdp"],
    2: ["ddp", "fsdp", "tp"],
    4: ["ddp", "fsdp", "hybrid", "fsdp+tp"],
}


class Net(nn.Module):
    """Rows that do not divide by the ranks, a tied weight, a frozen one, one without a dimension, running statistics,
    and blocks: units of their own when it is sharded, columns and rows of several ranks when it is tensor parallel.
    """

    tp_plan: ClassVar = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(7))
        self.temperature = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.embed(numbers)
        for block in self.blocks:
            rows = rows + block(rows)
        return self.head(self.norm(rows) * self.frozen) * self.temperature + self.bias


def accelerator_of(layout: str, ranks: int, **options: Any) -> Any:
    from nbdist import Accelerator, ParallelismConfig

    gc.freeze()  # else each look for what nobody holds any more goes through all of torch
    if layout == "hybrid":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=ranks // 2)
    if layout == "fsdp+tp":
        options["parallelism_config"] = ParallelismConfig(dp_shard_size=ranks // 2, tp_size=2)
    else:
        options["strategy"] = layout
    return Accelerator(**options)


def state_of(
    models: dict[str, nn.Module], optimizers: dict[str, Any], whole: Callable[[torch.Tensor], torch.Tensor] = whole
) -> dict[str, torch.Tensor]:
    """All parameters, buffers and states of optimizers, by name: whole, which is a collective where they are spread."""
    found: dict[str, torch.Tensor] = {}
    for label, model in models.items():
        found |= {f"{label}.{name}": whole(one).detach().clone() for name, one in model.state_dict().items()}
        names = {id(one): name for name, one in model.named_parameters()}
        for optimizer_label, optimizer in optimizers.items():
            for parameter, own in optimizer.state.items():
                if id(parameter) in names:
                    for key, value in own.items():
                        if isinstance(value, torch.Tensor):
                            assert key == "step" or type(value) is type(parameter.data), (key, type(value))
                            name = f"{optimizer_label}: {label}.{names[id(parameter)]}/{key}"
                            found[name] = whole(value).detach().clone()
    return found


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether this rank's part of it is that of the expected one. No collective."""
    if not hasattr(tensor, "to_local"):
        return torch.equal(tensor, expected)
    (chunk,) = tensor.__create_chunk_list__()
    if tensor.shape != expected.shape:
        return False
    for dim, (at, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        expected = expected.narrow(dim, min(at, expected.shape[dim]), length)
    return torch.equal(tensor.to_local(), expected)
