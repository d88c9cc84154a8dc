"""Collectives over ragged shapes, any nesting, objects; mismatches are the same Python exception on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from nbdist import collectives
from tests.ranks import run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


def _as_data(value: Any) -> Any:
    """Tensors as (dtype, list), so that values can be compared with ==."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), value.tolist()
    if isinstance(value, dict):
        return {key: _as_data(item) for key, item in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(_as_data, value))
    return type(value)(map(_as_data, value)) if isinstance(value, list | tuple) else value


def _gathered(rank: int, ranks: int) -> dict[str, Any]:
    gather, gather_object = collectives.gather, collectives.gather_object
    tensor = torch.arange(3 * (rank + 1)).reshape(-1, 3)
    found = {
        "ragged": gather(torch.ones(rank + 1)),
        "none on one": gather(torch.ones(2 * rank, 2)),
        "none at all": gather(torch.ones(0, 2)),
        "0-dim": gather(torch.tensor(rank)),
        "bool": gather(torch.tensor([rank == 0] * (rank + 1))),
        "bf16": gather(torch.full((rank + 1,), 1 + rank, dtype=torch.bfloat16)),
        "complex": gather(torch.tensor([1j * rank])),
        "not contiguous": gather(tensor.T[:1]) if rank else gather(torch.tensor([[7, 7]])),
        "one element, stride 0": gather(torch.tensor(rank).expand(1)),
        "graph": gather(torch.ones(1, requires_grad=True) * 2).requires_grad,
        "number": gather(3.0),
        "int": gather(rank),
        "flag": gather(rank == 1),
        "nested": gather(Pair({"a": [torch.tensor([rank])]}, (torch.full((1 + rank, 2), 0.5), None, "x", rank))),
        "lists": gather((["p"], ["r"] * (rank + 1))),
        "list of numbers": gather([1.5, rank]),
        "object": gather({"name": f"r{rank}"}),
        "strings": gather_object("ab"),
        "dicts": gather_object({"k": rank}),
        "joined": gather_object([rank] * (rank + 1)),
        "long": [len(text) for text in gather_object("x" * 100_000 * rank)],
        "by value": [function() for function in gather_object(lambda: rank)],
    }
    return _as_data(found)


@pytest.mark.ranks
def test_gather() -> None:
    ones = ("float32", [1.0, 1.0, 1.0])
    right = {
        "ragged": ones,
        "none on one": ("float32", [[1.0, 1.0]] * 2),
        "none at all": ("float32", []),
        "0-dim": ("int64", [0, 1]),
        "bool": ("bool", [True, False, False]),
        "bf16": ("bfloat16", [1.0, 2.0, 2.0]),
        "complex": ("complex64", [0j, 1j]),
        "not contiguous": ("int64", [[7, 7], [0, 3]]),
        "one element, stride 0": ("int64", [0, 1]),
        "graph": False,
        "number": ("float32", [3.0, 3.0]),
        "int": ("int64", [0, 1]),
        "flag": ("bool", [False, True]),
        "nested": Pair(
            {"a": [("int64", [0, 1])]}, (("float32", [[0.5, 0.5]] * 3), None, ["x", "x"], ("int64", [0, 1]))
        ),
        "lists": (["p", "p"], ["r", "r", "r"]),
        "list of numbers": [1.5, 0, 1.5, 1],
        "object": {"name": ["r0", "r1"]},
        "strings": ["ab", "ab"],
        "dicts": [{"k": 0}, {"k": 1}],
        "joined": [0, 1, 1],
        "long": [0, 100_000],
        "by value": [0, 1],
    }
    for found in run_ranks(_gathered, 2):
        assert found == right


def _reduced(rank: int, ranks: int) -> dict[str, Any]:
    reduce, broadcast = collectives.reduce, collectives.broadcast
    mine = torch.full((rank + 1,), rank)
    listed = [rank, {"of": rank}]
    shared = torch.full((2,), float(rank))
    same = broadcast(shared, from_process=1)
    found = {
        "mean": reduce({"a": torch.tensor([1.0, 3.0 + rank])}),
        "sum": reduce((torch.tensor([rank + 1]), 2.0), "sum"),
        "scaled": reduce(torch.tensor(2.0), "sum", scale=0.25),
        "max": reduce(torch.tensor([rank, -rank]), "max"),
        "any": reduce(torch.tensor([rank == 1, False]), "max"),
        "half": reduce(torch.tensor([256.0, 1.0 + rank], dtype=torch.bfloat16), "sum"),
        "given": broadcast({"t": mine, "text": f"r{rank}", "number": rank, "none": None}, from_process=1),
        "in place": same is shared and shared.tolist() == [1.0, 1.0],
        "through a view": broadcast(torch.full((2, 2), float(rank)).T, from_process=1),
        "listed": collectives.broadcast_object_list(listed, from_process=1) is listed and listed,
        "padded": collectives.pad_across_processes([torch.ones(1, rank + 1), "s"], dim=1, pad_index=-1),
        "padded before": collectives.pad_across_processes(torch.ones(rank + 1), pad_first=True),
        "padded from the end": tuple(collectives.pad_across_processes(torch.ones(2, rank + 1), dim=-1).shape),
        "no such dimension": collectives.pad_across_processes(torch.ones(2), dim=3),
    }
    return _as_data(found)


