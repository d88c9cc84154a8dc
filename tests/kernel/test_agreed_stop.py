"""Stop in the middle of training: all replicas end at the same step, or it is said that they may not have."""

from __future__ import annotations

import ast
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


# Weight 0, rate 1, every sample 1: the weight is the number of steps.
COUNTER = """
from nbdist import Accelerator
from torch.utils.data import DataLoader
counting = Accelerator(gradient_accumulation_steps={window})
one = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(one.weight)
sgd = torch.optim.SGD(one.parameters(), lr=1.0)
constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
loader = DataLoader(torch.ones(10**5, 1), num_workers={window} - 1)
one, sgd, constant, loader = counting.prepare(one, sgd, constant, loader)
"""

COUNT = """
{loop}
    with counting.accumulate(one):
        counting.backward(-one(batch).mean())
        sgd.step()
        constant.step()
        {zero}sgd.zero_grad()
    if steps == 0: print("here", "abcdefgh"[rank])
    steps += 1
"""

# After a Stop: what was counted, and how far one more step moves.
LOOK = """
before = one.module.weight.item()
counted = constant.last_epoch, loader.state_dict()["delivered"], steps
for _ in range({window}):
    with counting.accumulate(one):
        counting.backward(-one(torch.ones(1, 1)).mean()); sgd.step(); sgd.zero_grad()
everyone = [None] * world_size
dist.all_gather_object(everyone, (before, counted, one.module.weight.item() - before))
print(everyone)
"""


@pytest.mark.parametrize(
    ("window", "loop", "zero"),
    [
        (1, "for batch in loader:", ""),
        (2, "for batch in loader:", ""),
        (1, "while batch is not None:", ""),
        (1, "for batch in loader:", "if steps % 2: "),  # gradients are added up: what is not zeroed stays
    ],
)
def test_a_step_is_made_once(nb: Notebook, window: int, loop: str, zero: str) -> None:
    """Stop comes behind the whole step: scheduler and loader have counted it, and its gradient is not there again."""
    nb.ok(magic(COUNTER.format(window=window), RANKS))
    code = "steps, batch = 0, torch.ones(1, 1)" + COUNT.format(loop=loop, zero=zero)
    cell = nb.run(magic(code, RANKS), stop_after=0.2, stop_when=all_here(RANKS))
    was_stopped(cell)
    assert cell.error is not None and "stopped at step" in cell.error[1] and "in step" in cell.error[1], cell.text
    first, second = ast.literal_eval(nb.ok(magic(LOOK.format(window=window), RANKS)).stdout)
    weight, (scheduled, delivered, batches), moved = first
    assert first == second
    assert f"stopped at step {scheduled} on every rank" in cell.error[1]
    assert scheduled > 2 and batches == scheduled * window
    assert delivered == (batches if "loader" in loop else 0)
    if zero:
        assert moved in (1.0, 2.0)
    else:
        assert (weight, moved) == (scheduled, 1.0)


@pytest.mark.parametrize("evaluation", ["counting.gather(batch)", "time.sleep(0.01 + 0.01 * rank)"])
def test_stop_behind_the_last_step(nb: Notebook, evaluation: str) -> None:
    """No step follows: the rest of the ladder stops it in time, and what is equal is not called apart."""
    nb.ok(magic(COUNTER.format(window=1), RANKS))
    code = (
        "batch = torch.ones(1, 1)\nfor steps in range(2):"
        + COUNT.format(loop="", zero="")
        + f"""
for batch in loader:
    {evaluation}
"""
    )
    cell = nb.run(magic(code, RANKS), stop_after=0.3, stop_when=all_here(RANKS))
    was_stopped(cell)
    assert cell.error is not None and cell.error[1] == "stopped", cell.error
    first, second = ast.literal_eval(nb.ok(magic("steps = 2\n" + LOOK.format(window=1), RANKS)).stdout)
    assert first[0] == second[0] == 2.0 and first[2] == second[2] == 1.0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_between_backward_and_step(nb: Notebook, failing: int) -> None:
    """The other rank has made a step more: it is said with the error, and again at the next Stop, until resync."""
    nb.ok(magic(COUNTER.format(window=1), RANKS))
    step = "counting.backward(-one(torch.ones(1, 1)).mean())\n    {between}\n    sgd.step(); sgd.zero_grad()\n"
    broken = "for i in range(9):\n    " + step.format(between=f"if rank == {failing} and i == 5: open('/no/such', 'w')")
    cell = nb.run(magic(broken, RANKS))
    counts = "5 on rank 0, 6 on rank 1" if failing == 0 else "6 on rank 0, 5 on rank 1"
    assert f"optimizer steps made in this cell: {counts}, so what they trained may be a step apart" in cell.text
    assert cell.error is not None and cell.error[0] == "FileNotFoundError" and "`%distributed resync`" in cell.text
    going = "for i in range(10**9):\n    " + step.format(between="if i == 1: print('here', 'abcdefgh'[rank])")

    def stop() -> str:
        cell = nb.run(magic(going, RANKS), stop_after=0.1, stop_when=all_here(RANKS))
        was_stopped(cell)
        assert cell.error is not None
        return cell.error[1]

    assert "in step" not in (told := stop()) and "since an earlier cell" in told
    nb.ok("%distributed resync")
    assert stop().endswith("models and optimizers are in step")
    weights = nb.ok(magic("print(counting.gather(one.module.weight.detach()).unique().numel())", RANKS))
    assert weights.stdout == "1\n"


def test_the_same_error_on_all_ranks_is_not_apart(nb: Notebook) -> None:
    nb.ok(magic(COUNTER.format(window=1), RANKS))
    code = "counting.backward(-one(torch.ones(1, 1)).mean()); sgd.step()\nif rank == 0: time.sleep(0.1)\n1 / 0"
    cell = nb.run(magic(code, RANKS))
    assert cell.error is not None and cell.error[0] == "ZeroDivisionError" and "apart" not in cell.text


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
    if rank == 0 or step_boundary.steps < 3:
        step_boundary.midway = True
        step_boundary.passed()
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
