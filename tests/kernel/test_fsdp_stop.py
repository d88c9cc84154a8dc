"""Stop in the middle of sharded training: it trains on, as if it had not been stopped."""

from __future__ import annotations

import random

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import all_here, magic, was_stopped

pytestmark = pytest.mark.kernel

RANKS = 2

TRAINER = """
from nbdist import Accelerator
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), *[Block() for _ in range(3)], torch.nn.Linear(8, 1))
def rows(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
def whole(model):
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
accelerator = Accelerator(strategy="fsdp")
bare = make()
model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9))
steps = 0
"""

TRAIN = """
print("here", "abcdefgh"[rank])
while True:
    optimizer.zero_grad()
    accelerator.backward(model(rows(steps).chunk(world_size)[rank]).pow(2).mean())
    steps += 1
    optimizer.step()
    time.sleep(0.002 * ({number} % 2 == rank))
"""

# As many steps in plain torch, over all rows.
COMPARE = """
other = make()
sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
for step in range(steps):
    other(rows(step)).pow(2).mean().backward()
    sgd.step()
    sgd.zero_grad()
there = torch.cat([p.detach().flatten() for p in other.parameters()])
print(sorted({type(p).__name__ for p in model.parameters()}), (whole(model) - there).abs().max().item() < 1e-5, steps)
"""


def test_twenty_stops_leave_what_an_uninterrupted_run_has(nb: Notebook) -> None:
    chance = random.Random(5)
    nb.ok(magic(TRAINER, RANKS))
    for number in range(20):
        code = magic(TRAIN.format(number=number), RANKS)
        cell = nb.run(code, stop_after=chance.uniform(0.0, 0.15), stop_when=all_here(RANKS))
        was_stopped(cell)
        if number % 5 == 4:
            told = nb.ok(magic(COMPARE, RANKS)).stdout
            assert told.startswith("['DTensor'] True"), told
    assert nb.value("steps") > 20


# Nearly all of the time is in backward; nothing is agreed.
IN_BACKWARD = """
from torch.distributed.fsdp import fully_shard
hand = make()
for part in (*hand, hand):
    fully_shard(part, mesh=accelerator.torch_device_mesh)
def slowly(module, inputs, output):
    output.register_hook(lambda gradient: time.sleep(0.01))
for part in list(hand)[1:4]:
    part.register_forward_hook(slowly)
"""
LOOP = """
print("here", "abcdefgh"[rank])
while True:
    hand(rows(0)).pow(2).mean().backward()
"""
# From the same weights on, what plain torch does in two steps.
TRAIN_ON = """
told = sorted({type(p).__name__ for p in hand.parameters()}), all(p.grad is None for p in hand.parameters())
other = make()
with torch.no_grad():
    for mine, theirs in zip(hand.parameters(), other.parameters()):
        theirs.copy_(mine.full_tensor())
for trained in (hand, other):
    sgd = torch.optim.SGD(trained.parameters(), lr=0.05)
    for step in range(2):
        trained(rows(step)).pow(2).mean().backward()
        sgd.step()
        sgd.zero_grad()
there = torch.cat([p.detach().flatten() for p in other.parameters()])
print(*told, (whole(hand) - there).abs().max().item() < 1e-6)
"""


def test_stopped_inside_of_backward_a_module_sharded_by_hand_trains_on(nb: Notebook) -> None:
    chance = random.Random(3)
    nb.ok(magic(TRAINER, RANKS))
    nb.ok(magic(IN_BACKWARD, RANKS))
    for _ in range(5):
        cell = nb.run(magic(LOOP, RANKS), stop_after=chance.uniform(0.03, 0.2), stop_when=all_here(RANKS))
        was_stopped(cell)
        told = nb.ok(magic(TRAIN_ON, RANKS)).stdout
        assert told == "['DTensor'] True True\n", told
