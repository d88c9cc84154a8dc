"""A loader that was interrupted anywhere goes on with what it had not delivered."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from nbdist import Accelerator, set_seed, skip_first_batches
from nbdist.data.loader import prepare_loader
from nbdist.data.options import Options
from tests.training import Ragged, Shuffling, Stream, linear_at_zero


def prepare(loader: Any, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    return prepare_loader(loader, [None], Options(rank, ranks, **options))


def rows(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epoch_of(loader: Any) -> list[Any]:
    """(batch, local, total, last) of a whole iteration."""
    live = loader._nb.live
    return [(rows(batch), live[-1].local, live[-1].total, live[-1].last) for batch in loader]


class Split(IterableDataset):
    """A stream that its workers share out, shuffled by epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(int(self.epoch)))
        return iter(order.tolist()[info.id if info else 0 :: info.num_workers if info else 1])


KINDS: dict[str, Callable[..., DataLoader]] = {
    "in order": lambda n, b, **o: DataLoader(range(n), batch_size=b, **o),
    "shuffled": lambda n, b, **o: DataLoader(range(n), batch_size=b, shuffle=True, **o),
    "own": lambda n, b, **o: DataLoader(range(n), batch_size=b, sampler=Shuffling(n), **o),
    "ragged": lambda n, b, **o: DataLoader(range(n), batch_sampler=Ragged(n), **o),
    "single": lambda n, b, **o: DataLoader(range(n), batch_size=None, shuffle=True, **o),
    "stream": lambda n, b, **o: DataLoader(Split(n), batch_size=b, **o),
    "drop": lambda n, b, **o: DataLoader(Split(n), batch_size=b, drop_last=True, **o),
}
CASES = {
    "kind": st.sampled_from(sorted(KINDS)),
    "length": st.integers(1, 23),
    "batch": st.integers(1, 4),
    "ranks": st.integers(1, 2),
    "epoch": st.integers(0, 2),
    "accumulates": st.booleans(),
    "cut": st.integers(0, 12),
}


def interrupted(case: dict[str, Any], **options: Any) -> None:
    """On every rank: cut in an epoch, go on in a loader of another seed, and go through the next epoch too."""

    def make(rank: int) -> Any:
        loader = KINDS[case["kind"]](case["length"], case["batch"], **options)
        return prepare(loader, rank, case["ranks"], accumulates=lambda: case["accumulates"])

    for rank in range(case["ranks"]):
        set_seed(4)
        whole = make(rank)
        epochs = [epoch_of(whole) for _ in range(case["epoch"] + 2)]
        cut = make(rank)
        for _ in range(case["epoch"]):
            epoch_of(cut)
        running, live = iter(cut), cut._nb.live
        head = [
            (rows(batch), live[-1].local, live[-1].total, live[-1].last)
            for batch in itertools.islice(running, case["cut"])
        ]
        state = pickle.loads(pickle.dumps(cut.state_dict()))
        del running
        set_seed(5)
        torch.rand(3)
        going_on = make(rank)
        going_on.load_state_dict(state)
        assert going_on.state_dict() == state
        if len(head) < min(len(epochs[-2]) + 1, case["cut"]):  # it ended: the state is the next epoch's start
            assert head == epochs[-2] and epoch_of(going_on) == epochs[-1], case
            continue
        assert head + epoch_of(going_on) == epochs[-2], case
        assert epoch_of(going_on) == epochs[-1], case


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.fixed_dictionaries(CASES))
def test_interrupted_anywhere_it_gives_the_batches_of_an_uninterrupted_run(case: dict[str, Any]) -> None:
    interrupted(case)


@pytest.mark.parametrize("workers", [1, 2, 4])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.fixed_dictionaries(CASES | {"epoch": st.just(1)}), persistent=st.booleans(), prefetch=st.integers(1, 4))
def test_interrupted_anywhere_with_workers(case: dict[str, Any], persistent: bool, prefetch: int, workers: int) -> None:
    interrupted(case, num_workers=workers, persistent_workers=persistent, prefetch_factor=prefetch)


