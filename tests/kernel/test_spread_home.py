"""What is spread over the ranks is the notebook's own, whole, after each cell; what the notebook changes in it reaches
each rank's part.
"""

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
rows = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))  # 7 and 3 rows on 2 ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
loader = DataLoader(rows, batch_size=5)
alone, alone_optimizer, alone_scheduler = copy.deepcopy((model, optimizer, scheduler))
weight, kind = model[0].weight, type(model)

def train_alone():
    for x, y in DataLoader(rows, batch_size=10):
        alone_optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        alone_optimizer.step()

def apart():
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    states = [(optimizer.state[a][k], alone_optimizer.state[b][k]) for a, b in pairs for k in alone_optimizer.state[b]]
    return max((a - b).abs().max().item() for a, b in [*pairs, *states])

def both(edit):
    for one, its in ((model, optimizer), (alone, alone_optimizer)):
        edit(one, its)
"""
PREPARE = """
from nbdist import Accelerator
accelerator = Accelerator()
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
"""
TRAIN = """
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
"""
# How many wholes the last cell brought together, in the ranks' own words.
WATCHED = """
from nbdist.shipping import away
if not hasattr(away, "gathered"):
    away.gathered, away.was = [], away.gather
    def gather(values, keep):
        away.gathered += [len(values)] if values else []
        return away.was(values, keep)
    away.gather = gather
