"""Datasets that are another one on each rank: every rank makes the same number of steps, and no row counts twice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nbdist import Accelerator, DataLoaderConfiguration
from tests.ranks import run_ranks
from tests.training import Ragged, linear_at_zero

SIZES = [(7, 3), (3, 7), (0, 5), (5, 0), (0, 0), (1, 1), (200, 3), (66, 64), (1, 90)]


class Own(IterableDataset):
    """This rank's numbers, shared out over workers."""

    sharded_by_rank = True

    def __init__(self, rows: int, rank: int, fails_at: int | None = None) -> None:
        self.rows, self.rank, self.fails_at = rows, rank, fails_at

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for row in range(info.id if info else 0, self.rows, info.num_workers if info else 1):
            if row == self.fails_at:
                raise ZeroDivisionError(f"row {row}")
            yield {"id": torch.tensor(1000 * self.rank + row), "x": torch.tensor([float(row + 1)])}


class Rows(torch.utils.data.Dataset):
    sharded_by_rank = True

    def __init__(self, rows: int, rank: int) -> None:
        self.rows, self.rank = rows, rank

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(1000 * self.rank + index), "x": torch.tensor([float(index + 1)])}


def taken(accelerator: Accelerator, loader: Any, take: int | None = None) -> list[Any]:
    live = accelerator._live
    return [
        (batch["id"].tolist(), live[-1].local, live[-1].total, live[-1].last)
        for batch in itertools.islice(loader, take)
    ]


def in_windows(prepared_by: Accelerator, data: Any) -> float:
    """The weight after training in windows."""
    model = linear_at_zero()
    model, optimizer = prepared_by.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in prepared_by.prepare(DataLoader(data, batch_size=1)):
        with prepared_by.accumulate(model):
            prepared_by.backward(-model(batch["x"]).mean())
            optimizer.step()
            optimizer.zero_grad()
    return prepared_by.unwrap_model(model).weight.item()


def views(rank: int, ranks: int) -> dict[str, Any]:
    accelerator = Accelerator()
    told: dict[str, Any] = {}

    def prepared(dataset: Any, **options: Any) -> Any:
        return accelerator.prepare(DataLoader(dataset, **{"batch_size": 2, **options}))

    for sizes in SIZES:
        told[f"stream {sizes}"] = taken(accelerator, prepared(Own(sizes[rank], rank)))
        told[f"rows {sizes}"] = taken(accelerator, prepared(Rows(sizes[rank], rank)))
    told["workers"] = taken(accelerator, prepared(Own((9, 4)[rank], rank), num_workers=2))
    told["drop"] = taken(accelerator, prepared(Rows((9, 4)[rank], rank), drop_last=True))
    told["len"] = len(prepared(Rows((9, 4)[rank], rank)))
    ragged = DataLoader(Rows(9, rank), batch_sampler=Ragged((9, 4)[rank]))
    told["ragged"] = taken(accelerator, accelerator.prepare(ragged))
    plain = DataLoader([{"id": torch.tensor(rank)}] * (rank + 1))
    told["asked"] = taken(accelerator, accelerator.prepare_data_loader(plain, already_sharded=True))
    told["unasked"] = taken(accelerator, accelerator.prepare_data_loader(DataLoader(Rows(3, 0)), already_sharded=False))
    # a break on all ranks leaves nothing behind
    broken = prepared(Own((9, 40)[rank], rank))
    told["breaks"] = [taken(accelerator, broken, take) for take in (1, 2, 5)]
    told["after"] = accelerator.gather(torch.tensor([rank])).tolist()
    # resumed anywhere
    for kind in (Own, Rows):
        whole = taken(accelerator, prepared(kind((9, 4)[rank], rank)))
        for cut in range(6):
            first = prepared(kind((9, 4)[rank], rank))
            head = taken(accelerator, first, cut)
            state = accelerator.gather(str(first.state_dict()))
            second = prepared(kind((9, 4)[rank], rank))
            second.load_state_dict(first.state_dict())
            rest = taken(accelerator, second) if first.state_dict()["epoch"] == 0 else []
            assert len(set(state)) == 1, state
            real = [(ids[:local], *numbers) for ids, local, *numbers in head + rest]
            assert real == [(ids[:local], *numbers) for ids, local, *numbers in whole], (kind, cut)
    # it trains: each row once, in steps of both ranks
    model = linear_at_zero()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in prepared(Own((3, 1)[rank], rank), batch_size=1):
        accelerator.backward(-model(batch["x"]).mean())
        optimizer.step()
        optimizer.zero_grad()
    told["weight"] = accelerator.unwrap_model(model).weight.item()
    told["windows"] = in_windows(prepared_by=Accelerator(gradient_accumulation_steps=2), data=Own((5, 2)[rank], rank))
    # a rank that fails is heard of by all
    started = time.monotonic()
    for at in (0, 2, 9):
        try:
            taken(accelerator, prepared(Own(20, rank, at if rank else None)))
        except Exception as error:
            told[f"fails {at}"] = (type(error).__name__, str(error))
    told["seconds"] = time.monotonic() - started
    return told


