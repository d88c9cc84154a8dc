"""What went wrong elsewhere (the cases DL1 to DL6 and ME3), and any kind of loader, on one rank and on two."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info, random_split

from nbdist import Accelerator, DataLoaderConfiguration, set_seed
from nbdist.data.delivering import rows_of
from nbdist.data.loader import prepare_loader
from nbdist.data.move import CopyAhead
from nbdist.data.options import Options
from tests.ranks import run_ranks
from tests.training import Ragged, Shuffling, Stream, linear_at_zero


def prepare(loader: Any, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    return prepare_loader(loader, [None], Options(rank, ranks, **options))


def taken(accelerator: Accelerator, loader: Any, take: int | None = None) -> list[Any]:
    live = accelerator._live
    return [(batch.tolist(), live[-1].local, live[-1].total, live[-1].last) for batch in itertools.islice(loader, take)]


def trained(accelerator: Accelerator, loader: Any) -> tuple[int, int, float]:
    """Steps, those that were real here, and the weight after them."""
    model = linear_at_zero()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    steps = real = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(-model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        steps, real = steps + 1, real + bool(accelerator._live[-1].local)
    return steps, real, accelerator.unwrap_model(model).weight.item()


class Shuffled(IterableDataset):
    """A stream whose order is drawn from a process's own generators."""

    def __iter__(self) -> Iterator[int]:
        rows = torch.randperm(12).tolist()
        random.shuffle(rows)
        numpy.random.shuffle(rows)
        for row in rows:
            yield row + 100 * random.randrange(2)


class Owning(IterableDataset):
    """A stream, sampler or dataset with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.inner = {"draws": [random.Random(seed)]}

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner["draws"][0].sample(range(9), 9))

    def __len__(self) -> int:
        return 9


class Drawing(Dataset):
    """What a worker's generators draw, and its seed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        seed = float(info.seed % 2**20) if info else 0.0
        return torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item(), seed], dtype=torch.float64)


