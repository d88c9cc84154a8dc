"""Rank 0 reads for all ranks: the same batches as where every rank reads, and its errors on every rank."""

from __future__ import annotations

import itertools
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbdist import Accelerator, DataLoaderConfiguration, set_seed
from nbdist.data.parcel import pack, unpack
from tests.data.test_sharded import in_windows
from tests.ranks import run_ranks
from tests.training import Ragged, Shuffling, Stream, linear_at_zero

Pair = namedtuple("Pair", "left right")


class Only(Dataset):
    """Read on rank 0 only."""

    def __init__(self, rows: int, rank: int, fails_at: int | None = None) -> None:
        self.rows, self.rank, self.fails_at = rows, rank, fails_at

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        assert self.rank == 0, "read on another rank"
        if index == self.fails_at:
            raise ZeroDivisionError(f"row {index}")
        return index


class OnlyStream(IterableDataset):
    def __init__(self, rows: int, rank: int, fails_at: int | None = None) -> None:
        self.rows, self.rank, self.fails_at = rows, rank, fails_at

    def __iter__(self) -> Iterator[int]:
        assert self.rank == 0, "read on another rank"
        for row in range(self.rows):
            if row == self.fails_at:
                raise ZeroDivisionError(f"row {row}")
            yield row


def nested(rows: list[int]) -> Any:
    """Tensors of several types and shapes, objects, and a length that differs."""
    return {
        "x": torch.tensor(rows, dtype=torch.bfloat16).reshape(-1, 1),
        "pair": Pair([torch.ones(row) for row in rows], (torch.tensor(3.5), "text")),
        "odd": [torch.tensor([True] * len(rows)), torch.empty(0, 2), {len(rows)}],
    }


def taken(accelerator: Accelerator, loader: Any, take: int | None = None) -> list[Any]:
    live = accelerator._live
    return [
        (batch.tolist() if isinstance(batch, torch.Tensor) else batch, live[-1].local, live[-1].total)
        for batch in itertools.islice(loader, take)
    ]


def loaders(rank: int) -> dict[str, DataLoader]:
    data, stream = Only(11, rank), OnlyStream(11, rank)
    return {
        "in order": DataLoader(data, batch_size=2),
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "own sampler": DataLoader(data, batch_size=3, sampler=Shuffling(11)),
        "ragged": DataLoader(data, batch_sampler=Ragged(11)),
        "single": DataLoader(data, batch_size=None),
        "dropped": DataLoader(data, batch_size=2, drop_last=True),
        "one row": DataLoader(Only(1, rank), batch_size=4),
        "no row": DataLoader(Only(0, rank), batch_size=4),
        "stream": DataLoader(stream, batch_size=2),
        "stream single": DataLoader(stream, batch_size=None),
        "stream dropped": DataLoader(stream, batch_size=2, drop_last=True),
        "no stream": DataLoader(OnlyStream(0, rank), batch_size=2),
        "workers": DataLoader(data, batch_size=2, shuffle=True, num_workers=2),
    }


