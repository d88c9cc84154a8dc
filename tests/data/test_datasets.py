"""Hugging Face datasets: with indices, as streams, split by rank, with workers, resumed."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on a hub
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
datasets = pytest.importorskip("datasets")

from nbdist import Accelerator, set_seed  # noqa: E402
from nbdist.data import stream_state  # noqa: E402
from nbdist.data.loader import prepare_loader  # noqa: E402
from nbdist.data.options import Options  # noqa: E402
from nbdist.data.stream_state import is_exact  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> None:
    set_seed(0)


def table(rows: int) -> Any:
    data = datasets.Dataset.from_dict({"id": list(range(rows)), "text": [f"row {row}" for row in range(rows)]})
    return data.with_format("torch")


def generated(rows: int, shards: int = 1) -> Any:
    """A stream from a generator, in shards."""

    def rows_of(parts: list[int]) -> Any:
        for part in parts:
            for row in range(part, rows, shards):
                yield {"id": row}

    stream = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"parts": list(range(shards))})
    return stream.with_format("torch")


def prepare(loader: Any, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    return prepare_loader(loader, [None], Options(rank, ranks, **options))


def ids(loader: Any, take: int | None = None) -> list[list[int]]:
    """The real ids by step."""
    live = loader._nb.live
    return [batch["id"].tolist()[: live[-1].local] for batch in itertools.islice(loader, take)]


def flat(steps: list[list[int]]) -> list[int]:
    return [row for step in steps for row in step]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_with_indices(workers: int) -> None:
    def make(rank: int) -> Any:
        data = table(11).shuffle(seed=1)
        return prepare(DataLoader(data, batch_size=2, shuffle=True, num_workers=workers), rank, 2)

    first, second = make(0), make(1)
    epochs = [(ids(first), ids(second)) for _ in range(2)]
    for ours, theirs in epochs:
        assert sorted(flat(ours) + flat(theirs)) == list(range(11)) and len(ours) == len(theirs) == 3
    assert epochs[0] != epochs[1]
    batch = next(iter(first))
    assert isinstance(batch["id"], torch.Tensor) and batch["text"][0] == f"row {batch['id'][0]}"
    again = make(0)
    again.set_epoch(1)
    head = ids(again, 2)
    resumed = make(0)
    resumed.load_state_dict(again.state_dict())
    assert head + ids(resumed) == epochs[1][0]


STREAMS = {
    "of a table": lambda: table(23).to_iterable_dataset(num_shards=4),
    "generated": lambda: generated(23),
    "in shards": lambda: generated(23, 3),
    "shuffled": lambda: generated(23, 3).shuffle(seed=3, buffer_size=5),
}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "kind, workers", [("of a table", 0), ("generated", 0), ("in shards", 0), ("shuffled", 0), ("shuffled", 2)]
)
def test_streams_with_epochs_and_resumed(kind: str, workers: int, accumulates: bool) -> None:
    if workers and accumulates:
        return

    def make(rank: int) -> Any:
        loader = DataLoader(STREAMS[kind](), batch_size=3, num_workers=workers)
        return prepare(loader, rank, 2, accumulates=lambda: accumulates)

    first, second = make(0), make(1)
    epochs = [(ids(first), ids(second)) for _ in range(3)]
    for ours, theirs in epochs:
        assert sorted(flat(ours) + flat(theirs)) == list(range(23)) and len(ours) == len(theirs)
    assert (epochs[0] != epochs[1]) == (kind == "shuffled")  # datasets shuffles by its epoch, which follows ours
    for cut in (1, 3) if not workers else (3,):
        again = make(1)
        again.set_epoch(1)
        head = ids(again, cut)
        state = again.state_dict()
        assert ("stream" in state) == (kind != "shuffled")  # a shuffle buffer is not in a dataset's own state
        resumed = make(1)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert ids(resumed, 1) == epochs[1][1][cut : cut + 1]  # a peek
        assert head + ids(resumed) == epochs[1][1] and ids(resumed) == epochs[2][1]
        resumed.set_epoch(1)
        assert ids(resumed) == epochs[1][1]


def test_resuming_a_stream_by_its_own_state_reads_nothing_twice() -> None:
    plain = datasets.Dataset.from_dict({"id": list(range(1000))}).to_iterable_dataset(num_shards=10)
    seen = []
    counted = plain.map(lambda row: seen.append(row["id"]) or row).with_format("torch")
    loader = prepare(DataLoader(counted, batch_size=4))
    ids(loader, 200)
    seen.clear()
    loader.load_state_dict(loader.state_dict())
    assert flat(ids(loader)) == list(range(800, 1000)) == seen


def test_without_the_pipeline_of_a_stream_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_state, "is_exact", lambda source: is_exact(None))
    loader = prepare(DataLoader(STREAMS["of a table"](), batch_size=3))
    whole = ids(loader)
    loader.set_epoch(0)
    head = ids(loader, 2)
    state = loader.state_dict()
    assert "stream" not in state
    loader.load_state_dict(state)
    assert head + ids(loader) == whole


def test_persistent_workers_hear_of_the_epoch_and_of_the_batch() -> None:
    def make() -> Any:
        options = {"num_workers": 2, "persistent_workers": True}
        return prepare(DataLoader(STREAMS["shuffled"](), batch_size=3, **options), 0, 1)

    loader, again = make(), make()
    epochs = [ids(loader) for _ in range(3)]
    assert epochs[0] != epochs[1]
    ids(again)
    again.load_state_dict(again.state_dict() | {"epoch": 1, "delivered": 4})
    assert ids(again) == epochs[1][4:] and ids(again) == epochs[2]


def split(rank: int, ranks: int) -> dict[str, Any]:
    from datasets.distributed import split_dataset_by_node

    accelerator = Accelerator()
    told: dict[str, Any] = {}
    for name, data, options in [
        ("table", table(11), {}),
        ("stream", generated(11), {}),
        ("shards", generated(11, 4), {}),
        ("workers", generated(23, 4), {"num_workers": 2}),
        ("few", generated(1), {}),
    ]:
        part = split_dataset_by_node(data, rank, ranks)
        part = DataLoader(part, batch_size=2, **options)
        loader = accelerator.prepare_data_loader(part, already_sharded=True if name == "table" else None)
        live = accelerator._live
        told[name] = [(batch["id"].tolist()[: live[-1].local], live[-1].total, live[-1].last) for batch in loader]
        told[f"{name} again"] = ids(loader)
        loader.load_state_dict(loader.state_dict() | {"epoch": 1, "delivered": 1})
        told[f"{name} resumed"] = ids(loader)
    for name, seeded in (("unseeded", {}), ("seeded", {"seed": 3})):
        try:
            told[name] = flat(ids(accelerator.prepare(DataLoader(generated(11).shuffle(buffer_size=5, **seeded)))))
        except ValueError as error:
            told[name] = str(error)
    return told


@pytest.mark.ranks
def test_datasets_that_are_split_by_node() -> None:
    first, second = run_ranks(split, 2)
    assert "the ranks' streams come in other orders (dataset._ex_iterable.generator differs)" in first["unseeded"]
    assert first["unseeded"] == second["unseeded"] and set(first["seeded"] + second["seeded"]) == {*range(11)}
    for name, rows in {"table": 11, "stream": 11, "shards": 11, "workers": 23, "few": 1}.items():
        assert [step[1:] for step in first[name]] == [step[1:] for step in second[name]], name
        assert first[name][-1][2] and sum(step[1] for step in first[name]) == rows
        assert sorted(row for told in (first, second) for step in told[name] for row in step[0]) == list(range(rows))
        for told in (first, second):
            assert told[f"{name} again"] == [step[0] for step in told[name]]
            assert told[f"{name} resumed"] == told[f"{name} again"][1:]
