"""A prepared model that ordinary cells edit trains on as one process would train it."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

MADE = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
rows = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(rows, batch_size=5)
alone, alone_optimizer = copy.deepcopy((model, optimizer))

def train_alone():
    for x, y in DataLoader(rows, batch_size=10):
        alone_optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        alone_optimizer.step()

def apart():
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
"""
PREPARE = """
from nbdist import Accelerator
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
TRAIN = """
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
checksum = sum(p.double().sum().item() for p in model.parameters())
"""


def trains_as_alone(nb: Notebook) -> None:
    nb.ranks(TRAIN)
    nb.ok("train_alone()")
    assert nb.value("apart()") < 1e-5
    assert nb.value("len(set(ranks['checksum'])) == 1")  # the replicas are the same


def test_layers_are_frozen_thawed_added_and_replaced(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE)
    trains_as_alone(nb)
    nb.ok("for one in (model, alone):\n    one[0].requires_grad_(False)")
    trains_as_alone(nb)
    nb.ok("for one in (model, alone):\n    one[0].requires_grad_(True)")
    trains_as_alone(nb)
    nb.ok(
        "new = nn.Linear(2, 2)\n"
        "for one, its in ((model, optimizer), (alone, alone_optimizer)):\n"
        "    one.append(copy.deepcopy(new))\n"
        "    its.add_param_group({'params': one[3].parameters(), 'lr': 0.05})"
    )
    trains_as_alone(nb)
    nb.ok("for one in (model, alone):\n    one[0].weight = nn.Parameter(torch.ones(8, 4))")  # in no optimizer
    trains_as_alone(nb)
    nb.ok("for one in (model, alone):\n    with torch.no_grad():\n        one[2].weight.mul_(0.5)")
    trains_as_alone(nb)


def test_what_the_ranks_add_themselves_is_made_equal(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE)
    nb.ranks("torch.manual_seed(rank)\nmodel.module.append(nn.Linear(2, 2))\nseeded = model.module[3].weight.tolist()")
    assert nb.value("len(set(map(str, ranks['seeded'])))") == 2
    nb.ranks(TRAIN)
    assert nb.value("len(set(ranks['checksum'])) == 1")