def views(rank: int, ranks: int) -> dict[str, Any]:
    dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    reading = Accelerator()
    told: dict[str, Any] = {}
    for (name, dispatched), usual in zip(loaders(rank).items(), loaders(0).values(), strict=True):
        for how, accelerator, loader in (("sent", dispatching, dispatched), ("read", reading, usual)):
            set_seed(2)
            prepared = accelerator.prepare(loader)
            told[f"{name}: {how}"] = [taken(accelerator, prepared) for _ in range(2)]
            prepared.load_state_dict(prepared.state_dict() | {"epoch": 1, "delivered": int(name != "no row")})
            told[f"{name}: {how}"].append(taken(accelerator, prepared))
    told["dl6"] = [
        tuple(batch.shape)
        for batch in dispatching.prepare(DataLoader(Stream([torch.ones(size) for size in (2, 3, 2, 3)])))
    ]
    batch = next(iter(dispatching.prepare(DataLoader(Only(5, rank), batch_size=3, collate_fn=nested))))
    expected = nested([0, 1, 2] if rank == 0 else [3, 4])
    told["nested"] = (
        torch.equal(batch["x"], expected["x"]) and batch["x"].dtype is torch.bfloat16,
        type(batch["pair"]) is Pair and [len(one) for one in batch["pair"].left] == [[0, 1, 2], [3, 4]][rank],
        batch["pair"].right[0].item() == 3.5 and batch["pair"].right[1] == "text",
        batch["odd"][0].dtype is torch.bool and batch["odd"][1].shape == (0, 2) and batch["odd"][2] == {3 - rank},
    )
    told["len"] = len(dispatching.prepare(DataLoader(Only(0 if rank else 11, rank), batch_size=2)))
    broken = dispatching.prepare(DataLoader(OnlyStream(100, rank), batch_size=2))
    told["breaks"] = [taken(dispatching, broken, take) for take in (1, 3)]
    told["after"] = dispatching.gather(torch.tensor([rank])).tolist()
    started = time.monotonic()
    for name, loader in {
        "rows": DataLoader(Only(20, rank, 9), batch_size=2),
        "stream": DataLoader(OnlyStream(20, rank, 9), batch_size=2),
        "worker": DataLoader(Only(20, rank, 9), batch_size=2, num_workers=1),
        "start": DataLoader(OnlyStream(20, 0 if rank else 1), batch_size=2),
        "unpicklable": DataLoader(Only(8, rank), batch_size=2, collate_fn=lambda rows: (row for row in rows)),
    }.items():
        got = []
        try:
            for batch in dispatching.prepare(loader):
                got.append(batch.tolist())
        except Exception as error:
            told[f"fails: {name}"] = (got, type(error).__name__, str(error))
    told["seconds"] = time.monotonic() - started
    model = linear_at_zero()
    model, optimizer = dispatching.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in dispatching.prepare(DataLoader(Stream([torch.ones(1)] * 3))):  # DL5 and ME3, where rank 0 reads
        dispatching.backward(-model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    told["dl5"] = dispatching.unwrap_model(model).weight.item()
    config = DataLoaderConfiguration(dispatch_batches=True)
    windows = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    told["windows"] = in_windows(windows, Stream([{"x": torch.tensor([float(row)])} for row in range(1, 8)]))
    numbers = dispatching.prepare(DataLoader(Stream(range(9)), batch_size=2))
    told["me3"] = sorted(row for batch in numbers for row in dispatching.gather_for_metrics(batch).tolist())
    return told


@pytest.mark.ranks
def test_what_rank_0_sends_is_what_each_rank_would_have_read() -> None:
    answers = run_ranks(views, 2)
    for rank, told in enumerate(answers):
        for name in loaders(0):
            sent, read = told[f"{name}: sent"], told[f"{name}: read"]
            assert sent == read, (rank, name)
        assert told["dl6"] == [[(1, 2), (1, 2)], [(1, 3), (1, 3)]][rank]
        assert told["nested"] == (True,) * 4
        assert [len(part) for part in told["breaks"]] == [1, 3] and told["after"] == [0, 1]
        assert told["len"] == 3
        assert told["windows"] == (1 + 2 + 3 + 4) / 4 + (5 + 6 + 7) / 3
        assert told["dl5"] == 2.0 and told["me3"] == list(range(9))
        assert told["seconds"] < 10
        for name in ("rows", "stream", "worker", "start", "unpicklable"):
            got, kind, text = told[f"fails: {name}"]
            assert got == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank] * (name in ("rows", "stream", "worker")), name
            if rank:
                assert kind == "RuntimeError" and text.startswith("rank 0, which reads for all ranks"), name
                assert "Traceback (most recent call last)" in text
            if name in ("rows", "stream", "worker"):
                assert "ZeroDivisionError" in (text if rank or name == "worker" else kind)
        assert "cannot be sent to another rank" in told["fails: unpicklable"][2]
    assert answers[0]["fails: start"][1] == "AssertionError"


def test_split_by_rank_and_dispatch_do_not_go_together() -> None:
    from nbdist.data.loader import prepare_loader
    from nbdist.data.options import Options

    stream: Any = Stream(range(3))
    stream.sharded_by_rank = True
    with pytest.raises(ValueError, match="rank 0 read for all ranks, and this dataset is already split by rank"):
        prepare_loader(DataLoader(stream), [None], Options(0, 2, dispatch=True))


def test_a_parcel_holds_any_nested_value() -> None:
    tensors = [
        torch.arange(6).reshape(2, 3).t(),  # not contiguous
        torch.tensor(2.5, dtype=torch.float16),
        torch.zeros(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True) * 1,
        torch.eye(2).to_sparse(),
    ]
    value = {"a": tensors, "b": ("text", {1, 2}, None), "same": tensors[0]}
    again = unpack(pack(value))
    assert again["b"] == value["b"]
    for one, other in zip(again["a"], tensors, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(one.detach().to_dense(), other.detach().to_dense())
    assert unpack(pack(lambda: 3))() == 3
