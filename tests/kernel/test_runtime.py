"""The runtime in a cell, where the ranks live on: what must come back in order after something went wrong."""

from __future__ import annotations

import time

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

FIND = """
import time, torch
from torch.utils.data import DataLoader
from nbdist import Accelerator, find_executable_batch_size
accelerator, tried = Accelerator(), []
kept = accelerator.prepare(torch.nn.Linear(1, 1))  # made before: in a pool it lives on
mine = torch.distributed.new_group([0, 1])
started = time.monotonic()

@find_executable_batch_size(starting_batch_size=4)
def train(batch_size):
    tried.append(batch_size)
    own = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(torch.ones(16, 1), batch_size=batch_size))
    for rows in loader:
        loss = model(rows).mean()
        if rank == 1 and batch_size > 2:
            torch.empty(10**15)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return batch_size

found = train()
accelerator.backward(kept(torch.full((1, 1), 1.0 + rank)).mean())
value = torch.ones(1)
torch.distributed.all_reduce(value, group=mine)
told = accelerator.gather(torch.ones(rank + 1)).tolist()
print(found, tried, kept.module.weight.grad.item(), value.item(), told)
"""


def test_a_rank_out_of_memory_while_the_other_waits(nb: Notebook) -> None:
    """Twice, and a Stop between: each time the groups, the user's own too, are healed in place."""
    right = "2 [4, 3, 2] 1.5 2.0 [1.0, 1.0, 1.0]"
    for _ in range(2):
        assert right in nb.ranks(FIND).stdout
        started = time.monotonic()
        cell = nb.fails("if rank:\n    raise KeyError('boom')\naccelerator.gather(torch.ones(1))")
        assert time.monotonic() - started < 10 and "boom" in cell.text  # the figure (2 s) is in benchmarks/
        assert "[1.0, 1.0]" in nb.ranks("print(accelerator.gather(torch.ones(1)).tolist())").stdout


def test_metrics_splitting_and_ending_in_a_cell(nb: Notebook) -> None:
    """ME1 in a cell; `end_training` leaves the next cell its process group."""
    out = nb.ranks(
        "import torch\nfrom nbdist import Accelerator\nfrom torch.utils.data import DataLoader\n"
        "accelerator = Accelerator()\nmeans = []\n"
        "for batch in accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=5)):\n"
        "    means.append(accelerator.gather_for_metrics(batch.mean()))\n"
        "print(round(torch.cat(means).mean().item(), 4))\n"
        "with (part := accelerator.split_between_processes(list('abc'), apply_padding=True)) as mine:\n"
        "    print(part.gather(letter * 2 for letter in mine))\n"
        "accelerator.end_training()"
    ).stdout
    assert "4.0" in out and "['aa', 'bb', 'cc']" in out
    assert "[1.0, 1.0]" in nb.ranks("print(accelerator.gather(torch.ones(1)).tolist())").stdout