def views(rank: int, ranks: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    accelerator = Accelerator()
    told: dict[str, Any] = {}
    sampler: Any = DistributedSampler(range(8), ranks, rank, shuffle=False)
    told["dl1"] = [batch.tolist() for batch in accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=sampler))]
    told["dl3"] = taken(accelerator, accelerator.prepare(DataLoader(range(1), batch_size=4)))
    told["dl5"] = trained(accelerator, accelerator.prepare(DataLoader(torch.ones(3, 1))))
    shapes = accelerator.prepare(DataLoader(Stream([torch.ones(size) for size in (2, 3, 2, 3)])))
    told["dl6"] = [tuple(batch.shape) for batch in shapes]
    numbers = accelerator.prepare(DataLoader(Stream(range(9)), batch_size=2))
    told["me3"] = sorted(row for batch in numbers for row in accelerator.gather_for_metrics(batch).tolist())
    told["empty"] = [
        taken(accelerator, accelerator.prepare(DataLoader(data))) for data in ([], Stream([]), torch.ones(0, 2))
    ]
    splitting = Accelerator(split_batches=True)
    told["split"] = taken(splitting, splitting.prepare(DataLoader(range(10), batch_size=4)))
    told["split stream"] = taken(splitting, splitting.prepare(DataLoader(Stream(range(10)), batch_size=4)))
    told["split own"] = taken(
        splitting, splitting.prepare(DataLoader(range(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]))
    )
    rows = [torch.full((3, 1), 5.0), torch.ones(1, 1), torch.full((2, 1), 2.0)]
    told["unbatched"] = [
        trained(Accelerator(gradient_accumulation_steps=steps), DataLoader(data, batch_size=None))[2]
        for data in (rows, Stream(rows))
        for steps in (1, 3)
    ]
    torch.manual_seed(rank)
    shuffled = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(100 + rank))
    told["seeds"] = [row for rows, *_ in taken(accelerator, accelerator.prepare(shuffled)) for row in rows]
    set_seed(100 + rank)
    seeded = accelerator.prepare(DataLoader(range(8), shuffle=True))
    copied = copy.deepcopy(seeded)
    told["set_seed"], told["copied"] = ([row.item() for row in loader] for loader in (seeded, copied))
    random.seed(rank)  # and torch and numpy are not where they were either
    told["random stream"] = []
    sending = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    for one, options in ((accelerator, {}), (accelerator, {"num_workers": 2}), (sending, {})):
        stream, before = one.prepare(DataLoader(Shuffled(), batch_size=2, **options)), random.getstate()
        epochs = [[row for rows, *_ in taken(one, stream) for row in rows] for _ in range(2)]
        undisturbed = before == random.getstate()
        stream.load_state_dict(stream.state_dict() | {"epoch": 1, "delivered": 1})
        told["random stream"].append((epochs, [row for rows in stream for row in rows.tolist()], undisturbed))
    drawing = accelerator.prepare(DataLoader(Drawing(), batch_size=1, num_workers=1))
    told["drawn"] = [[batch.tolist() for batch in drawing] for _ in range(2)]
    drawing.set_epoch(0)
    told["again"] = [batch.tolist() for batch in drawing]
    long, short = (accelerator.prepare(DataLoader(torch.arange(float(rows)), batch_size=2)) for rows in (9, 3))
    told["zips"] = [
        [(one.tolist(), other.tolist()) for one, other in zip(*pair, strict=False)]
        for pair in ((long, short), (short, long), (short, short))
    ]
    told["live"] = len(accelerator._live)
    if ranks > 1:
        for name, loader in {
            "lengths": DataLoader(range(5 + rank)),
            "kinds": DataLoader(Stream(range(3)) if rank else range(3)),
            "batch sizes": DataLoader(range(8), batch_size=2 + rank, drop_last=rank == 1),
            "shuffled": DataLoader(range(8), shuffle=rank == 0),
            "workers": DataLoader(Stream(range(8)), num_workers=rank),
            "own batches": DataLoader(range(2), batch_sampler=Ragged(2) if rank else [[0], [1]]),
            "subsets": DataLoader(random_split(range(20), [10, 10], torch.Generator().manual_seed(rank))[0]),
        }.items():
            try:
                accelerator.prepare(loader)
            except Exception as error:
                told[name] = f"{type(error).__name__}: {error}"
        told["warned"] = []
        for loader in (
            DataLoader(Owning(rank)),
            DataLoader(range(9), sampler=Owning(rank)),
            DataLoader(Owning(0)),
            DataLoader(random_split(Owning(rank), [4, 5], torch.Generator().manual_seed(0))[0], shuffle=True),
        ):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                accelerator.prepare(loader)
            told["warned"].append([str(one.message) for one in warned if "torch" not in one.filename])
    return told


