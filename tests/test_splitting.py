"""split_between_processes: each process's part, of the same type, and results back in order."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import datasets
import numpy
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from nbdist import Accelerator, PartialState
from nbdist.splitting import Split
from tests.ranks import run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


def part(inputs: Any, rank: int = 1, ranks: int = 2, pad: bool = False) -> Any:
    with Split(inputs, rank, ranks, pad) as mine:
        return mine


def _split(rank: int, ranks: int) -> dict[str, Any]:
    accelerator, found = Accelerator(), {}
    with (split := accelerator.split_between_processes((1, 2, 3), apply_padding=True)) as mine:
        found["SP1"] = mine, split.real
    results: list[str] = []
    with PartialState().split_between_processes([["0", "1"], ["2", "3"]]) as mine:
        for some in mine:
            results.extend(some)
    from nbdist.utils import gather_object

    found["SP2"] = gather_object(results)
    with accelerator.split_between_processes([7]) as mine:
        found["SP3"] = mine
    with (split := accelerator.split_between_processes(list(range(5)), apply_padding=True)) as mine:
        found["in order"] = split.gather(one * 10 for one in mine)
        found["twice each"] = split.gather([[one, ago] for one in mine for ago in "ab"])
        found["no padding"] = split.gather([one for one in mine for _ in "ab"][: 2 * split.real])

        def failing() -> Any:
            yield from mine[1:]
            if rank:
                raise ZeroDivisionError("here")
            yield 1

        for name, results in {
            "many": mine * (1 + rank),
            "few": mine[: 2 - rank],
            "None": None if rank else mine,
            "fails": failing(),
        }.items():
            try:
                split.gather(results)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.ranks
def test_two_ranks() -> None:
    """SP1, SP2 and SP3; results in order without those of padding; what does not fit is told on both."""
    first, second = run_ranks(_split, 2)
    assert (first["SP1"], second["SP1"]) == (((1, 2), 2), ((3, 3), 1))
    assert first["SP2"] == second["SP2"] == ["0", "1", "2", "3"]
    assert (first["SP3"], second["SP3"]) == ([7], [])
    assert first["in order"] == second["in order"] == [0, 10, 20, 30, 40]
    for found in (first, second):
        assert found["twice each"] == [[one, ago] for one in range(5) for ago in "ab"]
        assert found["no padding"] == [one for one in range(5) for _ in "ab"]
    told = "gather of a split takes one result for each item, or the same number for each: rank 0 has {} for 3 items; "
    for name, few, many in (("many", "3 results", "6 results"), ("few", "2 results", "1 result")):
        whole = f"DistributedOperationException: {told.format(few)}rank 1 has {many} for 2 items. For any"
        assert first[name].startswith(whole) and first[name] == second[name]
    assert first["None"].startswith("RuntimeError: rank 1 has no results: TypeError: gather of a split takes")
    assert second["None"].endswith("this is None: it cannot be iterated")
    assert first["fails"] == f"RuntimeError: rank 1 has no results: {second['fails']}"
    assert second["fails"] == "ZeroDivisionError: here"


def test_each_keeps_its_type() -> None:
    assert part([1, 2, 3]) == [3] and part((1, 2, 3)) == (3,) and part(range(3)) == range(2, 3)
    assert part(torch.arange(3)).tolist() == [2] and part(torch.arange(3), pad=True).tolist() == [2, 2]
    array = part(numpy.arange(6).reshape(3, 2), pad=True)
    assert isinstance(array, numpy.ndarray) and array.tolist() == [[4, 5], [4, 5]]
    assert part({"a": [1, 2, 3], "b": {"c": torch.arange(3)}}, 0)["b"]["c"].tolist() == [0, 1]
    assert part(Pair([1, 2], (3, 4))) == Pair([2], (4,))
    users = part(UserDict(a=[1, 2]))
    assert isinstance(users, UserDict) and users["a"] == [2]
    assert part(pandas.DataFrame({"a": [1, 2, 3]}), pad=True)["a"].tolist() == [3, 3]
    table = part(datasets.Dataset.from_dict({"row": [5, 6, 7]}), pad=True)
    assert isinstance(table, datasets.Dataset) and table["row"][:] == [7, 7]
    rows = part(TensorDataset(torch.arange(3)))
    assert len(rows) == 1 and rows[0][0].item() == 2
    assert part(range(3), pad=True) == [2, 2]


def test_little_or_nothing_to_split() -> None:
    assert [part([7], rank, 3) for rank in range(3)] == [[7], [], []]
    assert [part([7], rank, 3, True) for rank in range(3)] == [[7], [7], [7]]
    assert part(torch.ones(1, 2), 2, 3, True).tolist() == [[1.0, 1.0]]
    assert part([], pad=True) == [] and part({}) == {} and part(torch.ones(0, 2), pad=True).shape == (0, 2)
    whole = [1, 2]
    with Accelerator().split_between_processes(whole) as mine:
        assert mine is whole


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ("text", "it is a str; put it into a list"),
        ({"a": [1], "b": "x"}, r"inputs\['b'\] cannot be split"),
        ({1, 2}, "no order"),
        ((x for x in ()), "a generator has no length"),
        (torch.tensor(1), "no dimension"),
        (5, "an int has no length"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_cannot_be_split_is_refused(inputs: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Accelerator().split_between_processes(inputs)


def test_values_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs\['a'\] has 2, inputs\['b'\] has 3"):
        Accelerator().split_between_processes({"a": [1, 2], "b": [1, 2, 3]})


@given(items=st.lists(st.integers()), ranks=st.integers(1, 7))
def test_the_parts_are_the_whole(items: list[int], ranks: int) -> None:
    splits = [Split(items, rank, ranks) for rank in range(ranks)]
    parts = [split._take(items) for split in splits]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    padded = [Split(items, rank, ranks, True) for rank in range(ranks)]
    assert len({len(split._take(items)) for split in padded}) == 1
    assert [split._take(items)[: split.real] for split in padded] == parts
