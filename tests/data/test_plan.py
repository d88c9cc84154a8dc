"""The index plan alone: against a definition that is written down differently."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.data.plan import FlatPlan, shares


@given(
    rows=st.integers(0, 60),
    batch=st.integers(1, 6),
    ranks=st.integers(1, 5),
    drop=st.booleans(),
    start=st.integers(0, 4),
)
def test_ranks_take_each_step_together(rows: int, batch: int, ranks: int, drop: bool, start: int) -> None:
    plans = [FlatPlan(range(rows), batch, rank, ranks, drop) for rank in range(ranks)]
    views = [list(plan.batches(start)) for plan in plans]
    whole = batch * ranks
    expected = [list(range(rows))[at : at + whole] for at in range(0, rows, whole)]
    expected = [step for step in expected if len(step) == whole or not drop]
    assert {plan.steps for plan in plans} == {len(expected)}
    assert {len(view) for view in views} == {max(len(expected) - start, 0)}
    for step, samples in enumerate(expected[start:], start):
        counts = [plan.counts(step) for plan in plans]
        taken = [view[step - start] for view in views]
        assert [row for mine, (local, _) in zip(taken, counts, strict=True) for row in mine[:local]] == samples
        assert {total for _, total in counts} == {len(samples)}
        sizes = [local for local, _ in counts]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        assert all(mine == taken[0] for mine, size in zip(taken, sizes, strict=True) if not size)


def test_shares() -> None:
    assert shares(5, 3) == [2, 2, 1] and shares(1, 3) == [1, 0, 0] and shares(0, 2) == [0, 0]
