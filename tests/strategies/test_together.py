"""Ranks that compute each sample together take the same part of a batch, and what they have counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from nbdist import Accelerator, LocalSGD, ParallelismConfig, set_seed, strategies
from nbdist.kwargs import DataLoaderConfiguration
from nbdist.utils import DistributedOperationException
from tests.ranks import run_ranks
from tests.strategies.test_tensor import sequences
from tests.training import Stream
from tests.transformer import Transformer, loss_of

SIZES = {"dp_shard_size": 2, "tp_size": 2}  # ranks 0 and 1 have part 0 of a batch, ranks 2 and 3 part 1


class _Own(IterableDataset):
    """Other samples on each rank that it is made for."""

    sharded_by_rank = True

    def __init__(self, part: int) -> None:
        self.part = part

    def __iter__(self) -> Any:
        return iter(range(100 * self.part, 100 * self.part + 3 - self.part))


def _accelerator(**loading: Any) -> Accelerator:
    return Accelerator(
        parallelism_config=ParallelismConfig(**SIZES), dataloader_config=DataLoaderConfiguration(**loading)
    )


def _batches(accelerator: Accelerator, loader: DataLoader) -> tuple[list[list[int]], list[int]]:
    """This rank's batches, and what all have of them for metrics."""
    mine, everyone = [], []
    for batch in accelerator.prepare(loader):
        mine.append(batch.tolist())
        everyone += accelerator.gather_for_metrics(batch).tolist()
    return mine, everyone