@pytest.mark.ranks
def test_loaders_on_two_ranks() -> None:
    """DL1, DL3, DL5, DL6, ME3 and others."""
    first, second = run_ranks(views, 2)
    assert (first["dl1"], second["dl1"]) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])
    assert (first["dl3"], second["dl3"]) == ([([0], 1, 1, True)], [([0], 0, 1, True)])
    assert (first["dl5"], second["dl5"]) == ((2, 2, 2.0), (2, 1, 2.0))
    assert (first["dl6"], second["dl6"]) == ([(1, 2), (1, 2)], [(1, 3), (1, 3)])
    assert first["me3"] == second["me3"] == list(range(9))
    assert first["unbatched"] == second["unbatched"] == pytest.approx([4 + 2, 20 / 6] * 2)
    assert first["empty"] == second["empty"] == [[], [], []]
    for name in ("split", "split stream"):
        last = name == "split"  # of a stream it is not known unless windows are asked for
        assert first[name] == [([0, 1], 2, 4, False), ([4, 5], 2, 4, False), ([8], 1, 2, last)]
        assert second[name] == [([2, 3], 2, 4, False), ([6, 7], 2, 4, False), ([9], 1, 2, last)]
    assert first["split own"] == [([0, 1], 2, 3, False), ([3], 1, 1, False), ([4], 1, 2, True)]
    assert second["split own"] == [([2], 1, 3, False), ([3], 0, 1, False), ([5], 1, 2, True)]
    for name in ("seeds", "set_seed"):
        together = [row for pair in zip(first[name], second[name], strict=True) for row in pair]
        assert sorted(together) == list(range(8)) and together != list(range(8))
    assert first["copied"] == first["set_seed"] and second["copied"] == second["set_seed"]
    for one, other, times in zip(first["random stream"], second["random stream"], (1, 2, 1), strict=True):
        assert one[2] and other[2]
        for mine, theirs in zip(one[0], other[0], strict=True):
            assert sorted(row % 100 for row in mine + theirs) == sorted([*range(12)] * times)  # a worker reads it too
        assert one[0][0] != one[0][1] and (one[1], other[1]) == (one[0][1][2:], other[0][1][2:])
    assert first["drawn"] != second["drawn"] and first["drawn"][0] != first["drawn"][1]
    for told in (first, second):
        assert told["again"] == told["drawn"][0]
        assert told["live"] == 1
    assert first["zips"][0] == [([0.0, 1.0], [0.0, 1.0])] == first["zips"][1] == first["zips"][2]
    told = "ValueError: the ranks' datasets differ in length: rank 0 has 5, rank 1 has 6"
    assert first["lengths"].startswith(told) and first["lengths"] == second["lengths"]
    assert "ValueError: the ranks' subsets hold other samples (dataset.indices differs)" in first["subsets"]
    streamed, sampled, *rest = first["warned"]
    assert first["warned"] == second["warned"] and rest == [[], []]
    for warned, where in ((streamed, "dataset"), (sampled, "sampler.sampler")):
        (text,) = warned
        assert text.startswith(f"the ranks hold random generators in other states ({where}.inner['draws'][0]). Where")
    assert "rank 0 has a dataset with indices, rank 1 has a stream" in first["kinds"]
    for name, one, other in (
        ("batch sizes", "batch_size=2, drop_last=False", "batch_size=3, drop_last=True"),
        ("shuffled", "sampler=RandomSampler (shuffle=True)", "sampler=SequentialSampler (shuffle=False)"),
        ("workers", "num_workers=0", "num_workers=1"),
        ("own batches", "sampler=list", "sampler=Ragged"),
    ):
        told = f"ValueError: the ranks' loaders differ: rank 0 has {one}; rank 1 has {other}. Prepare the same"
        assert first[name].startswith(told) and first[name] == second[name]


def test_loaders_alone() -> None:
    """DL3, DL5, DL6, ME3 and others on one rank."""
    told = views(0, 1)
    assert told["dl3"] == [([0], 1, 1, True)] and told["dl5"] == (3, 3, 3.0)
    assert told["dl6"] == [(1, 2), (1, 3)] * 2 and told["me3"] == list(range(9)) and told["empty"] == [[], [], []]
    assert told["unbatched"] == pytest.approx([5 + 1 + 2, 20 / 6] * 2)
    assert [rows for rows, *_ in told["split"]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert told["again"] == told["drawn"][0] != told["drawn"][1]


def test_a_random_stream_alone_goes_on_where_it_was() -> None:
    def made(seed: int) -> Any:
        set_seed(seed)
        return Accelerator(cpu=True).prepare(DataLoader(Shuffled(), batch_size=2))

    def rows(batches: Any) -> list[list[int]]:
        return [batch.tolist() for batch in batches]

    loader = made(0)
    first, second = rows(loader), rows(loader)
    assert first != second and sorted(row % 100 for batch in first for row in batch) == list(range(12))
    loader = made(0)
    for batch in loader:
        torch.rand(1), random.random(), numpy.random.rand()  # training's own draws
        if batch.tolist() == first[1]:
            state = loader.state_dict()
            break
    loader = made(99)
    loader.load_state_dict(state)
    assert rows(loader) == first[2:] and rows(loader) == second


def test_the_rows_of_a_batch_that_came_whole() -> None:
    four = torch.ones(4, 2)
    for batch, rows in [
        (four, 4),
        ((four, torch.ones(4)), 4),
        ({"x": four, "y": numpy.ones(4), "texts": ["a"]}, 4),
        ((four, ["a", "b"], None), 4),
        (["a", "b"], 2),
        ((four, 3), 1),
        ((four, torch.tensor(3)), 1),
        ((four, torch.ones(3)), 1),
        ("text", 1),
        (torch.ones(0, 2), 0),
    ]:
        assert rows_of(batch) == rows, batch


def test_batches_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"batch_size is that of all ranks together, and 5 cannot .* over 2 ranks"):
        prepare(DataLoader(range(9), batch_size=5), 0, 2, split_batches=True)
    with pytest.raises(ValueError, match="this loader has batch_size=None"):
        prepare(DataLoader(range(9), batch_size=None), 0, 2, split_batches=True)


