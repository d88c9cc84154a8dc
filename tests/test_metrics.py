"""gather_for_metrics: every sample counts once, whatever was repeated as a stand-in."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbdist import Accelerator
from tests.ranks import run_ranks


class Stream(IterableDataset):
    def __init__(self, rows: int = 9) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(range(self.rows))


def _mean_of_means(accelerator: Accelerator, *, repeated: bool = False) -> float:
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=5))
    means = []
    for batch in loader:
        mean = batch.mean()
        means.append(accelerator.gather_for_metrics(mean.repeat(5) if repeated else mean))
    return torch.cat(means).mean().item()


def _gathered(rank: int, ranks: int) -> dict[str, Any]:
    accelerator = Accelerator()
    gather = accelerator.gather_for_metrics
    found: dict[str, Any] = {
        "ME1": _mean_of_means(accelerator),
        "loss.repeat(batch_size)": _mean_of_means(accelerator, repeated=True),
        "ME3": sorted(
            row for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2)) for row in gather(batch).tolist()
        ),
    }
    steps = []
    training = accelerator.prepare(DataLoader(torch.arange(4.0), batch_size=2))
    for _ in training:
        for batch in accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=2)):
            # 0 1 | 2 3, then 4 and a stand-in
            steps.append(
                {
                    "rows": gather(batch).tolist(),
                    "nested": gather(({"a": batch * 2}, None))[0]["a"].tolist(),
                    "texts": gather([f"s{row:.0f}" for row in batch]),
                    "no rows": tuple(gather(torch.eye(3)).shape),
                    "count": gather(len(batch)).tolist(),
                    "counted": gather(torch.tensor(len(batch))).tolist(),
                    "mean": gather(batch.mean()).tolist(),
                    "number": gather(batch.mean().item()).tolist(),
                    "object": gather({"who": f"r{rank}"}),
                    "graph": gather(batch.clone().requires_grad_()).requires_grad,
                    "objects": gather([{"row": row} for row in batch.tolist()], use_gather_object=True),
                    "one object": gather(f"r{rank}", use_gather_object=True),
                }
            )
        inner = len(steps)
        found["outer again"] = gather(torch.tensor([rank])).tolist()
    found["steps"] = steps[:inner]
    told = []
    for rows in (5, 4):  # with stand-ins, and without
        for data in (torch.arange(float(rows)), Stream(rows)):
            seen = torch.cat(list(accelerator.prepare(DataLoader(data, batch_size=2))))
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                gather(seen)
                gather(seen[:1])
            told += [(str(one.message), one.filename == __file__) for one in warned]
    found["behind the loop"] = accelerator.gather_for_metrics([told], use_gather_object=True)
    found["after"] = gather(torch.ones(rank + 1)).tolist(), gather(2.0).tolist()
    return found


@pytest.mark.ranks
def test_every_sample_counts_once() -> None:
    """ME1, ME3, and everything else that one may gather of a batch, in a loop inside another."""
    first, second = run_ranks(_gathered, 2)
    assert first == second
    assert first["ME1"] == pytest.approx(4.0) and first["loss.repeat(batch_size)"] == pytest.approx(4.0)
    assert first["ME3"] == list(range(9))
    assert len(first["steps"]) >= 2
    full, tail = first["steps"][0], first["steps"][1]
    assert full["rows"] == [0.0, 1.0, 2.0, 3.0] and tail["rows"] == [4.0]
    assert full["texts"] == ["s0", "s1", "s2", "s3"] and tail["texts"] == ["s4"]
    assert full["no rows"] == (6, 3) and tail["no rows"] == (3, 3)
    assert full["count"] == full["counted"] == [2, 2] and tail["count"] == tail["counted"] == [1]
    assert full["mean"] == full["number"] == [0.5, 0.5, 2.5, 2.5] and tail["mean"] == tail["number"] == [4.0]
    assert full["object"] == {"who": ["r0", "r1"]} and tail["object"] == {"who": ["r0"]}
    assert full["objects"] == [{"row": float(row)} for row in range(4)] and tail["objects"] == [{"row": 4.0}]
    assert full["one object"] == ["r0", "r1"] and tail["one object"] == ["r0"]
    assert not full["graph"]
    assert first["outer again"] == [0, 1]
    nothing, told = first["behind the loop"]
    assert nothing == [] and len(told) == 2 and told[0] == told[1] and told[0][1]
    text = "gather_for_metrics behind the loop: of the 3 rows that this process has seen in it, 2 were its own"
    assert told[0][0].startswith(text)
    assert first["after"] == ([1.0, 1.0, 1.0], [2.0, 2.0])


def test_one_process_follows_the_same_rules() -> None:
    """ME1 in one process."""
    accelerator = Accelerator()
    assert _mean_of_means(accelerator) == pytest.approx(4.0)
    assert accelerator.gather_for_metrics(torch.ones(2)).tolist() == [1.0, 1.0]
    assert accelerator.gather_for_metrics(["a"], use_gather_object=True) == ["a"]
