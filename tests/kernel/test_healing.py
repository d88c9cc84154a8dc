"""Process groups after a cut: everything that can be done with them works, again and again, also the hard way."""

from __future__ import annotations

import time

import pytest

from tests.kernel.notebook import Cell, Notebook
from tests.kernel.trouble import HERE, all_here, magic, was_stopped, works

pytestmark = pytest.mark.kernel

RANKS = 3

SETUP = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
early = dist.new_group([0, 2])
mesh = init_device_mesh("cpu", (world_size,))
sharded = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
"""

# Everything that must work on groups from before and on new ones.
EVERYTHING = """
def equal(value, expected):
    assert value.tolist() == expected, (value, expected)

value = torch.ones(2)
dist.all_reduce(value); equal(value, [3.0, 3.0])
work = dist.all_reduce(value, async_op=True); work.wait(); equal(value, [9.0, 9.0])
value = torch.tensor([float(rank)])
if rank == 0: dist.send(torch.tensor([7.0]), 1)
if rank == 1: dist.recv(value, 0); equal(value, [7.0])
gathered = [torch.zeros(1) for _ in range(world_size)]
dist.all_gather(gathered, torch.tensor([float(rank)])); assert [v.item() for v in gathered] == [0.0, 1.0, 2.0]
objects = [None] * world_size
dist.all_gather_object(objects, {"rank": rank}); assert objects[2] == {"rank": 2}
box = ["from 1"] if rank == 1 else [None]
dist.broadcast_object_list(box, src=1); assert box == ["from 1"]
dist.barrier()
dist.monitored_barrier()
if rank != 1: value = torch.ones(1); dist.all_reduce(value, group=early); equal(value, [2.0])
late = dist.new_group([1, 2])
if rank: value = torch.ones(1); dist.all_reduce(value, group=late); equal(value, [2.0])
equal(sharded.full_tensor(), torch.arange(12.0).reshape(6, 2).tolist())
equal(sharded.redistribute(mesh, [Replicate()]).to_local(), torch.arange(12.0).reshape(6, 2).tolist())
for model in (ddp, DistributedDataParallel(torch.nn.Linear(2, 1))):
    model.zero_grad()
    model(torch.full((1, 2), float(rank))).sum().backward()
    equal(model.module.weight.grad, [[1.0, 1.0]])
print("everything", "abcdefgh"[rank])
"""


def cut(notebook: Notebook) -> None:
    """Stop a collective that not all ranks come to."""
    code = HERE + "dist.barrier() if rank else time.sleep(60)"
    was_stopped(notebook.run(magic(code, RANKS), stop_after=0.0, stop_when=all_here(RANKS)))


def everything_works(notebook: Notebook) -> Cell:
    cell = notebook.ok(magic(EVERYTHING, RANKS, "--no-return"))
    assert all(f"everything {letter}" in cell.stdout for letter in "abcdefgh"[:RANKS])
    return cell


def test_everything_after_a_cut(nb: Notebook) -> None:
    nb.ok(magic(SETUP, RANKS))
    before = works(nb, RANKS)
    everything_works(nb)
    for _ in range(3):
        cut(nb)
        everything_works(nb)
    assert works(nb, RANKS) == before


HELD = """
import os
held = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
"""


def held(notebook: Notebook) -> list[tuple[int, int]]:
    """(threads, descriptors) of each rank."""
    notebook.ok(magic(HELD, RANKS, "--no-return"))
    return notebook.value("list(ranks['held'])")


def at_most(most: list[tuple[int, int]], notebook: Notebook) -> bool:
    """Waits: replaced backends end in a thread of their own."""
    end = time.monotonic() + 10
    while not all(a <= x and b <= y for (a, b), (x, y) in zip(held(notebook), most, strict=True)):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_many_heals(nb: Notebook) -> None:
    """Everything goes on to work, and nothing is left behind: no thread, no descriptor."""
    nb.ok(magic(SETUP, RANKS, "--fresh"))
    before = works(nb, RANKS)
    cut(nb)
    time.sleep(0.1)
    after_one = held(nb)
    for _ in range(20):
        cut(nb)
        assert "--fresh" not in nb.ok(magic("dist.barrier()", RANKS)).stderr
    most = [(threads + 2, files + 2) for threads, files in after_one]  # one that buries the last
    assert at_most(most, nb), (held(nb), after_one)
    everything_works(nb)
    assert works(nb, RANKS) == before


def test_many_heals_with_a_torch_whose_backends_stay(nb: Notebook) -> None:
    """They go on to work all the same, and the user is told, once, what each costs."""
    other = "from nbdist.worker import backends\nbackends._library = False"
    nb.ok(magic(SETUP + other, RANKS, "--fresh --no-return"))
    nb.ok("from nbdist.launchers import settling\nsettling.MANY_HEALS = 3")
    told = []
    for _ in range(4):
        cut(nb)
        told.append(nb.ok(magic("dist.barrier()", RANKS)).stderr)
    nb.ok("settling.MANY_HEALS = 20")
    assert [number for number, text in enumerate(told, 1) if "--fresh" in text] == [3], told
    everything_works(nb)


def test_a_failure_in_a_cell_heals_too(nb: Notebook) -> None:
    """A rank that raises while the others are in collectives of several groups."""
    nb.ok(magic(SETUP, RANKS, "--fresh"))
    code = """
if rank == 0: raise ValueError('bad')
if rank == 2: dist.all_reduce(torch.ones(1), group=early)
dist.barrier()
"""
    cell = nb.run(magic(code, RANKS))
    assert cell.error is not None
    assert cell.error[0] == "ValueError"
    everything_works(nb)


@pytest.mark.parametrize("how", ["it says no", "it raises"])
def test_where_healing_in_place_does_not_work(nb: Notebook, how: str) -> None:
    """With another torch the private interface may be gone: the groups are made again, and that is said."""
    change = {"it says no": "one._heal_works = False", "it raises": "one.self_test = lambda: 1 / 0"}[how]
    code = f"""
import gc
from nbdist.worker.groups import Groups
for one in gc.get_objects():
    if isinstance(one, Groups):
        {change}
        print("changed")
del one
"""
    assert nb.ok(magic(code, RANKS, "--fresh --no-return")).stdout.count("changed") == 1
    before = works(nb, RANKS)
    nb.ok(magic(SETUP, RANKS))
    for _ in range(2):
        cut(nb)
        cell = nb.ok(magic("value = torch.ones(1)\ndist.all_reduce(value)\nprint('sum', value.item())", RANKS))
        assert cell.stdout == "sum 3.0\n", cell.text
        assert "were made again" in cell.stderr, cell.text
        if how == "it raises":  # written between two cells: it is shown under the one before
            late = "".join(cell.stderr for cell in nb.late.values())
            assert "healing groups in place is not possible with torch" in late
        nb.ok(magic(SETUP, RANKS))  # what had to be made again
        everything_works(nb)
        # the user's open and close go on as well
        nb.ok(magic("dist.destroy_process_group()\ndist.init_process_group('gloo')\ndist.barrier()", RANKS))
    assert works(nb, RANKS) == before
