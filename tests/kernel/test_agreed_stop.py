"""Stop in the middle of training: all replicas end at the same step, or it is said that they may not have."""

from __future__ import annotations

import random

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import HERE, all_here, magic, was_stopped

pytestmark = pytest.mark.kernel

RANKS = 2
STOPS = 20

TRAINER = """
from nbdist import Accelerator
torch.manual_seed(0)
accelerator = Accelerator()
bare = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
model, optimizer = accelerator.prepare(bare, torch.optim.Adam(bare.parameters(), lr=0.01))
steps = 0
"""

TRAIN = """
torch.manual_seed(rank + 2 * {number})
print("here", "abcdefgh"[rank])
while True:
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 8)).pow(2).mean())
    steps += 1
    optimizer.step()
    time.sleep(0.002 * ({number} % 2 == rank))
"""

# Everything that must be equal on all ranks, and that is finite and moves.
COMPARE = """
states = [value for state in {optimizer}.state.values() for value in state.values()]
mine = (steps, [p.tolist() for p in {model}.parameters()], [value.tolist() for value in states])
everyone = [None] * world_size
dist.all_gather_object(everyone, mine)
same = all(other == everyone[0] for other in everyone)
print("same" if same else "apart", [other[0] for other in everyone])
"""


def test_replicas_stay_equal(nb: Notebook) -> None:
    """Twenty stops at random moments of Accelerator and DDP: parameters, Adam's state and step counts are equal."""
    chance = random.Random(11)
    nb.ok(magic(TRAINER, RANKS))
    before = 0
    for number in range(STOPS):
        cell = nb.run(
            magic(TRAIN.format(number=number), RANKS), stop_after=chance.uniform(0.0, 0.5), stop_when=all_here(RANKS)
        )
        was_stopped(cell)
        assert cell.error is not None
        compared = nb.ok(magic(COMPARE.format(model="model", optimizer="optimizer"), RANKS))
        assert "same" in compared.stdout, compared.text
        steps = nb.value("steps")
        if "stopped at step" in cell.error[1]:
            assert f"stopped at step {steps - before} " in cell.error[1], (cell.error, steps, before)
        before = steps
    assert steps > STOPS
    # the notebook has the model as the ranks have it
    cell = nb.ok(
        magic("theirs = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]", RANKS) + "\ndist.barrier()"
    )
    assert nb.value("theirs == [p.tolist() for p in model.parameters()] and model is bare") is True


def test_stop_before_the_first_step(nb: Notebook) -> None:
    """There is no step to agree on yet: the rest of the ladder stops it, and training goes on, equal."""
    nb.ok(magic(TRAINER, RANKS))
    for wait in (
        "time.sleep(60)",
        "dist.barrier() if rank else time.sleep(60)",
        "while True: model(torch.randn(4, 8))",
    ):
        was_stopped(nb.run(magic(HERE + wait, RANKS), stop_after=0.05, stop_when=all_here(RANKS)))
        trained = nb.ok(
            magic("for _ in range(5):\n    " + TRAIN.format(number=1).split("while True:")[1].strip(), RANKS)
        )
        assert trained.error is None
        compared = nb.ok(magic(COMPARE.format(model="model", optimizer="optimizer"), RANKS))
        assert "same" in compared.stdout, compared.text


def test_a_rank_that_never_comes_to_its_step(nb: Notebook) -> None:
    """The agreement has a limit: with one rank stuck between two steps the cell is back in time all the same."""
    nb.ok(magic(TRAINER, RANKS))
    code = """
for _ in range(3):
    optimizer.zero_grad(); accelerator.backward(model(torch.randn(4, 8)).pow(2).mean()); optimizer.step()
print("here", "abcdefgh"[rank])
if rank: time.sleep(60)
optimizer.zero_grad(); accelerator.backward(model(torch.randn(4, 8)).pow(2).mean()); optimizer.step()
"""
    was_stopped(nb.run(magic(code, RANKS), stop_after=0.1, stop_when=all_here(RANKS)))
    compared = nb.ok(magic(COMPARE.format(model="model", optimizer="optimizer"), RANKS))
    assert "same" in compared.stdout, compared.text


def test_different_numbers_of_steps(nb: Notebook) -> None:
    """A rank that has stopped stepping, as with uneven loops of its own, holds nobody up."""
    code = """
from nbdist.state import step_boundary
print("here", "abcdefgh"[rank])
while True:
    time.sleep(0.01)
    if rank == 0 or step_boundary.steps < 3: step_boundary.passed()
"""
    was_stopped(nb.run(magic(code, RANKS), stop_after=0.3, stop_when=all_here(RANKS)))
    assert nb.ok(magic("dist.barrier()\nprint('on')", RANKS)).stdout == "on\n"


PLAIN = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(8, 8))
sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
steps = 0
"""

# Rank 0 is a step behind at the moment of the Stop: it sleeps between its backward and its step, rank 1 has stepped.
PLAIN_LOOP = """
torch.manual_seed(rank)
while True:
    sgd.zero_grad()
    net(torch.randn(4, 8)).pow(2).mean().backward()
    if steps == 3:
        print("here", "abcdefgh"[rank])
        if rank == 0: time.sleep(60)
    sgd.step()
    steps += 1
"""


def test_a_plain_loop_is_said_to_be_apart_and_resync_mends_it(nb: Notebook) -> None:
    """Without a step boundary ranks can end a step apart: the message says so, and names the way out, which works."""
    nb.ok(magic(PLAIN, RANKS))
    cell = nb.run(magic(PLAIN_LOOP, RANKS), stop_after=0.2, stop_when=all_here(RANKS))
    was_stopped(cell)
    assert cell.error is not None
    assert "`%distributed resync`" in cell.error[1], cell.error
    assert "step apart" in cell.error[1]
    compared = nb.ok(magic(COMPARE.format(model="net", optimizer="sgd"), RANKS))
    assert "apart [3, 4]" in compared.stdout, compared.text
    told = nb.ok("%distributed resync")
    for name in ("net", "sgd", "steps"):
        assert name in told.stdout, told.text
    compared = nb.ok(magic(COMPARE.format(model="net", optimizer="sgd"), RANKS))
    assert "same [3, 3]" in compared.stdout, compared.text
    # and it goes on
    trained = nb.ok(
        magic(
            "for _ in range(3):\n    " + PLAIN_LOOP.split("while True:")[1].strip().replace("steps == 3", "False"),
            RANKS,
        )
    )
    assert trained.error is None
    compared = nb.ok(magic(COMPARE.format(model="net", optimizer="sgd"), RANKS))
    assert "same [6, 6]" in compared.stdout, compared.text


def test_in_step_is_not_called_apart(nb: Notebook) -> None:
    """No warning when there is nothing to warn about: the ranks stood at the same place."""
    nb.ok(magic(PLAIN, RANKS))
    cell = nb.run(
        magic("net(torch.randn(4, 8)).sum().backward()\n" + HERE + "time.sleep(60)", RANKS),
        stop_after=0.2,
        stop_when=all_here(RANKS),
    )
    was_stopped(cell)
    assert cell.error is not None
    assert "resync" not in cell.error[1]
