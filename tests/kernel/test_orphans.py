"""However the kernel, a rank or the supervisor ends: no process of the notebook's is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import psutil
import pytest

from tests.kernel.notebook import Notebook, wait_gone
from tests.kernel.trouble import END_LIMIT, HERE, SLOW_DATA, all_here, magic, works

pytestmark = pytest.mark.kernel

RANKS = 3
GONE_LIMIT = 10.0  # seconds; the figure is 3

# What the kernel is doing when it is killed, on its ranks. Each cell says when all ranks are there.
MOMENTS = {
    "loop": HERE + "while True: pass",
    "DataLoader workers": SLOW_DATA
    + "for batch in DataLoader(Slow(0.02), batch_size=4, num_workers=2): print('here', 'abcdefgh'[rank])",
    "native call": "big = torch.randn(3000, 3000)\n" + HERE + "torch.linalg.svd(big)",
    "interpreter held": "import itertools\n" + HERE + "sum(itertools.repeat(1, 10**12))",
    "signals ignored": "for it in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(it, signal.SIG_IGN)\n"
    + HERE
    + "while True: time.sleep(1)",
    "daemonised subprocesses": """
subprocess.Popen(['sleep', '1000'], start_new_session=True)
os.system('setsid sleep 1001 &')
"""
    + HERE
    + "time.sleep(100)",
    "multiprocessing in a rank": "import multiprocessing\n"
    "child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(1000,))\nchild.start()\n"
    + HERE
    + "time.sleep(100)",
    "collective": HERE + "dist.barrier() if rank else time.sleep(100)",
    "a Stop under way": HERE + "while True:\n    try: time.sleep(0.1)\n    except BaseException: pass",
}


def all_gone(processes: list[psutil.Process], notebook: Notebook) -> None:
    """Those, and whatever else carries the notebook's mark."""
    start = time.monotonic()
    left = wait_gone([*processes, *notebook.marked()], GONE_LIMIT)
    left += wait_gone(notebook.marked(), max(0.0, GONE_LIMIT - (time.monotonic() - start)))
    assert not left, f"left after {GONE_LIMIT:g} s: {left}"


def killed(notebook: Notebook) -> None:
    below = notebook.processes()
    notebook.kill()
    all_gone(below, notebook)


def show(notebook: Notebook, message_id: str, ranks: int) -> None:
    """Wait until every rank of a running cell is there."""
    here, end = all_here(ranks), time.monotonic() + 30
    while not here(notebook.late_output(message_id, 0.02)):
        assert time.monotonic() < end, notebook.late


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_kernel_is_killed(fresh: Notebook, moment: str) -> None:
    running = fresh.start(magic(MOMENTS[moment], RANKS))
    show(fresh, running, RANKS)
    if moment == "a Stop under way":
        fresh.manager.interrupt_kernel()
    killed(fresh)


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_is_killed_at_a_random_moment(seed: int) -> None:
    """From the import of the extension to a running cell: while the supervisor warms, forks, ranks join."""
    with Notebook() as notebook:
        notebook.start("%load_ext nbdist")
        notebook.start(magic("while True: pass", RANKS))
        time.sleep(random.Random(seed).uniform(0.05, 3.0))
        killed(notebook)


def test_the_kernel_is_killed_while_it_ships(fresh: Notebook) -> None:
    fresh.ok(magic("pass", RANKS))
    fresh.ok("import numpy\nbig = [numpy.ones(1_000_000) for _ in range(10)]\ntext = [str(i) for i in range(300_000)]")
    fresh.start(magic("big, text", RANKS))
    time.sleep(0.1)
    killed(fresh)


def test_a_child_of_the_kernel_holds_its_descriptors(fresh: Notebook) -> None:
    """An end of file would not come: the kernel's own DataLoader workers, for example, have a copy of every socket."""
    fresh.ok(magic("pass", RANKS))
    fresh.ok("import os, time")
    child = psutil.Process(fresh.value("os.fork() or (time.sleep(60), os._exit(0))"))
    show(fresh, fresh.start(magic(HERE + "time.sleep(100)", RANKS)), RANKS)
    below = [process for process in fresh.processes() if process != child]
    fresh.kill()
    try:
        left = wait_gone(below, GONE_LIMIT)
        assert not left
        assert child.is_running()
    finally:
        child.kill()
    all_gone([child], fresh)


def test_normal_end_leaves_nothing() -> None:
    """Shutdown with subprocesses that have left their session, and workers between batches."""
    with Notebook() as notebook:
        notebook.ok("%load_ext nbdist")
        code = SLOW_DATA + (
            "loader = DataLoader(Slow(0.001), batch_size=4, num_workers=1, persistent_workers=True)\n"
            "batches = iter(loader)\nnext(batches)\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)"
        )
        notebook.ok(magic(code, RANKS))
        below = notebook.processes()
        assert len(below) >= 2 + 3 * RANKS
        notebook.manager.shutdown_kernel(now=False)
        all_gone(below, notebook)


