"""Native state that is alive in the kernel does not disturb a launch, and the kernel gets none from us."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import magic, works

pytestmark = pytest.mark.kernel

RANKS = 2


def test_the_kernel_imports_no_torch(fresh: Notebook) -> None:
    """A cell that uses no torch values leaves the kernel as it was: no torch, no group, no fork server of its own."""
    fresh.ok("import sys, multiprocessing, threading")
    fresh.ok("%%distributed -n 2\nsquares = [number**2 for number in range(10)]\nprint(rank)")
    assert fresh.value("squares[9]") == 81
    assert fresh.value("'torch' in sys.modules") is False
    assert fresh.value("multiprocessing.get_start_method(allow_none=True)") is None
    assert fresh.value(
        "'multiprocessing.forkserver' in sys.modules and multiprocessing.forkserver._forkserver._forkserver_pid"
    ) in (False, None)
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")
    assert fresh.value(f"[name for name in {variables!r} if name in __import__('os').environ]") == []
    # with torch values it has torch, and still no group
    fresh.ok(magic("total = torch.ones(2)\ndist.all_reduce(total)", RANKS))
    assert fresh.value("total.tolist()") == [2.0, 2.0]
    assert fresh.value("__import__('torch').distributed.is_initialized()") is False
    assert fresh.value("__import__('torch').cuda.is_initialized()") is False


def test_launch_with_openmp_threads_and_cuda_simulated(fresh: Notebook) -> None:
    """NB4: an OpenMP pool at work, threads, and a CUDA that says it is initialised (simulated: no GPU here). A fork of
    the kernel would hang or break; the ranks are not forks of it.
    """
    fresh.ok(
        """
import threading, time, torch
torch.set_num_threads(2)
a = torch.randn(400, 400)
b = a @ a
ended = threading.Event()
def work():
    while not ended.is_set(): (a @ a).sum(), time.sleep(0.03)
workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for worker in workers: worker.start()
torch.cuda.is_initialized = lambda: True
torch.cuda._initialized = True
"""
    )
    cell = fresh.ok(
        magic(
            "product = a @ a\nimport multiprocessing\nprint('method', multiprocessing.get_start_method())\n"
            "print('cuda', torch.cuda.is_initialized(), 'parent', os.getppid())\ndist.all_reduce(product)",
            RANKS,
        )
    )
    assert cell.seconds < 60
    assert "cuda False" in cell.stdout
    assert f"parent {fresh.pid}" not in cell.stdout
    assert fresh.value("bool(torch.allclose(product, 2 * b, rtol=1e-4, atol=1e-2))") is True
    assert fresh.value("all(worker.is_alive() for worker in workers)") is True
    works(fresh, RANKS)
    fresh.ok("ended.set()")
    # an Accelerator made in an ordinary cell, with a model prepared by it
    fresh.ok(
        "from nbdist import Accelerator\nmine = Accelerator(cpu=True)\n"
        "net = mine.prepare(torch.nn.Linear(2, 1))\nassert mine.num_processes == 1"
    )
    fresh.ok(magic("from nbdist import Accelerator\ntheirs = Accelerator()\ncounted = theirs.num_processes", RANKS))
    assert fresh.value("(counted, mine.num_processes)") == (2, 1)
    assert fresh.value("torch.distributed.is_initialized()") is False
    # and the model it prepared is trained by the ranks
    fresh.ok("plain = torch.nn.Linear(2, 1)\nbefore = plain.weight.tolist()")
    fresh.ok(
        magic(
            "model, optimizer = theirs.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))\n"
            "theirs.backward(model(torch.ones(4, 2)).sum())\noptimizer.step()",
            RANKS,
        )
    )
    assert fresh.value("plain.weight.tolist() != before") is True


def test_the_kernels_own_multiprocessing_is_left_alone(fresh: Notebook) -> None:
    """Workers of the notebook itself, before, during and after a pool lives, by fork and by spawn."""
    fresh.ok("import multiprocessing, torch\nfrom torch.utils.data import DataLoader\ndata = list(range(8))")
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    read = "[batch.tolist() for batch in DataLoader(data, batch_size=2, num_workers=1)]"
    assert fresh.value(read) == expected
    works(fresh, RANKS)
    assert fresh.value(read) == expected
    fresh.ok("with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-1]))")
    works(fresh, RANKS)
    # and in ranks: what the notebook uses is what they use
    cell = fresh.ok(magic(f"batches = {read.replace('DataLoader', 'torch.utils.data.DataLoader')}", RANKS))
    assert cell.error is None
    assert fresh.value("batches") == expected


def test_a_rank_has_what_a_script_would_have(nb: Notebook) -> None:
    """Threads, seeds, start method and standard input on purpose: equal torch seeds, no hang in input()."""
    code = """
import multiprocessing, random, sys, numpy
seeds = [None] * world_size
dist.all_gather_object(seeds, (torch.initial_seed(), torch.rand(1).item()))
assert seeds[0] == seeds[1]
mine = [None] * world_size
dist.all_gather_object(mine, (random.random(), numpy.random.rand()))
assert mine[0][0] != mine[1][0] and mine[0][1] != mine[1][1]
assert multiprocessing.get_start_method() == 'fork'
try:
    input()
    print("read")
except Exception as error:
    print("no input")
assert os.getsid(0) == os.getpid()
assert signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)
"""
    assert nb.ok(magic(code, RANKS)).stdout.count("no input") == 1
