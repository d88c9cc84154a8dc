"""One gradient: the same samples, over any number of ranks, train the same model as one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import training
from tests.ranks import run_ranks

CASES = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 40),
        "batch": st.integers(1, 5),
        "sampler": st.sampled_from(["in order", "shuffled", "weighted", "own", "ragged", "stream"]),
        "drop_last": st.sampled_from([False, False, False, True]),
        "tokens": st.booleans(),
        "momentum": st.sampled_from([0.0, 0.9]),
        "epochs": st.just(2),
        "accumulation": st.integers(1, 4),
        "across_epochs": st.sampled_from([False, False, False, True]),
        "sync_each_batch": st.sampled_from([False, False, True]),
        "zero_grad_first": st.booleans(),
        "clip": st.sampled_from([0.0, 0.0, 0.3]),
    }
)


def flattened(lists: Any) -> list[Any]:
    return [item for one in lists for item in one]


def check(cases: list[dict[str, Any]], answers: list[list[Any]]) -> None:
    """`answers`: by rank, then by case."""
    for index, case in enumerate(cases):
        results = [by_case[index] for by_case in answers]
        epochs = zip(*(seen for _, seen in results), strict=True)
        joined = [[flattened(step) for step in zip(*epoch, strict=True)] for epoch in epochs]
        expected = training.in_plain_torch(case, joined)
        for parameters, _ in results:
            worst = max(abs(one - other) for one, other in zip(parameters, expected, strict=True))
            assert worst < 1e-6, (worst, case)
        if case["sampler"] != "weighted" and not case["drop_last"]:
            for epoch in joined:
                assert sorted(flattened(epoch)) == list(range(case["rows"])), case


EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@settings(max_examples=2, **EXAMPLES)
@given(cases=st.lists(CASES, min_size=40, max_size=50))
def test_any_split_trains_as_one_process_does(ranks: int, cases: list[dict[str, Any]]) -> None:
    check(cases, run_ranks(training.prepared_on_rank, ranks, cases))


@pytest.mark.ranks
@settings(max_examples=2, **EXAMPLES)
@given(cases=st.lists(CASES, min_size=15, max_size=20))
def test_any_split_over_four_ranks(cases: list[dict[str, Any]]) -> None:
    check(cases, run_ranks(training.prepared_on_rank, 4, cases))


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("hybrid", 4)])
@settings(max_examples=1, **EXAMPLES)
@given(cases=st.lists(CASES, min_size=10, max_size=12))
def test_shards_train_as_one_process_does(strategy: str, ranks: int, cases: list[dict[str, Any]]) -> None:
    check(cases, run_ranks(training.prepared_on_rank, ranks, cases, strategy))


@pytest.mark.parametrize("sampler", ["shuffled", "weighted", "own"])
def test_the_order_is_the_same_over_one_rank_and_two(sampler: str) -> None:
    case = {
        "rows": 13,
        "batch": 1,
        "sampler": sampler,
        "drop_last": False,
        "tokens": False,
        "momentum": 0.0,
        "epochs": 2,
    }
    _, alone = training.prepared(case)
    halves = [seen for _, seen in (by_case[0] for by_case in run_ranks(training.prepared_on_rank, 2, [case]))]
    for epoch, (one, other) in zip(alone, zip(*halves, strict=True), strict=True):
        together = [index for pair in zip(one, other, strict=True) for step in pair for index in step]
        assert together == [index for step in epoch for index in step]
    assert alone[0] != alone[1]