"""


def trains_as_alone(nb: Notebook, options: str = "-n 2") -> None:
    nb.ranks(TRAIN, options)
    nb.ok("train_alone()")
    assert nb.value("apart()") < 1e-5


def test_a_sharded_model_is_the_notebooks_own_and_its_edits_reach_the_ranks(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(WATCHED + PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)
    assert nb.value("type(model) is kind and model[0].weight is weight and type(weight) is nn.Parameter")
    assert nb.value("optimizer.param_groups[0]['params'] == list(model.parameters())")
    assert nb.value("(type(optimizer).__name__, len(optimizer.state))") == ("AdamW", 4)
    assert nb.value("not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())")
    assert nb.value("torch.equal(model(rows.tensors[0]), ranks['model'][1](rows.tensors[0]))")
    nb.ranks("made = len(away.gathered)")
    nb.ranks("seen = (type(model[0].weight).__name__, len(away.gathered) - made)")
    assert nb.value("list(ranks['seen'])") == [("DTensor", 0)] * 2  # what nobody has changed is not gathered again
    nb.ok("with torch.no_grad():\n    both(lambda one, its: one[0].weight[0].zero_())")
    trains_as_alone(nb)
    nb.ok("both(lambda one, its: its.state[one[2].weight]['exp_avg'].mul_(2))")
    trains_as_alone(nb)
    nb.ok("both(lambda one, its: one[0].weight.requires_grad_(False))")
    trains_as_alone(nb)
    nb.ok("both(lambda one, its: its.load_state_dict(copy.deepcopy(its.state_dict())))")
    trains_as_alone(nb)
    nb.ok("both(lambda one, its: one.load_state_dict({k: v * 0.5 for k, v in one.state_dict().items()}))")
    trains_as_alone(nb)


def test_on_new_ranks_it_is_a_plain_model_again_and_goes_on(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)
    nb.ok("%distributed restart")
    nb.ranks("whole = type(model[0].weight).__name__\n" + PREPARE, "-n 2 --backend fsdp")
    assert nb.value("whole") == "Parameter"
    trains_as_alone(nb)


def test_a_cell_that_fails_brings_it_home_too(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    nb.fails(TRAIN + "raise ValueError('on all')")
    nb.ok("train_alone()")
    assert nb.value("apart()") < 1e-5
    nb.fails(TRAIN + "import torch.distributed as dist\nif rank: raise ValueError('on one')\ndist.barrier()")
    nb.ok("train_alone()")
    assert nb.value("apart()") < 1e-5
    trains_as_alone(nb)


def test_what_not_all_ranks_can_bring_stays_and_is_told(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)
    quiet = nb.ranks("kept = len(model)", "--ranks 0")
    assert "in the notebook" not in quiet.text
    told = nb.ranks("with torch.no_grad():\n    model[0].weight.to_local().zero_()", "--ranks 0")
    assert "rank 1 did not run the cell" in told.text and "%distributed pull model" in told.text
    assert nb.value("apart()") < 1e-5
    nb.ok("%distributed pull model")
    assert nb.value("(weight[0].tolist(), bool(weight[6].any()))") == ([0.0] * 4, True)


def test_over_the_limit_it_stays_and_pull_brings_it(nb: Notebook) -> None:
    wide = MADE.replace("7", "3000")  # 96 kB of parameters, and three times that of moments and gradients
    nb.ok(wide)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    told = nb.ranks(TRAIN + "moments = optimizer.state[model[0].weight]['exp_avg']", "-n 2 --return-limit 150KB")
    assert "optimizer" in told.text and "over the return limit of" in told.text and len(told.text) < 1000
    assert nb.value("type(moments).__name__") == "RankedValue"
    nb.ok("train_alone()")
    assert nb.value("max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters()))") < 1e-5
    nb.ok("%distributed pull optimizer")
    assert nb.value("apart()") < 1e-5


def test_tensors_that_the_user_spreads(nb: Notebook) -> None:
    nb.ok("import torch")
    nb.ranks(
        "from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "spread = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])\n"
        "held = {'a': spread, 'b': distribute_tensor(torch.ones(2), mesh, [Replicate()])}"
    )
    assert nb.value("(type(spread) is torch.Tensor, spread.tolist(), held['a'] is spread)") == (
        True,
        [0.0, 1.0, 2.0, 3.0, 4.0],
        True,
    )
    nb.ok("spread[4] = 100; held['b'] += 1")
    nb.ranks("parts = (spread.to_local().tolist(), held['b'].to_local().tolist(), held['a'] is spread)")
    assert nb.value("list(ranks['parts'])") == [([0, 1, 2], [2, 2], True), ([3, 100], [2, 2], True)]


def test_whole_parameters_that_came_from_the_notebook_are_let_go(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks("import weakref\nold = [weakref.ref(one) for one in model.parameters()]")
    nb.ranks(
        PREPARE + "left = [ref() is not None for ref in old]\n"
        "import gc\nkept = [len(gc.get_referrers(ref())) for ref in old if ref() is not None]",
        "-n 2 --backend fsdp",
    )
    assert nb.value("list(ranks['left'])") == [[False] * 4] * 2, nb.value("list(ranks['kept'])")


def test_stop_brings_it_home(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    cell = nb.run(
        "%%distributed\nprint('begun')\nsteps = 0\nfor _ in range(100000):\n    for x, y in loader:\n"
        "        optimizer.zero_grad()\n        accelerator.backward(nn.functional.cross_entropy(model(x), y))\n"
        "        optimizer.step()\n        steps += 1",
        stop_after=0.7,
        stop_when=lambda shown: "begun" in shown.text,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert nb.value(
        "all(torch.equal(a, b) for one in ranks['model'] for a, b in zip(one.parameters(), model.parameters()))"
    )
    assert nb.value("int(optimizer.state[weight]['step']) == steps > 0")
    nb.ranks("torch.manual_seed(0)\n" + TRAIN)
    assert nb.value("torch.equal(ranks['model'][1][0].weight, weight)")


def test_a_parameter_put_in_the_place_of_a_sharded_one_is_refused(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    nb.ok("model[0].weight = nn.Parameter(torch.ones(7, 4))")
    told = nb.fails(TRAIN)
    assert "'weight' of a Linear is sharded" in told.text and "copy_" in told.text
    nb.ok("model[0].weight = weight")
    trains_as_alone(nb)


def test_a_layer_and_a_group_that_the_notebook_puts_in_are_trained_alike(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)
    nb.ok("new = nn.Linear(7, 3)\ndef put(one, its):\n    one[2] = copy.deepcopy(new)\nboth(put)")
    nb.ok("both(lambda one, its: its.add_param_group({'params': list(one[2].parameters())}))")
    trains_as_alone(nb)  # and it was not prepared again
    assert nb.value("all(torch.equal(one[2].weight, model[2].weight) for one in ranks['model'])")
    nb.ranks(PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)


OVER_FOUR = {
    "dp_shard_size=2, tp_size=2, tp_handler=TorchTensorParallelConfig(plan={'0': 'colwise', '2': 'rowwise'})": 2,
    "dp_replicate_size=2, dp_shard_size=2": 4,
}


@pytest.mark.parametrize("sizes", OVER_FOUR)
def test_meshes_of_two_dimensions(nb: Notebook, sizes: str) -> None:
    made = MADE.replace("7", "8").replace("batch_size=5", f"batch_size={8 // OVER_FOUR[sizes]}")
    nb.ok(made.replace("batch_size=10", "batch_size=8"))
    told = nb.ranks(
        "from nbdist import Accelerator\nfrom nbdist.utils import ParallelismConfig, TorchTensorParallelConfig\n"
        f"accelerator = Accelerator(parallelism_config=ParallelismConfig({sizes}))\n"
        "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)\n",
        "-n 4",
    )
    assert not told.text
    assert nb.value("type(model[0].weight) is nn.Parameter")
    trains_as_alone(nb, "-n 4")
    nb.ok("with torch.no_grad():\n    both(lambda one, its: one[0].weight[0].zero_())")
    nb.ok("both(lambda one, its: its.state[one[2].weight]['exp_avg'].mul_(2))")
    told = nb.ranks(TRAIN, "-n 4")
    assert not told.text
    nb.ok("train_alone()")
    assert nb.value("apart()") < 1e-5
    nb.ok("%distributed stop -n 4")


def test_where_rank_0_alone_has_the_weights_what_the_notebook_changes_reaches_all(nb: Notebook) -> None:
    nb.ok(MADE)
    nb.ranks(
        "if rank:\n    with torch.device('meta'):\n"
        "        model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
        "    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)\n"
        "from nbdist import FullyShardedDataParallelPlugin as Plugin\n"
        + PREPARE.replace("Accelerator()", "Accelerator(fsdp_plugin=Plugin(cpu_ram_efficient_loading=True))"),
        "-n 2 --backend fsdp",
    )
    trains_as_alone(nb)
    nb.ok("with torch.no_grad():\n    both(lambda one, its: one[0].weight.zero_())")
    trains_as_alone(nb)


TROUBLE = """
import os, time
from nbdist.shipping import reaching
def gather(value, image, keep, was=reaching._gather):
    was(value, image, keep)
    if rank and reaching.trouble == "is slow":
        time.sleep(30)
    elif rank and reaching.trouble == "dies":
        os.kill(os.getpid(), 9)
