"""Prepared loaders: the user's own class, only its indices sharded. Every rank's view is made in this one process."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from nbdist import Accelerator, set_seed, skip_first_batches
from nbdist.data.loader import Prepared, prepare_loader, user_loader
from nbdist.data.options import Options
from tests.training import Ragged, Shuffling, Stream


@pytest.fixture(autouse=True)
def seeded() -> None:
    set_seed(0)


def delivered(loader: Any, take: int | None = None) -> list[tuple[Any, int, int]]:
    """(batch, real rows here, real rows on all ranks) of an iteration; `loader` is prepared."""
    live = loader._nb.live
    return [
        (batch.tolist() if isinstance(batch, torch.Tensor) else batch, live[-1].local, live[-1].total)
        for batch in itertools.islice(loader, take)
    ]


def prepare(loader: Any, rank: int, ranks: int, live: Any = None, **options: Any) -> Any:
    """A rank's view of the loader."""
    return prepare_loader(loader, [None] if live is None else live, Options(rank, ranks, **options))


def on_ranks(make: Any, ranks: int, **options: Any) -> list[Any]:
    return [prepare(make(), rank, ranks, **options) for rank in range(ranks)]


def flattened(lists: Any) -> list[Any]:
    return [item for one in lists for item in one]


def real(loader: Any) -> list[list[int]]:
    return [batch[:local] for batch, local, _ in delivered(loader)]


def test_a_step_takes_consecutive_samples_and_the_tail_is_split_evenly() -> None:
    first, second, third = on_ranks(lambda: DataLoader(range(14), batch_size=3), 3)
    assert delivered(first) == [([0, 1, 2], 3, 9), ([9, 10], 2, 5)]
    assert delivered(second) == [([3, 4, 5], 3, 9), ([11, 12], 2, 5)]
    assert delivered(third) == [([6, 7, 8], 3, 9), ([13], 1, 5)]
    assert len(first) == len(third) == 2


def test_one_sample_on_two_ranks_is_one_real_row() -> None:
    assert [delivered(loader) for loader in on_ranks(lambda: DataLoader(range(1), batch_size=4), 2)] == [
        [([0], 1, 1)],
        [([0], 0, 1)],
    ]


def test_drop_last_drops_the_last_joint_step() -> None:
    loaders = on_ranks(lambda: DataLoader(range(11), batch_size=2, drop_last=True), 2)
    assert [real(loader) for loader in loaders] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [len(loader) for loader in loaders] == [2, 2]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_orders_advance_and_are_a_function_of_seed_and_epoch(options: dict[str, Any]) -> None:
    def make() -> DataLoader:
        return DataLoader(range(12), batch_size=2, shuffle=True, **options)

    loaders = on_ranks(make, 2)
    epochs = [[real(loader) for loader in loaders] for _ in range(2)]
    for epoch in epochs:
        assert sorted(flattened(flattened(epoch))) == list(range(12))
    assert epochs[0] != epochs[1]
    (again,) = on_ranks(make, 1)
    torch.rand(5)
    again.set_epoch(1)
    joined = [index for pair in zip(*epochs[1], strict=True) for step in pair for index in step]
    assert flattened(real(again)) == joined
    set_seed(1)
    again.set_epoch(1)
    assert flattened(real(again)) != joined


def test_the_seed_is_that_of_the_users_generator() -> None:
    def order(seed: int) -> list[Any]:
        return real(
            on_ranks(lambda: DataLoader(range(9), shuffle=True, generator=torch.Generator().manual_seed(seed)), 1)[0]
        )

    five = order(5)
    set_seed(9)
    assert order(5) == five != order(6)