def test_a_restart_leaves_nothing(fresh: Notebook) -> None:
    """Jupyter's restart: the old ranks are gone, and the new kernel starts its own."""
    before = works(fresh, RANKS)
    below = fresh.processes()
    fresh.manager.restart_kernel(now=False)
    fresh.client.wait_for_ready(timeout=60)
    fresh.pid = fresh.manager.provisioner.process.pid
    all_gone(below, fresh)
    fresh.ok("%load_ext nbdist")
    assert not set(before) & set(works(fresh, RANKS))


def test_unloading_leaves_nothing(nb: Notebook) -> None:
    nb.ok(magic("subprocess.Popen(['sleep', '1000'], start_new_session=True)", RANKS))
    below = nb.processes()
    nb.ok("%unload_ext nbdist")
    all_gone(below, nb)
    nb.ok("%load_ext nbdist")
    works(nb, RANKS)


def test_stopping_the_ranks_leaves_nothing_of_theirs(nb: Notebook) -> None:
    """`%distributed stop` ends their subprocesses too; the supervisor stays."""
    nb.ok(
        magic(
            "me = os.getpid()\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nits = child.pid",
            RANKS,
        )
    )
    theirs = [psutil.Process(pid) for pid in nb.value("[*ranks['me'], *ranks['its']]")]
    assert len(theirs) == 2 * RANKS
    nb.ok("%distributed stop")
    assert not wait_gone(theirs, GONE_LIMIT)
    works(nb, RANKS)


def test_a_rank_is_killed_with_its_workers(nb: Notebook) -> None:
    """Its DataLoader workers go with it; the cell ends with the rank, the signal and the line; the next one works."""
    code = (
        "me = os.getpid()\n"
        + SLOW_DATA
        + "for batch in DataLoader(Slow(0.02), batch_size=4, num_workers=2): print('here', 'abcdefgh'[rank])"
    )
    before = works(nb, RANKS)
    running = nb.start(magic(code, RANKS))
    show(nb, running, RANKS)
    workers = psutil.Process(before[1]).children(recursive=True)
    assert len(workers) == 2
    start = time.monotonic()
    os.kill(before[1], signal.SIGKILL)
    cell = nb.wait(running)
    assert time.monotonic() - start < END_LIMIT
    assert cell.error is not None
    assert cell.error[0] == "RankLost"
    line = magic(code, RANKS).split("\n").index(code.split("\n")[-1]) + 1
    assert f"rank 1 was killed by SIGKILL (signal 9) at cell line {line}" in cell.error[1], cell.error
    assert not wait_gone(workers, GONE_LIMIT)
    after = works(nb, RANKS)
    assert not set(before) & set(after)


def test_the_supervisor_is_killed_in_a_cell(nb: Notebook) -> None:
    """Ranks end with it, the cell says so, and the next cell starts anew."""
    before = works(nb, RANKS)
    code = (
        SLOW_DATA + "for batch in DataLoader(Slow(0.02), batch_size=4, num_workers=1): print('here', 'abcdefgh'[rank])"
    )
    running = nb.start(magic(code, RANKS))
    show(nb, running, RANKS)
    below = nb.processes()
    start = time.monotonic()
    supervisor_of(nb, before).kill()
    cell = nb.wait(running)
    assert time.monotonic() - start < END_LIMIT
    assert cell.error is not None
    assert cell.error[0] == "RankLost"
    assert re.search(r"rank \d", cell.error[1])
    after = works(nb, RANKS)
    assert not set(before) & set(after)
    assert not wait_gone(below, GONE_LIMIT)


def test_the_supervisor_is_killed_between_cells(nb: Notebook) -> None:
    before = works(nb, RANKS)
    below = nb.processes()
    supervisor_of(nb, before).kill()
    assert not wait_gone(below, GONE_LIMIT)
    after = works(nb, RANKS)
    assert not set(before) & set(after)


def test_the_fork_server_is_killed(nb: Notebook) -> None:
    """It is the ranks' parent: they end with it, so does the supervisor, and the next cell starts anew."""
    before = works(nb, RANKS)
    server = psutil.Process(before[0]).parent()
    assert server is not None
    ranks = [psutil.Process(pid) for pid in before]
    supervisor = supervisor_of(nb, before)
    server.kill()
    assert not wait_gone([*ranks, supervisor], GONE_LIMIT)
    works(nb, RANKS)


def supervisor_of(notebook: Notebook, ranks: list[int]) -> psutil.Process:
    """The supervisor: the child of the kernel above the ranks."""
    process = psutil.Process(ranks[0])
    while process.ppid() != notebook.pid:
        parent = process.parent()
        assert parent is not None
        process = parent
    return process