@pytest.mark.ranks
def test_reduce_broadcast_and_pad() -> None:
    first, second = run_ranks(_reduced, 2)
    right = {
        "mean": {"a": ("float32", [1.0, 3.5])},
        "sum": (("int64", [3]), ("float32", 4.0)),
        "scaled": ("float32", 1.0),
        "max": ("int64", [1, 0]),
        "any": ("bool", [True, False]),
        "half": ("bfloat16", [512.0, 3.0]),
        "given": {"t": ("int64", [1, 1]), "text": "r1", "number": 1, "none": None},
        "in place": True,
        "through a view": ("float32", [[1.0, 1.0]] * 2),
        "listed": [1, {"of": 1}],
        "padded from the end": (2, 2),
        "no such dimension": ("float32", [1.0, 1.0]),
    }
    assert {key: first[key] for key in right} == right
    assert {key: second[key] for key in right} == right
    assert first["padded"] == [("float32", [[1.0, -1.0]]), "s"] and second["padded"] == [("float32", [[1.0, 1.0]]), "s"]
    assert first["padded before"] == ("float32", [0.0, 1.0]) and second["padded before"] == ("float32", [1.0, 1.0])


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("x",)


def _mismatches(rank: int, ranks: int) -> list[tuple[str, str]]:
    gather, reduce = collectives.gather, collectives.reduce
    calls: list[Callable[[], Any]] = [
        lambda: gather(torch.ones(2, rank + 2)),
        lambda: gather({"a": torch.ones(2, dtype=torch.float64 if rank else torch.float32)}),
        lambda: gather(torch.ones(2) if rank else torch.ones(2, 1)),
        lambda: gather([torch.ones(1)] * (rank + 1)),
        lambda: gather(torch.ones(1) if rank else None),
        lambda: reduce(torch.ones(rank + 1)),
        lambda: reduce(torch.ones(2, dtype=torch.int64), "mean"),
        lambda: gather(torch.ones(1)) if rank else reduce(torch.ones(1)),
        lambda: collectives.gather_object([1] if rank else 1),
        lambda: collectives.gather_object((x for x in ()) if rank else 1),
        lambda: gather(torch.eye(2).to_sparse()),
        lambda: reduce("text"),
        lambda: collectives.broadcast(torch.ones(1) if rank else 1.0),
        lambda: collectives.gather_object(Unreadable() if rank else 1),
        lambda: collectives.broadcast_object_list([Unreadable()]),
        lambda: collectives.broadcast_object_list("x"),
        lambda: collectives.broadcast(torch.ones(1), from_process=2),
        lambda: collectives.broadcast(torch.ones(1), from_process="0"),
    ]
    told = []
    for call in calls:
        try:
            told.append(("nothing", str(call())))
        except Exception as error:
            told.append((type(error).__name__, str(error)))
    told.append(("still works", str(gather(torch.ones(rank + 1)).tolist())))
    return told


@pytest.mark.ranks
def test_mismatches_are_exceptions_on_every_rank_that_name_the_ranks() -> None:
    first, second = run_ranks(_mismatches, 2)
    assert first == second
    apart = "DistributedOperationException"
    kinds = (
        [apart] * 6
        + ["TypeError", apart, apart]
        + ["TypeError"] * 3
        + [apart, *["TypeError"] * 3, "ValueError", "TypeError"]
    )
    assert [kind for kind, _ in first[:-1]] == kinds
    assert first[-1] == ("still works", "[1.0, 1.0, 1.0]")
    texts = [text for _, text in first]
    assert "rank 0 has (2, 2); rank 1 has (2, 3)" in texts[0]
    assert "value['a']" in texts[1] and "float32" in texts[1] and "float64" in texts[1]
    assert "rank 0 is in reduce(mean) (" in texts[7] and "test_collectives.py:" in texts[7]
    assert "rank 1" in texts[9] and "pickle" in texts[9]
    for text, sender in zip(texts[13:15], (1, 0), strict=True):
        assert text.startswith(
            f"what rank {sender} has sent cannot be unpickled on this one: ValueError: invalid literal"
        )
    assert texts[15:18] == [
        "broadcast_object_list: object_list is 'x'; it takes a list, which is filled in place",
        "broadcast: from_process is 2; there are processes 0 to 1",
        "broadcast: from_process is '0'; it takes the index of a process, 0 to 1",
    ]


def test_one_process_follows_the_same_rules() -> None:
    assert _as_data(collectives.gather((torch.ones(2), torch.tensor(1), 3.0, ["a"], "o", None))) == (
        ("float32", [1.0, 1.0]),
        ("int64", [1]),
        ("float32", [3.0]),
        ["a"],
        ["o"],
        None,
    )
    assert collectives.gather_object("a") == ["a"] and collectives.gather_object(["a"]) == ["a"]
    assert collectives.reduce(2.0).item() == 2.0
    assert collectives.broadcast({"a": 1}) == {"a": 1} and collectives.broadcast_object_list([1]) == [1]
    value = torch.ones(2)
    assert collectives.pad_across_processes(value) is value
    with pytest.raises(ValueError, match="'mean', 'sum', 'max', 'min'"):
        collectives.reduce(value, "median")