def test_each_loader_has_orders_of_its_own() -> None:
    def loader(**options: Any) -> DataLoader:
        return DataLoader(range(20), batch_size=20, **(options or {"shuffle": True}))

    def orders(accelerator: Accelerator, loaders: list[DataLoader]) -> list[list[int]]:
        return [one.tolist() for raw in loaders for one in accelerator.prepare(raw)]

    accelerator = Accelerator()
    made_anew = orders(accelerator, [loader(), loader(), loader()])
    assert len(set(map(tuple, made_anew))) == 3
    assert orders(Accelerator(), [loader(), loader(), loader()]) == made_anew  # as in a cell that runs again
    drawn = orders(accelerator, [loader(sampler=RandomSampler(range(20), replacement=True)) for _ in range(2)])
    assert drawn[0] != drawn[1]
    raw = loader()
    assert orders(accelerator, [raw]) == orders(accelerator, [raw])  # the same one again

    shared, like_it = (torch.Generator().manual_seed(5) for _ in range(2))
    first, second = orders(accelerator, [loader(shuffle=True, generator=shared) for _ in range(2)])
    assert first != second and orders(accelerator, [loader(shuffle=True, generator=like_it)]) == [first]

    state = accelerator.prepare(raw).state_dict()
    resumed: Any = Accelerator().prepare(loader())
    resumed.load_state_dict(state)
    assert [one.tolist() for one in resumed] == orders(accelerator, [raw])
    taken_over = Accelerator()
    both = [taken_over.prepare(accelerator.prepare(raw)), taken_over.prepare(loader())]
    assert both[0]._nb.position.number == 5 and both[1]._nb.position.number == 6


def test_loaders_made_anew_do_not_pile_up() -> None:
    accelerator = Accelerator()
    for _ in range(20):
        list(accelerator.prepare(DataLoader(range(2), shuffle=True, generator=torch.Generator())))
    gc.collect()
    assert not accelerator._numbers._of and not accelerator._numbers._counted


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 9, 9),
        lambda: RandomSampler(range(9), replacement=True, num_samples=7),
        lambda: RandomSampler(range(9), num_samples=20),
        lambda: Shuffling(9),
    ],
    ids=["weighted", "replacement", "more than there are", "the user's"],
)
def test_any_sampler_gives_the_ranks_one_order_whatever_they_have_drawn(sampler: Any) -> None:
    (alone,) = on_ranks(lambda: DataLoader(range(9), batch_size=1, sampler=sampler()), 1)
    order = flattened(real(alone))
    parts = []
    for loader in on_ranks(lambda: DataLoader(range(9), batch_size=2, sampler=sampler()), 2):
        torch.rand(3)
        before = torch.get_rng_state(), random.getstate()
        parts.append(real(loader))
        random.setstate(before[1])
    assert [index for pair in itertools.zip_longest(*parts) for step in pair for index in step] == order


def test_preparing_draws_nothing_from_the_users_generators() -> None:
    (loader,) = on_ranks(lambda: DataLoader(range(9), sampler=Shuffling(9)), 1)
    state = random.getstate()
    loader._nb.source.plan(0)
    assert random.getstate() == state
    torch.manual_seed(1)
    loader._nb.source.plan(0)
    drawn = torch.rand(1).item()
    torch.manual_seed(1)
    assert torch.rand(1).item() == drawn


def test_a_users_batches_stay_whole_and_go_round_robin() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9]]
    first, second = on_ranks(lambda: DataLoader(range(10), batch_sampler=batches), 2)
    assert delivered(first) == [([0, 1, 2], 3, 4), ([4, 5], 2, 5), ([9], 1, 1)]
    assert delivered(second) == [([3], 1, 4), ([6, 7, 8], 3, 5), ([9], 0, 1)]
    assert len(first) == 3


def test_batch_samplers_that_draw_and_have_no_length() -> None:
    loaders = on_ranks(lambda: DataLoader(range(30), batch_sampler=Ragged(30)), 2)
    epochs = [flattened(flattened(real(loader)) for loader in loaders) for _ in range(2)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs) and epochs[0] != epochs[1]
    with pytest.raises(TypeError):
        len(loaders[0])