if not hasattr(reaching, "trouble"):
    reaching.trouble, reaching._gather = "", gather
"""


@pytest.mark.parametrize("trouble", ["is slow", "dies"])
def test_what_is_cut_off_while_it_is_brought_together_is_as_it_was(nb: Notebook, trouble: str) -> None:
    nb.ok(MADE)
    nb.ranks(TROUBLE + PREPARE, "-n 2 --backend fsdp")
    trains_as_alone(nb)
    nb.ok("was = copy.deepcopy(model)")
    cell = nb.run(
        f"%%distributed -n 2\n{TRAIN}\nreaching.trouble = '{trouble}'\nseen = rank\nprint('trained')",
        stop_after=0.3 if trouble == "is slow" else None,
        stop_when=(lambda shown: "trained" in shown.text) if trouble == "is slow" else None,
    )
    assert cell.error is not None and cell.error[0] == ("RankLost" if trouble == "dies" else "KeyboardInterrupt")
    assert cell.stderr.count("\n") == 1 and "as it was before" in cell.stderr and "gloo" not in cell.text
    assert ("pull" in cell.stderr) is (trouble == "is slow")
    assert nb.value("seen") == 0
    assert nb.value("all(torch.equal(a, b) for a, b in zip(was.parameters(), model.parameters(), strict=True))")
    if trouble == "is slow":
        nb.ranks("reaching.trouble = ''\nnow = len(model), len(optimizer.state)")
        nb.ok("train_alone()")
        assert nb.value("apart()") < 1e-5
        trains_as_alone(nb)


TREES = """
import copy, random, torch
from torch import nn
from nbdist import Accelerator