def test_r1_the_rest_of_an_epoch_in_a_runtime_with_another_seed() -> None:
    set_seed(1)
    whole = rows_of(Accelerator().prepare(DataLoader(range(16), batch_size=2, shuffle=True)))
    loader = Accelerator().prepare(DataLoader(range(16), batch_size=2, shuffle=True))
    head = [batch.tolist() for batch in itertools.islice(loader, 4)]
    state = loader.state_dict()
    set_seed(2)
    again = Accelerator().prepare(DataLoader(range(16), batch_size=2, shuffle=True))
    again.load_state_dict(state)
    assert head + rows_of(again) == whole


def test_r2_the_rest_of_the_second_epoch_and_the_third() -> None:
    set_seed(1)

    def fresh() -> Any:
        return Accelerator().prepare(DataLoader(range(16), batch_size=2, shuffle=True))

    whole, cut, again = fresh(), fresh(), fresh()
    epochs = [rows_of(whole) for _ in range(3)]
    rows_of(cut)
    head = [batch.tolist() for batch in itertools.islice(cut, 4)]
    again.load_state_dict(cut.state_dict())
    assert head + rows_of(again) == epochs[1] != epochs[0]
    assert rows_of(again) == epochs[2]


def rows_of(loader: Any) -> list[Any]:
    return [rows(batch) for batch in loader]


# ---------------------------------------------------------------------- the epoch rule
def test_a_break_after_training_moves_on_though_the_state_says_where_it_was() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    loader = accelerator.prepare(DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=2, shuffle=True))
    epochs = [rows_of(loader) for _ in range(2)]
    loader.set_epoch(0)
    for count, batch in enumerate(loader, 1):
        accelerator.backward(model(batch).mean())
        if count == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["delivered"]) == (0, 2)
    assert rows_of(loader) == epochs[1]
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == epochs[0][2]  # a peek: the rest of the epoch is still to come
    loader.set_epoch(0)  # the loop's own, over the epoch that was loaded
    assert rows_of(loader) == epochs[0][2:] and rows_of(loader) == epochs[1]
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert rows_of(loader) == epochs[1]


def test_states_of_other_loaders_are_refused() -> None:
    loader = prepare(DataLoader(range(16), batch_size=2))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"no kind, rows, stride \(it has: epoch, delivered, seed\)"):
        loader.load_state_dict({"epoch": 1, "delivered": 2, "seed": 0})
    for name, value in (("epoch", -1), ("delivered", "1"), ("delivered", -2)):
        with pytest.raises(ValueError, match=f"its '{name}' is {value!r}; it must be a whole number of at least 0"):
            loader.load_state_dict(state | {name: value})
    with pytest.raises(ValueError, match="99 batches into its epoch, and of 16 in steps of 2 there are 8"):
        loader.load_state_dict(state | {"delivered": 99})
    with pytest.raises(TypeError, match=r"no state of a prepared loader: None\. Load what state_dict\(\)"):
        loader.load_state_dict(None)
    with pytest.raises(ValueError, match="over 16 samples; this one has 20"):
        prepare(DataLoader(range(20), batch_size=2)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"over a dataset with indices; this one is over a stream"):
        prepare(DataLoader(Stream(range(16)), batch_size=2)).load_state_dict(state)
    with pytest.raises(ValueError, match="batch sampler of the user's own"):
        prepare(DataLoader(range(16), batch_sampler=Ragged(16))).load_state_dict(state)
    list(itertools.islice(loader, 3))
    with pytest.raises(ValueError, match=r"6 samples into its epoch, and a step of this loader takes 4"):
        prepare(DataLoader(range(16), batch_size=4)).load_state_dict(loader.state_dict())
    stream = prepare(DataLoader(Split(16), batch_size=2, num_workers=1))
    list(itertools.islice(stream, 3))
    with pytest.raises(ValueError, match="read by 1 workers in steps of 2 samples; here there are 0"):
        prepare(DataLoader(Split(16), batch_size=2)).load_state_dict(stream.state_dict())