def test_torchs_own_batch_sampler_given_by_hand() -> None:
    def make() -> DataLoader:
        return DataLoader(range(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 2, drop_last=False))

    assert [real(loader) for loader in on_ranks(make, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_endless_samplers() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return itertools.cycle(range(3))

    (_, second) = on_ranks(lambda: DataLoader(range(3), batch_size=2, sampler=Endless()), 2)
    assert delivered(second, 3) == [([2, 0], 2, 4), ([0, 1], 2, 4), ([1, 2], 2, 4)]


def test_without_batches() -> None:
    first, second = on_ranks(lambda: DataLoader(range(5), batch_size=None), 2)
    assert delivered(first) == [(0, 1, 0), (2, 1, 0), (4, 1, 0)]  # what the others have shows in their batches only
    assert delivered(second) == [(1, 1, 0), (3, 1, 0), (4, 0, 0)]
    assert len(second) == 3


def test_a_loader_that_is_sharded_already_is_left_alone() -> None:
    for rank, right in enumerate([[[0, 2], [4, 6]], [[1, 3], [5, 7]]]):
        sampler = DistributedSampler(range(8), 2, rank, shuffle=False)
        with pytest.warns(UserWarning, match="sharded already"):
            loader = prepare(DataLoader(range(8), batch_size=2, sampler=sampler), rank, 2)
        assert delivered(loader) == [(batch, 2, 4) for batch in right]
        loader.set_epoch(3)
        assert sampler.epoch == 3


class Split(IterableDataset):
    """A stream that its workers share out."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, self.rows, info.num_workers if info else 1))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_streams_give_each_sample_once_and_every_rank_as_many_steps(ranks: int, workers: int) -> None:
    loaders = on_ranks(lambda: DataLoader(Split(11), batch_size=2, num_workers=workers), ranks)
    views = [delivered(loader) for loader in loaders]
    assert sorted(row for view in views for batch, local, _ in view for row in batch[:local]) == list(range(11))
    assert len({len(view) for view in views}) == 1
    for step in zip(*views, strict=True):
        assert {total for _, _, total in step} == {sum(local for _, local, _ in step)}


def test_a_stream_without_length_metric_rows() -> None:
    first, second = on_ranks(lambda: DataLoader(Stream(range(9)), batch_size=2), 2)
    assert sorted(flattened(real(first) + real(second))) == list(range(9))
    with pytest.raises(TypeError):
        len(first)


def test_streams_of_different_shapes_and_lengths() -> None:
    rows = [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(3)]
    shapes = [[tuple(batch.shape) for batch in loader] for loader in on_ranks(lambda: DataLoader(Stream(rows)), 2)]
    assert shapes == [[(1, 2), (1, 2)], [(1, 3), (1, 3)]]

    class Sized(Split):
        def __len__(self) -> int:
            return self.rows

    for rows_, batch, drop in [(11, 2, False), (11, 2, True), (12, 3, False), (1, 4, False)]:
        for loader in on_ranks(lambda: DataLoader(Sized(rows_), batch_size=batch, drop_last=drop), 2):  # noqa: B023
            assert len(loader) == len(list(loader))
    first, second = on_ranks(lambda: DataLoader(Split(3), batch_size=None), 2)
    assert (delivered(first), delivered(second)) == ([(0, 1, 0), (2, 1, 0)], [(1, 1, 0), (2, 0, 0)])


class Numbers(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Marked(DataLoader):
    """A user's subclass: an attribute, a method, and batches that it changes and skips."""

    def __init__(self, *args: Any, tag: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tag = tag

    def __iter__(self) -> Iterator[Any]:
        for count, batch in enumerate(super().__iter__()):
            if count:
                yield self.tag, batch.tolist()

    def hello(self) -> str:
        return self.tag


@pytest.mark.parametrize("dataset", [Numbers(), Split(10)], ids=["map", "stream"])
def test_it_is_the_users_own_class(dataset: Any) -> None:
    user = Marked(dataset, batch_size=3, tag="t")
    loader = prepare(user, 0, 2)
    assert isinstance(loader, Marked) and type(loader).__name__ == "Marked" and loader.hello() == "t"
    assert user_loader(loader) is user and prepare(loader, 0, 2, loader._nb.live) is loader
    assert not isinstance(user, Prepared) and type(user.batch_sampler) in (BatchSampler, type(None))
    assert delivered(loader) == [(("t", [6, 7]), 2, 4)]
    with pytest.raises(ValueError, match="batch_size"):
        loader.batch_size = 5
    assert list(user)[-1] == ("t", [9])


def test_samplers_are_seen_through() -> None:
    sampler = WeightedRandomSampler([1.0] * 4, 4)
    loader = prepare(DataLoader(range(4), batch_size=2, sampler=sampler), 0, 1)
    assert loader.sampler is sampler and loader.batch_sampler.batch_size == 2
    stream = Split(4)
    stream.name = "s"  # type: ignore[attr-defined]
    assert prepare(DataLoader(stream), 0, 1).dataset.name == "s"


def test_where_an_iteration_is() -> None:
    (loader,) = on_ranks(lambda: DataLoader(range(6), batch_size=2, shuffle=True), 1)
    live, position = loader._nb.live, loader._nb.position
    first = next(iter(loader)).tolist()  # a peek uses nothing up
    assert live == [None] and next(iter(loader)).tolist() == first
    for _ in loader:
        assert len(live) == 2
        break
    assert live == [None] and position.epoch == 0
    for count, _ in enumerate(loader, 1):
        assert position.delivered == count
        live[-1].position.used = True  # as backward does
        if count == 2:
            break
    assert live == [None]
    epoch_one = [batch.tolist() for batch in loader]  # left after training: the next loop is a new epoch
    assert position.epoch == 2 and position.delivered == 0
    for wrong in ("a", -1, 1.5, None):
        with pytest.raises(ValueError, match=r"^set_epoch: the epoch is .*; it must be a whole number of at least 0$"):
            loader.set_epoch(wrong)
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == epoch_one
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            1 / 0  # noqa: B018
    assert live == [None]


def test_two_iterations_at_once() -> None:
    (loader,) = on_ranks(lambda: DataLoader(range(6), batch_size=2), 1)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=False)] == [
        ([at, at + 1],) * 2 for at in (0, 2, 4)
    ]
    (outer,), (inner,) = (on_ranks(lambda: DataLoader(range(4), batch_size=2), 1) for _ in range(2))
    inner._nb.live = outer._nb.live
    for _ in outer:
        for _ in inner:
            assert outer._nb.live[-1].position is inner._nb.position
        assert outer._nb.live[-1].position is outer._nb.position


def test_another_accelerator_goes_on_with_the_users_loader() -> None:
    class Named(DataLoader):
        name = "none"

    streams = Named(Stream(range(7)), batch_size=2, num_workers=1)
    for original in (Named(range(7), batch_size=2, shuffle=True), streams):
        once: Any = prepare(original, 0, 2)
        epochs = [delivered(once) for _ in range(3)]
        first: Any = prepare(original, 0, 2)
        assert delivered(first) == epochs[0]
        assert prepare(first, 0, 2, first._nb.live) is first
        first.name = "mine"
        live: list[Any] = [None]
        second: Any = prepare(first, 0, 2, live)
        assert second is not first and second._nb.live is live and user_loader(second) is original
        assert type(second).__mro__.count(Prepared) == 1 and second.name == "mine"
        assert delivered(second) == epochs[1] and delivered(first) == epochs[2]
        second.set_epoch(0)
        assert delivered(prepare(second, 0, 2)) == epochs[0]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"num_workers": 1, "shuffle": True}], ids=str)