# ---------------------------------------------------------------------- the last batch
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda rows: DataLoader(range(rows), batch_size=2),
        lambda rows: DataLoader(range(rows), batch_sampler=Ragged(rows)),
        lambda rows: DataLoader(range(rows), batch_size=2, sampler=Shuffling(rows)),
        lambda rows: DataLoader(range(rows), batch_size=2, sampler=iter(range(rows))),
        lambda rows: DataLoader(Stream(range(rows)), batch_size=2),
        lambda rows: DataLoader(Stream(range(rows)), batch_size=2, num_workers=1),
    ],
    ids=["flat", "ragged", "own", "no length", "stream", "worker"],
)
def test_the_last_batch_is_known_and_those_ahead_are_counted(make: Any, ranks: int) -> None:
    for rows in (1, 7, 33, 70):
        views = []
        for rank in range(ranks):
            random.seed(0)
            set_seed(0)
            loader = prepare(make(rows), rank, ranks, accumulates=lambda: True)
            live = loader._nb.live
            views.append([(live[-1].last, live[-1].total, live[-1].ahead(4), live[-1].step) for _ in loader])
        assert all(view == views[0] for view in views)
        lasts, totals, ahead, steps = zip(*views[0], strict=True)
        assert list(lasts) == [False] * (len(lasts) - 1) + [True] and list(steps) == list(range(len(steps)))
        if isinstance(make(1).dataset, Stream):
            assert set(ahead) == {None}
        else:
            assert list(ahead) == [sum(totals[step : step + 4]) for step in steps]


def test_a_stream_is_read_ahead_only_for_windows() -> None:
    read = []

    class Told(Stream):
        def __iter__(self) -> Iterator[Any]:
            for item in self.items:
                read.append(item)
                yield item

    for accumulates, ahead in ((False, 0), (True, 1)):
        loader = prepare(DataLoader(Told(range(9))), accumulates=lambda: accumulates)  # noqa: B023
        for count, _ in enumerate(itertools.islice(loader, 5), 1):
            assert len(read) == count + ahead
        read.clear()