def test_a_state_goes_on_over_another_number_of_ranks() -> None:
    set_seed(3)
    one = prepare(DataLoader(range(14), batch_size=4, shuffle=True))
    order = [row for batch in one for row in batch.tolist()]
    one.set_epoch(0)
    list(itertools.islice(one, 2))
    halves = []
    for rank in range(2):
        half = prepare(DataLoader(range(14), batch_size=2, shuffle=True), rank, 2)
        half.load_state_dict(one.state_dict())
        halves.append(rows_of(half))
    assert [row for step in zip(*halves, strict=True) for part in step for row in part] == order[8:]


def test_a_users_distributed_sampler_is_put_at_its_epoch() -> None:
    def fresh() -> Any:
        with pytest.warns(UserWarning, match="sharded already"):
            return prepare(DataLoader(range(12), batch_size=2, sampler=DistributedSampler(range(12), 2, 1)), 1, 2)

    loader, again = fresh(), fresh()
    loader.set_epoch(3)
    whole = rows_of(loader)
    loader.set_epoch(3)
    head = [batch.tolist() for batch in itertools.islice(loader, 1)]
    again.load_state_dict(loader.state_dict())
    assert head + rows_of(again) == whole


# ---------------------------------------------------------------------- skip_first_batches
class Fetched(Dataset):
    """Says what was fetched."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.seen.append(index)
        return index


def test_skipping_is_one_pass_and_fetches_nothing_in_vain() -> None:
    accelerator, data = Accelerator(), Fetched()
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    rest = accelerator.skip_first_batches(loader, 3)
    assert type(rest).__name__ == "DataLoader" and len(rest) == 2 and len(loader) == 5 and rest.dataset is data
    assert next(iter(rest)).tolist() == [6, 7] and next(iter(loader)).tolist() == [0, 1]  # peeks
    data.seen.clear()
    assert rows_of(rest) == [[6, 7], [8, 9]] and data.seen == [6, 7, 8, 9]
    assert loader.state_dict()["epoch"] == 1 and len(rest) == 5 and len(rows_of(rest)) == 5
    assert len(rows_of(loader)) == 5 and loader.state_dict()["epoch"] == 3
    assert rows_of(skip_first_batches(loader, 9)) == [] and rows_of(skip_first_batches(loader)) == rows_of(loader)
    for wrong in (-1, "1", None):
        with pytest.raises(ValueError, match=rf"^skip_first_batches: num_batches is {wrong!r}; it must be a whole"):
            skip_first_batches(loader, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a DataLoader, prepared or plain; this is a list: \[1, 2\]"):
        skip_first_batches([1, 2], 1)
    with pytest.raises(TypeError, match=r"^prepare_data_loader takes a torch DataLoader; this is a list: \[1, 2\]"):
        accelerator.prepare_data_loader([1, 2])  # type: ignore[arg-type]


def test_skipping_in_the_epoch_that_training_left() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    loader = accelerator.prepare(DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2, shuffle=True))
    epochs = [rows_of(loader) for _ in range(2)]
    loader.set_epoch(0)
    for batch in itertools.islice(loader, 2):
        accelerator.backward(model(batch).mean())
    rest = accelerator.skip_first_batches(loader, 2)
    seen = []
    for batch in rest:
        accelerator.backward(model(batch).mean())
        seen.append(batch.tolist())
    assert seen == epochs[0][2:] and rows_of(loader) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_on_plain_loaders_and_streams(workers: int) -> None:
    class Mine(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()

    for make in (
        lambda: DataLoader(range(7), batch_size=2, num_workers=workers),
        lambda: Mine(range(7), batch_sampler=[[0, 1], [2, 3], [4, 5], [6]], num_workers=workers),
        lambda: DataLoader(Split(7), batch_size=2, num_workers=workers),
        lambda: prepare(DataLoader(Split(7), batch_size=2, num_workers=workers)),
    ):
        plain: Any = make()
        whole = rows_of(plain)
        if hasattr(plain, "_nb"):
            plain.set_epoch(0)
        rest = skip_first_batches(plain, 3)
        assert isinstance(rest, DataLoader) and type(rest).__name__ == type(plain).__name__
        assert rows_of(rest) == whole[3:]
        if not hasattr(plain, "_nb"):
            assert rows_of(rest) == whole == rows_of(plain)
