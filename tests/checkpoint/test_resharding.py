"""What was saved under one strategy and number of ranks loads under every other one, optimizer state included."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

LAYOUTS = [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hybrid", 4)]
LAYOUTS += [("tp", 2), ("fsdp+tp", 4)]


class Net(nn.Module):
    """Sizes that do not divide by the ranks, a tied weight, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(rows)))) * self.scale)


def values(net: Net) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, one) in enumerate(net.state_dict().items()):
        shape, kind = one.shape, one.dtype
        yield name, (torch.arange(shape.numel()).reshape(shape) + 100 * number).to(kind)


def laid_out(net: Net, layout: str, ranks: int) -> None:
    """Tensor parallel by torch's own means, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp":
        parallelize_module(net, init_device_mesh("cpu", (ranks,)), plan)
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def made(layout: str, ranks: int, factor: int = 0) -> tuple[Any, Net, Any]:
    from nbdist import Accelerator, ParallelismConfig

    gc.freeze()  # else each look for what nobody holds any more goes through all of torch
    net = Net()
    net.load_state_dict({name: one * factor for name, one in values(net)})
    if "tp" in layout:
        accelerator = Accelerator()
        laid_out(net, layout, ranks)
    else:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=ranks // 2) if layout == "hybrid" else None
        accelerator = Accelerator(strategy=layout, parallelism_config=config)
    groups = [{"params": [*net.up.parameters()], "lr": 0.5}, {"params": [net.embed.weight, *net.down.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.25)
    if "tp" in layout:  # laid out by hand: the Accelerator only has to know it
        accelerator._named.note("models", net, net)
        accelerator._named.note("optimizers", optimizer, optimizer)
        return accelerator, net, optimizer
    net, optimizer = accelerator.prepare(net, optimizer)
    return accelerator, accelerator.unwrap_model(net), optimizer.optimizer


def saved(rank: int, ranks: int, layout: str, folder: str) -> None:
    accelerator, _, optimizer = made(layout, ranks, 1)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                parameter.grad = parameter.detach() + at
    optimizer.step()
    accelerator.save_state(folder)


def loaded(rank: int, ranks: int, layout: str, folder: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        accelerator, net, optimizer = made(layout, ranks)
        accelerator.load_state(os.path.join(folder, name))
        state = {name: full(one) for name, one in net.state_dict().items()}
        by_name = {id(one): name for name, one in net.named_parameters()}
        for parameter, own in optimizer.state.items():
            for key, value in own.items():
                assert key == "step" or type(value) is type(parameter.data), (key, type(value))
                state[f"{by_name[id(parameter)]}/{key}"] = full(value)
        found[name] = {key: one.tolist() for key, one in state.items()}, [g["lr"] for g in optimizer.param_groups]
        assert net.head.weight is net.embed.weight
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_every_layout_loads_under_every_other_one(tmp_path: Path) -> None:
    names = []
    for layout, ranks in LAYOUTS:
        names.append(f"{layout}-{ranks}")
        run_ranks(saved, ranks, layout, str(tmp_path / names[-1]))
    (whole,) = run_ranks(loaded, 1, "single", str(tmp_path), names)
    first = whole[names[0]]
    assert len(first[0]) > 20 and first[1] == [0.5, 0.25]
    for name in names:
        assert {k for k in first[0] | whole[name][0] if first[0].get(k) != whole[name][0].get(k)} == set(), name
        assert whole[name][1] == first[1]
    for layout, ranks in LAYOUTS[1:]:
        for found in run_ranks(loaded, ranks, layout, str(tmp_path), names):
            assert all(found[name] == first for name in names), layout


@pytest.mark.ranks
def test_each_rank_writes_its_shards_and_no_more(tmp_path: Path) -> None:
    run_ranks(saved, 2, "fsdp", str(tmp_path / "ck"))
    sizes = [os.path.getsize(tmp_path / "ck" / f"rank-0000{rank}.safetensors") for rank in range(2)]
    assert max(sizes) < 1.5 * min(sizes)
    from nbdist.checkpoint import manifest

    held = manifest.read(tmp_path / "ck")
    for key, tensor in held.tensors.items():
        elements = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
        assert elements == torch.Size(tensor.shape).numel(), key