def test_a_copy_is_over_a_copy_of_the_users_loader_and_as_far(options: dict[str, Any]) -> None:
    data = torch.arange(9.0)
    loader: Any = prepare(DataLoader(data, batch_size=2, **options), 0, 2)
    epochs = [delivered(loader) for _ in range(3)]
    loader.set_epoch(1)
    loader.mark = ["mine"]
    for again in (copy.deepcopy(loader), copy.deepcopy([loader, loader.mark])[0]):
        assert type(again) is not type(loader) and type(again).__name__ == "DataLoader" and isinstance(again, Prepared)
        assert user_loader(again) is not user_loader(loader) and user_loader(again).dataset is not data
        assert again.mark == ["mine"] and again.mark is not loader.mark
        again.dataset.zero_()
        assert again._nb.live is loader._nb.live and [rows for rows, _, _ in delivered(again)] == [[0.0, 0.0]] * 2 + [
            [0.0]
        ]
        assert again._nb.position.epoch == 2
    assert (
        loader._nb.position.epoch == 1 and delivered(loader) == epochs[1] and delivered(copy.copy(loader)) == epochs[2]
    )
    left = copy.deepcopy(skip_first_batches(loader, 1))
    assert len(left) == 2 and len(delivered(left)) == 2 and len(delivered(left)) == 3
    for protocol in range(6):
        with pytest.raises(
            TypeError, match="a prepared DataLoader belongs to its rank; pickle the DataLoader that was"
        ):
            pickle.dumps(loader, protocol)


def test_a_loader_that_goes_through_its_data_twice() -> None:
    class Twice(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            yield from super().__iter__()

    loader = prepare(Twice(range(3), batch_size=2), 0, 2)
    assert delivered(loader) == [([0, 1], 2, 3), ([0, 1], 2, 3)]