def test_a_samplers_error_comes_in_its_turn() -> None:
    class Failing:
        def __iter__(self) -> Iterator[Any]:
            yield from ([0], [1], [2])
            raise ZeroDivisionError

    loader, got = prepare(DataLoader(range(9), batch_sampler=Failing())), []
    with pytest.raises(ZeroDivisionError):
        for batch in loader:
            got.append((batch.tolist(), loader._nb.live[-1].last))
    assert got == [([0], False), ([1], False), ([2], False)] and loader._nb.live == [None]

    class Broken(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from range(3)
            raise ZeroDivisionError("here")

    for options in ({}, {"num_workers": 1}):
        loader, got = prepare(DataLoader(Broken(()), **options), accumulates=lambda: True), []
        with pytest.raises(ZeroDivisionError, match="here"):
            for batch in loader:
                got.append(batch.tolist())
        assert got == [[0], [1], [2]] and loader._nb.live == [None]


# ---------------------------------------------------------------------- the user's loader
class Encoding(UserDict):
    """Like a tokenizer's result: a Mapping with a `to` of its own."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()} | {"moved": str(device)})


def test_batches_of_any_kind_are_brought_to_the_device() -> None:
    def collate(rows: list[int]) -> Any:
        return {"enc": Encoding(ids=torch.tensor(rows)), "pair": (torch.ones(2), ["text", None]), "n": len(rows)}

    loader = prepare(DataLoader(range(3), batch_size=2, collate_fn=collate), device=torch.device("meta"))
    batch = next(iter(loader))
    assert batch["enc"]["moved"] == "meta" and batch["enc"]["ids"].device.type == "meta"
    assert batch["pair"][0].device.type == "meta" and batch["pair"][1] == ["text", None] and batch["n"] == 2


def test_what_the_user_gave_is_kept() -> None:
    started: list[int] = []
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    user: Any = DataLoader(
        range(4),
        num_workers=1,
        worker_init_fn=started.append,
        generator=generator,
        multiprocessing_context="fork",
        timeout=30,
        prefetch_factor=3,
    )
    loader = prepare(user)
    default = torch.get_rng_state()
    assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    assert torch.equal(torch.get_rng_state(), default) and torch.equal(generator.get_state(), before)
    assert loader.generator is generator and loader.worker_init_fn is user.worker_init_fn
    assert loader.multiprocessing_context is user.multiprocessing_context
    assert (loader.timeout, loader.prefetch_factor, loader.num_workers) == (30, 3, 1)


def test_batches_come_in_order() -> None:
    with pytest.warns(UserWarning, match="in_order=False has no effect") as told:
        loader = Accelerator().prepare(DataLoader(range(9), batch_size=2, num_workers=2, in_order=False))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert told[0].filename == __file__  # the user's own line


def test_a_class_whose_iter_calls_no_other() -> None:
    class Alone(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            for indices in self.batch_sampler:
                yield self.collate_fn([self.dataset[index] for index in indices])

    loader = prepare(Alone(range(7), batch_size=2, shuffle=True), 1, 2)
    same = prepare(DataLoader(range(7), batch_size=2, shuffle=True), 1, 2)
    for _ in range(2):
        views = []
        for one in (loader, same):
            live = one._nb.live
            views.append([(batch.tolist(), live[-1].local, live[-1].total, live[-1].last) for batch in one])
        assert views[0] == views[1]


def test_the_configuration() -> None:
    with pytest.warns(UserWarning, match="even_batches=False has no effect: tails are uneven anyway"):
        Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))  # said once
        seeded = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=7, use_stateful_dataloader=True))
    with pytest.raises(TypeError, match=r"dataloader_config is \{"):
        Accelerator(dataloader_config={"split_batches": True})  # type: ignore[arg-type]
    set_seed(7)
    right = [batch.item() for batch in Accelerator().prepare(DataLoader(range(9), shuffle=True))]
    set_seed(8)
    assert [batch.item() for batch in seeded.prepare(DataLoader(range(9), shuffle=True))] == right


class FakeStreams:
    """Stands for torch.cuda: notes what is asked of streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on = "main"

    def Stream(self, device: Any) -> str:
        return "side"

    def stream(self, stream: str) -> Any:
        fake = self

        class Entered:
            def __enter__(self) -> None:
                fake.on = stream

            def __exit__(self, *_: Any) -> None:
                fake.on = "main"

        return Entered()

    def current_stream(self, device: Any) -> Any:
        fake = self

        class Main:
            def wait_stream(self, stream: str) -> None:
                fake.log.append(f"{fake.on} waits for {stream}")

        return Main()


def test_copies_run_one_batch_ahead_on_their_own_stream_with_a_mocked_device() -> None:
    fake = FakeStreams()

    class Batch:
        def __init__(self, name: int) -> None:
            self.name = name

        def to(self, device: Any, non_blocking: bool) -> Batch:
            assert non_blocking
            fake.log.append(f"copy {self.name} on {fake.on}")
            return self

        def record_stream(self, stream: Any) -> None:
            fake.log.append(f"record {self.name}")

    def batches() -> Iterator[Any]:
        yield from ([Batch(0)], {"b": Batch(1)})
        raise ZeroDivisionError

    got = []
    with pytest.raises(ZeroDivisionError):
        for _ in CopyAhead(batches(), "cuda", fake):
            fake.log.append("use")
            got.append(1)
    assert len(got) == 2
    assert fake.log == [
        "copy 0 on side",
        "main waits for side",
        "record 0",
        "copy 1 on side",
        "use",
        "main waits for side",
        "record 1",
        "use",
    ]