def _loaders(rank: int) -> dict[str, Any]:
    set_seed(4)
    found = {}
    accelerator = _accelerator()
    found["samples"] = _batches(accelerator, DataLoader(range(7), batch_size=2))
    found["shuffled"] = _batches(accelerator, DataLoader(range(7), batch_size=2, shuffle=True))
    found["stream"] = _batches(accelerator, DataLoader(Stream(range(7)), batch_size=2))
    found["own"] = _batches(accelerator, DataLoader(_Own(rank // 2), batch_size=2))
    with pytest.raises(DistributedOperationException, match="ranks 0 to 1 take one batch together"):
        _batches(accelerator, DataLoader(_Own(rank), batch_size=2))
    four = DistributedSampler(range(8), num_replicas=4, rank=rank)
    with pytest.raises(ValueError, match="split 4 ways already, of which a rank has part 0; and here 2 ranks together"):
        accelerator.prepare(DataLoader(range(8), sampler=four))
    two = DistributedSampler(range(8), num_replicas=2, rank=rank // 2, shuffle=False)
    found["sampler"] = _batches(accelerator, DataLoader(range(8), sampler=two, batch_size=2))
    dispatching = _accelerator(dispatch_batches=True)
    found["dispatched"] = _batches(dispatching, DataLoader(range(7), batch_size=2))
    found["dispatched stream"] = _batches(dispatching, DataLoader(Stream(range(7)), batch_size=2))
    return found


def _collectives(rank: int) -> dict[str, Any]:
    accelerator, part = _accelerator(), torch.tensor([float(rank // 2)])
    found: dict[str, Any] = {"gather": accelerator.gather({"a": part, "b": "word"})}
    found["metrics"] = accelerator.gather_for_metrics([rank // 2], use_gather_object=True)
    found["sum"] = accelerator.reduce(part + 1, "sum").tolist()
    found["mean"] = accelerator.reduce(part + 1, "mean").tolist()
    found["max"] = accelerator.reduce(part + 1, "max").tolist()
    with (split := accelerator.split_between_processes([1, 2, 3])) as mine:
        found["split"] = list(mine)
    found["split again"] = split.gather([one * 10 for one in mine])
    set_seed(5, device_specific=True)
    found["seed"] = torch.rand(1).item()
    model = accelerator.prepare(Transformer(blocks=1))
    with pytest.raises(NotImplementedError, match="LocalSGD averages whole replicas"), LocalSGD(accelerator, model, 2):
        pass
    return found


def _dropout(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # as user code may
    accelerator = _accelerator()
    model = Transformer(blocks=1, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.arange(16).reshape(2, 8) % 12
    for _ in range(3):
        torch.rand(rank)
        accelerator.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()
    return {"norm": model.norm.weight.full_tensor().tolist()}


def _left_out(rank: int) -> dict[str, Any]:
    plan = sequences()
    model = Transformer(blocks=1)
    plan["norm"] = None  # it computes on a part of each sequence all the same
    plan["blocks.*.down"] = plan["blocks.*.attention.o_proj"]
    vars(model)["tp_plan"] = plan
    accelerator = _accelerator()
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError) as caught:
        accelerator.backward(loss_of(model, torch.arange(16).reshape(2, 8) % 12))
    return {"error": str(caught.value)}


def _overflow(rank: int) -> dict[str, Any]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**SIZES), mixed_precision="fp16")
    model = Transformer(blocks=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    for step in range(3):
        accelerator.backward(loss_of(model, torch.arange(16).reshape(2, 8) % 12))
        if step == 1 and rank == 3:
            model.head.weight.grad.to_local()[0, 0] = float("inf")  # in one rank's part only
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    accelerator.backward(loss_of(model, torch.arange(16).reshape(2, 8) % 12))
    return {"skipped": skipped, "scale": accelerator.scaler.get_scale()}


def _per_token(model: Transformer, numbers: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, int]:
    loss = functional.cross_entropy(model(numbers).flatten(0, 1), wanted.flatten())
    return loss, int((wanted >= 0).sum())


def _sequence_parts(rank: int) -> dict[str, Any]:
    with pytest.raises(RuntimeError, match=r"'fsdp' cannot run here: context parallel \(cp_size=2\) needs GPUs"):
        Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2))
    strategies.context.obstacle = lambda process, size: None  # as on GPUs; this model computes each token by itself
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2))
    model, plain = Transformer(blocks=0), Transformer(blocks=0)
    optimizer, right = (torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, plain))
    numbers = torch.randint(0, 12, (7, 8), generator=torch.Generator().manual_seed(2))
    wanted = numbers.roll(1, 1)
    wanted[torch.arange(7)[:, None] * torch.arange(8) % 5 == 2] = -100  # more in one half of a sequence than in another
    rows = DataLoader(list(zip(numbers, wanted, strict=True)), batch_size=2)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    here = slice(4, 8) if rank % 2 else slice(0, 4)
    for _ in range(5):
        for batch, labels in rows:
            loss, count = _per_token(model, batch[:, here], labels[:, here])
            accelerator.backward(loss, weight=count)
            optimizer.step()
            optimizer.zero_grad()
        for start in (0, 4):
            _per_token(plain, numbers[start : start + 4], wanted[start : start + 4])[0].backward()
            right.step()
            right.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {"worst": max((one.full_tensor() - other).abs().max().item() for one, other in pairs)}


def _all(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    return {
        one.__name__: one(rank) for one in (_loaders, _collectives, _dropout, _left_out, _overflow, _sequence_parts)
    }


def test_four_ranks_of_two_groups_and_parts_of_sequences_with_gpus_mocked() -> None:
    ranks = run_ranks(_all, 4)
    loaders = [one["_loaders"] for one in ranks]
    for kind, (mine, everyone) in loaders[0].items():
        assert loaders[1][kind][0] == mine, kind
        assert loaders[3][kind][0] == loaders[2][kind][0] != mine, kind
        assert all(one[kind][1] == everyone for one in loaders), kind
        right = {"own": [0, 1, 2, 100, 101], "sampler": list(range(8))}.get(kind, list(range(7)))
        assert sorted(everyone) == right, kind
    assert loaders[0]["samples"][0] == [[0, 1], [4, 5]] and loaders[2]["samples"][0] == [[2, 3], [6]]

    found = [one["_collectives"] for one in ranks]
    for one in found:
        assert one["gather"]["a"].tolist() == [0.0, 1.0] and one["gather"]["b"] == ["word", "word"]
        assert one["metrics"] == [0, 1]
        assert (one["sum"], one["mean"], one["max"]) == ([3.0], [1.5], [2.0])
        assert one["split again"] == [10, 20, 30]
    assert [one["split"] for one in found] == [[1, 2], [1, 2], [3], [3]]
    seeds = [one["seed"] for one in found]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]

    assert all(one["_overflow"] == {"skipped": [False, True, False], "scale": 32768.0} for one in ranks)
    assert all(one["_sequence_parts"]["worst"] < 1e-6 for one in ranks), [one["_sequence_parts"] for one in ranks]
    assert len({str(one["_dropout"]) for one in ranks}) == 1
    for one in ranks:
        assert (
            "the gradient of norm.weight, norm.bias of Transformer is another one on each rank"
            in one["_left_out"]["error"]
        )
