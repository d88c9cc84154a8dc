"""Tensor parallel, alone and below shards and replicas: the same parameters as in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.data import DataLoader

from nbdist import Accelerator, ParallelismConfig, set_seed
from nbdist.kwargs import GradientAccumulationPlugin
from nbdist.utils import TorchTensorParallelConfig
from tests.ranks import run_ranks
from tests.transformer import Transformer, loss_of

ROWS, STEPS = 22, 20  # rows an epoch; at least so many steps of the optimizer


def sequences() -> dict[str, Any]:
    """Norms and residuals on parts of a sequence."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.before": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.attention.k_proj": "colwise",
        "blocks.*.attention.v_proj": "colwise",
        "blocks.*.attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.behind": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def numbers() -> torch.Tensor:
    return torch.randint(0, 12, (ROWS, 8), generator=torch.Generator().manual_seed(1))


def whole(model: nn.Module) -> dict[str, list[float]]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().flatten().tolist()
        for name, one in model.named_parameters()
    }


def optimizer_of(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    if case.get("adam"):
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def epochs_of(case: dict[str, Any], batch: int) -> int:
    windows = -(-ROWS // (batch * case.get("accumulation", 1)))
    return -(-STEPS // windows)


def in_one_process(case: dict[str, Any], batch: int) -> dict[str, list[float]]:
    """The windows of all ranks' micro-batches at once; `batch` rows in a step of all ranks."""
    rows, model = numbers(), Transformer(blocks=1, tied=case.get("tied", False))
    optimizer = optimizer_of(model, case)
    stride = batch * case.get("accumulation", 1)
    for _ in range(epochs_of(case, batch)):
        for start in range(0, ROWS, stride):
            loss_of(model, rows[start : start + stride]).backward()
            if case.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def train(case: dict[str, Any], **sizes: int) -> dict[str, list[float]]:
    set_seed(3)
    handler = TorchTensorParallelConfig(plan=sequences()) if case.get("sequences") else None
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(**sizes, tp_handler=handler),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=case.get("accumulation", 1)),
    )
    model = Transformer(blocks=1, tied=case.get("tied", False))
    if accelerator.process_index:
        for one in model.parameters():
            one.data.normal_()  # rank 0's count
    optimizer = optimizer_of(model, case)
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(numbers(), batch_size=2))
    assert accelerator.unwrap_model(wrapped) is model
    for _ in range(epochs_of(case, 2 * accelerator._strategy.data_parallel_size)):
        for batch in batches:
            with accelerator.accumulate(wrapped):
                weight = batch[:, 1:].numel() if case.get("weights") else None
                accelerator.backward(loss_of(wrapped, batch), weight=weight)
                if case.get("clip"):
                    norm = accelerator.clip_grad_norm_(wrapped.parameters(), case["clip"])
                    assert type(norm) is torch.Tensor and norm.dim() == 0
                optimizer.step()
                optimizer.zero_grad()
    return whole(model)


def _trained(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[Any]:
    return [train(case, **case["sizes"]) for case in cases]


def check(cases: list[dict[str, Any]], ranks: int) -> None:
    for case, *found in zip(cases, *run_ranks(_trained, ranks, cases), strict=True):
        sizes = case["sizes"]
        batch = 2 * ranks // sizes["tp_size"]
        right = in_one_process(case, batch)
        for one in found:
            for name, values in right.items():
                worst = max(abs(a - b) for a, b in zip(values, one[name], strict=True))
                assert worst < 1e-6, (case, name, worst)


def test_each_layer_over_both_ranks() -> None:
    sizes = {"tp_size": 2}
    check(
        [
            {"sizes": sizes, "accumulation": 3, "clip": 0.1},  # 11 batches: the last window has 2
            {"sizes": sizes, "tied": True, "weights": True},
            {"sizes": sizes, "sequences": True, "accumulation": 2, "clip": 0.1},
            {"sizes": sizes, "sequences": True, "adam": True},
        ],
        2,
    )


def test_below_shards_and_replicas() -> None:
    shards, replicas = {"dp_shard_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "tp_size": 2}
    check(
        [
            {"sizes": shards, "accumulation": 2, "clip": 0.1},  # 6 steps, the last of one row each
            {"sizes": shards, "sequences": True, "weights": True, "accumulation": 4},
            {"sizes": replicas, "tied": True, "clip": 0.1},
            {"sizes": replicas, "sequences": True, "accumulation": 2, "adam": True},
        ],
        4,
    )