@pytest.mark.ranks
def test_every_rank_makes_the_same_steps_and_each_row_counts_once() -> None:
    first, second = run_ranks(views, 2)
    for name in first:
        if not name.startswith(("stream", "rows", "workers", "drop", "ragged")):
            continue
        ours, theirs = first[name], second[name]
        assert [step[2:] for step in ours] == [step[2:] for step in theirs], name
        assert [step[1] + other[1] for step, other in zip(ours, theirs, strict=True)] == [step[2] for step in ours]
        assert [step[3] for step in ours] == [False] * (len(ours) - 1) + [True] * bool(ours), name
    for sizes in SIZES:
        for kind in ("stream", "rows"):
            for rank, view in enumerate((first, second)):
                steps = view[f"{kind} {sizes}"]
                assert [row for ids, local, *_ in steps for row in ids[:local]] == [
                    1000 * rank + row for row in range(sizes[rank])
                ]
                assert len(steps) == -(-max(sizes) // 2)
                assert all(ids for ids, *_ in steps)
    assert first["stream (0, 5)"][0] == ([1000, 1001], 0, 2, False)  # borrowed
    assert first["rows (0, 5)"][2] == ([1000, 1001], 0, 1, True)
    assert second["rows (5, 0)"][2] == ([0, 1], 0, 1, True)
    assert second["stream (7, 3)"][3] == ([1002], 0, 1, True)  # its own last
    assert sorted(row for ids, local, *_ in first["workers"] for row in ids[:local]) == list(range(9))
    assert [ids[:local] for ids, local, *_ in second["drop"]] == [[1000, 1001], [1002, 1003], [], []]
    assert first["len"] == second["len"] == 5
    assert (first["asked"][1], second["asked"][1]) == (([0], 0, 1, True), ([1], 1, 1, True))
    assert (first["unasked"], second["unasked"]) == (
        [([0], 1, 2, False), ([2], 1, 1, True)],
        [([1], 1, 2, False), ([2], 0, 1, True)],
    )
    assert [len(part) for part in first["breaks"]] == [1, 2, 5] and first["after"] == [0, 1]
    assert first["breaks"][2][4] == ([8], 1, 3, False)
    assert first["weight"] == second["weight"] == (1 + 1) / 2 + 2 + 3
    assert first["windows"] == second["windows"] == (1 + 1 + 2 + 2) / 4 + (3 + 4) / 2 + 5
    for at in (0, 2, 9):
        assert second[f"fails {at}"] == ("ZeroDivisionError", f"row {at}")
        kind, text = first[f"fails {at}"]
        assert kind == "RuntimeError" and text.startswith(
            f"the dataset of rank 1 failed: ZeroDivisionError: row {at}\n"
        )
        assert "Traceback (most recent call last)" in text
    assert first["seconds"] < 10


def test_alone_it_is_a_stream_as_any_other() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(Own(3, 0), batch_size=2))
    assert taken(accelerator, loader) == [([0, 1], 2, 2, False), ([2], 1, 1, False)]