SHAPES = [(1,), (3,), (2, 5), (7, 3, 2), (1, 9), (4, 4), (0, 3)]

def tree(seed):
    '''A module of modules: tied, frozen and buffered, of any shapes.'''
    pick = random.Random(seed)
    torch.manual_seed(seed)
    parameters, buffers, modules = [], [], []

    def make(depth):
        if modules and pick.random() < 0.15:
            return pick.choice(modules)
        module = pick.choice([nn.Module, nn.Sequential, Kind])()
        for name in "abc"[: pick.randint(0, 3)]:
            if parameters and pick.random() < 0.2:
                one = pick.choice(parameters)
            else:
                one = nn.Parameter(torch.randn(pick.choice(SHAPES)), requires_grad=pick.random() < 0.8)
                parameters.append(one)
            setattr(module, name, one)
        if pick.random() < 0.4:
            one = pick.choice(buffers) if buffers and pick.random() < 0.3 else torch.randn(pick.choice(SHAPES))
            buffers.append(one)
            module.register_buffer("held", one, persistent=pick.random() < 0.7)
        if depth:
            for at in range(pick.randint(0, 3)):
                module.add_module(str(at), make(depth - 1))
        modules.append(module)
        return module

    whole = make(3)
    whole.add_module("last", nn.Linear(3, 5))
    return whole

class Kind(nn.Module):
    pass

def change(module, by):
    with torch.no_grad():
        for at, one in enumerate([*module.parameters(), *module.buffers()]):
            if (at + by) % 3:
                one.mul_(0.5).add_(by)

def edit(module, by):
    with torch.no_grad():
        for at, one in enumerate([*module.parameters(), *module.buffers()]):
            if (at + by) % 2 and one.numel():
                one.view(-1)[-1] = by
    for at, one in enumerate(module.parameters()):
        if at % 4 == by:
            one.requires_grad_(not one.requires_grad)

def facts(module):
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {}
    its = [(name, first.setdefault(id(one), name), type(one), one.requires_grad) for name, one in named]
    return its, [one for _, one in named]

def apart():
    found = []
    for seed, (one, other) in enumerate(zip(trees, others, strict=True)):
        (its, tensors), (wanted, there) = facts(one), facts(other)
        if its != wanted or not all(map(torch.equal, tensors, there)):
            found.append(seed)
    return found

trees = [tree(seed) for seed in range(24)]
others = copy.deepcopy(trees)
"""


def test_modules_of_any_shape_come_home_as_they_are(nb: Notebook) -> None:
    nb.ok(TREES)
    nb.ranks(
        "accelerator = Accelerator()\ntrees[:] = [accelerator.prepare(one) for one in trees]", "-n 2 --backend fsdp"
    )
    for by in (1, 2):
        nb.ranks(f"for one in trees: change(one, {by})")
        nb.ok(f"for one in others: change(one, {by})")
        assert nb.value("apart()") == []
        nb.ok(f"for one in [*trees, *others]: edit(one, {by})")
    assert (
        nb.value("[sum(len(facts(one)[0]) for one in every) for every in ranks['trees']]")
        == [nb.value("sum(len(facts(one)[0]) for one in trees)")] * 2
    )
    nb.ranks("kinds = sorted({type(one).__name__ for tree in trees for one in tree.parameters()})\nchange(trees[0], 3)")
    nb.ok("change(others[0], 3)")
    assert nb.value("apart()") == [] and nb.value("kinds") == ["DTensor", "Parameter"]
