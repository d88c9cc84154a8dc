"""A rank that fails or dies ends the cell soon, is named with what ended it and with the cell's line, and the next
cell works.
"""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest

from tests.kernel.notebook import Cell, Notebook, wait_gone
from tests.kernel.trouble import END_LIMIT, HERE, STOP_LIMIT, all_here, magic, was_stopped, works

pytestmark = pytest.mark.kernel

RANKS = 3

# How rank 1 ends, in line 4 of the cell, while rank 0 waits in a barrier and rank 2 computes: the words of the error.
WAYS = {
    "raises": ("raise KeyError('user bug')", "KeyError", "'user bug'"),
    "sys.exit": ("import sys; sys.exit(3)", "RankExited", "rank 1 exited with code 3 at cell line 4"),
    "sys.exit without a code": ("import sys; sys.exit()", "RankExited", "rank 1 exited with code 0 at cell line 4"),
    "quits": ("raise SystemExit('because')", "RankExited", "rank 1 exited with code 'because' at cell line 4"),
    "os._exit": ("os._exit(5)", "RankLost", "rank 1 exited with code 5 at cell line 4"),
    "os._exit with 0": ("os._exit(0)", "RankLost", "rank 1 exited with code 0 at cell line 4"),
    "SIGKILL": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "RankLost",
        "rank 1 was killed by SIGKILL (signal 9) at cell line 4",
    ),
    "SIGTERM": (
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        "RankLost",
        "rank 1 was killed by SIGTERM (signal 15) at cell line 4",
    ),
    "segfault": (
        "import ctypes; ctypes.string_at(0)",
        "RankLost",
        "rank 1 was killed by SIGSEGV (signal 11) at cell line 4",
    ),
    "abort": ("os.abort()", "RankLost", "rank 1 was killed by SIGABRT (signal 6) at cell line 4"),
    "abort in C": (
        "import ctypes; ctypes.CDLL(None).abort()",
        "RankLost",
        "rank 1 was killed by SIGABRT (signal 6) at cell line 4",
    ),
}
DIES = {"os._exit", "os._exit with 0", "SIGKILL", "SIGTERM", "segfault", "abort", "abort in C"}


@pytest.mark.parametrize("way", WAYS)
def test_the_cell_ends_and_says_who_and_where(nb: Notebook, way: str) -> None:
    before = works(nb, RANKS)
    how, kind, words = WAYS[way]
    cell = nb.run(magic(f"if rank == 1:\n    {how}\ndist.barrier() if rank == 0 else time.sleep(60)", RANKS))
    assert cell.seconds < END_LIMIT, cell.text
    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error[0] == kind, cell.text
    assert words in cell.error[1], cell.text
    if way not in DIES:
        assert "rank 1 failed first" in cell.text
        assert re.search(r"-+> +4 ", cell.traceback), cell.traceback
    assert "cut off by that: ranks 0, 2" in cell.text, cell.text
    after = works(nb, RANKS)
    assert (set(before) & set(after) == set()) if way in DIES else (before == after)


def test_exit_while_a_peer_is_in_backward(nb: Notebook) -> None:
    """H5: rank 1 leaves in step 2 while rank 0 is in the backward of DDP."""
    code = """
import sys
from nbdist import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(5):
    if rank == 1 and step == 2: sys.exit(3)
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
"""
    before = works(nb, 2)
    below = nb.processes()
    cell = nb.run(magic(code, 2))
    assert cell.seconds < END_LIMIT
    assert cell.error is not None
    assert "rank 1 exited with code 3" in cell.error[1]
    assert "cut off by that: rank 0" in cell.text
    assert works(nb, 2) == before
    assert {process.pid for process in nb.processes()} <= {process.pid for process in below}
    # the same model goes on
    nb.ok(magic(code.replace("rank == 1", "False").replace("5", "2"), 2))


def test_two_ranks_fail_differently(nb: Notebook) -> None:
    """The one that was first is raised, the other named."""
    code = """
if rank == 2: raise ValueError('first')
time.sleep(0.1)
if rank == 1: raise TypeError('second')
dist.barrier()
"""
    cell = nb.run(magic(code, RANKS))
    assert cell.error is not None
    assert cell.error[:2] == ("ValueError", "first")
    assert "rank 2 failed first; also failed: rank 1 (TypeError: second); cut off by that: rank 0" in cell.text


def test_all_fail_alike(nb: Notebook) -> None:
    cell = nb.run(magic("dist.barrier()\n1 / 0", RANKS))
    assert cell.error is not None
    assert cell.error[0] == "ZeroDivisionError"
    assert "on ranks 0, 1, 2" in cell.text


def test_one_dies_and_its_peers_notice(nb: Notebook) -> None:
    """Peers in a collective with a rank that died raise by themselves: that is not what is reported."""
    cell = nb.run(magic("dist.barrier()\nif rank == 1: os._exit(7)\ndist.barrier()", RANKS))
    assert cell.error is not None
    assert cell.error[0] == "RankLost"
    assert "rank 1 exited with code 7 at cell line 4" in cell.error[1]
    assert "Connection closed by peer" not in cell.error[1]
    works(nb, RANKS)


def test_several_die(nb: Notebook) -> None:
    cell = nb.run(magic("dist.barrier()\nif rank: os._exit(10 + rank)\ntime.sleep(60)", RANKS))
    assert cell.seconds < END_LIMIT
    assert cell.error is not None
    assert "rank 1 exited with code 11" in cell.error[1] or "rank 2 exited with code 12" in cell.error[1]
    works(nb, RANKS)


def test_all_die(nb: Notebook) -> None:
    cell = nb.run(magic("os._exit(1)", RANKS))
    assert cell.seconds < END_LIMIT
    assert cell.error is not None
    assert "exited with code 1 at cell line 3" in cell.error[1]
    works(nb, RANKS)


def test_last_words_are_not_lost(nb: Notebook) -> None:
    """What a rank wrote just before it died is shown, by Python and by native code."""
    code = "print('python words')\nos.write(1, b'native words\\n')\nos._exit(1) if rank == 0 else time.sleep(60)"
    cell = nb.run(magic(code, RANKS))
    assert "python words" in cell.stdout
    assert "native words" in cell.stdout
    works(nb, RANKS)


def test_killed_between_cells(nb: Notebook) -> None:
    """The next cell runs on new ranks, and says why and what is gone."""
    nb.ok(magic("other_pool = (number for number in range(3))", 2))
    before = works(nb, RANKS)
    nb.ok(magic("only_there = (number for number in range(3))", RANKS))
    rank = psutil.Process(before[1])
    rank.kill()
    assert not wait_gone([rank], 10)
    cell = nb.ok(magic("print('runs')", RANKS))
    assert cell.stdout == "runs\n"
    assert "rank 1 ended between cells" in cell.stderr
    assert "Gone with the old ones: only_there; " in cell.stderr
    assert not set(before) & set(works(nb, RANKS))


def test_killed_at_the_very_start_of_a_cell(nb: Notebook) -> None:
    """The notebook may or may not know yet that the rank is gone: the cell runs on new ranks, or ends and says so."""
    for _ in range(3):
        before = works(nb, RANKS)
        os.kill(before[2], signal.SIGKILL)
        cell = nb.run(magic("print('runs')", RANKS))
        assert cell.seconds < END_LIMIT
        if cell.error is not None:
            assert "rank 2 was killed by SIGKILL" in cell.text
        works(nb, RANKS)


def test_killed_while_it_receives(nb: Notebook) -> None:
    """A rank that dies while it decodes what the cell reads: an error that names it, and the notebook keeps its
    values.
    """
    nb.ok(
        """
class Deadly:
    def __init__(self): self.kept = 1
    def __setstate__(self, state):
        import os
        os._exit(9)
deadly = Deadly()
"""
    )
    cell = nb.run(magic("deadly", RANKS))
    assert cell.seconds < END_LIMIT
    assert cell.error is not None
    assert re.search(r"rank \d exited with code 9", cell.text), cell.text
    assert nb.value("deadly.kept") == 1
    works(nb, RANKS)


def test_a_cell_that_closes_what_is_ours(nb: Notebook) -> None:
    """A rank whose every descriptor was closed can only be dead to us: it is named, and the next cell works."""
    cell = nb.run(magic("if rank == 1: os.closerange(3, 500)\ntime.sleep(0.1)", RANKS))
    assert cell.seconds < END_LIMIT, cell.text
    assert cell.error is not None
    assert "rank 1" in cell.text
    works(nb, RANKS)


# ---------------------------------------------------------------- too long


@pytest.mark.parametrize("code", ["time.sleep(60)", "dist.barrier() if rank else time.sleep(60)"])
def test_timeout(nb: Notebook, code: str) -> None:
    """The cell ends with where each rank was; ranks stay."""
    before = works(nb, RANKS)
    cell = nb.run(magic(code, RANKS, "--timeout 1"))
    assert cell.seconds < 1 + STOP_LIMIT
    assert cell.error is not None
    assert cell.error[0] == "CellTimeout"
    assert "stopped after its --timeout of 1 s" in cell.error[1]
    for rank in range(RANKS):
        assert re.search(rf"rank {rank} is (in barrier )?at cell line 3", cell.error[1]), cell.error[1]
    if "barrier" in code:
        assert "rank 1 is in barrier" in cell.error[1]
    assert works(nb, RANKS) == before


def test_a_timeout_that_is_not_reached(nb: Notebook) -> None:
    assert nb.ok(magic("print('in time')", RANKS, "--timeout 30")).stdout == "in time\n"


def test_stop_after_a_failure_began(nb: Notebook) -> None:
    """Stop pressed while the cell is ending because of a failed rank: back in time, and the ranks work."""
    before = works(nb, RANKS)
    code = (
        HERE
        + "if rank == 1: raise ValueError('bad')\nwhile True:\n    try: time.sleep(0.1)\n    except BaseException: pass"
    )
    cell = nb.run(magic(code, RANKS), stop_after=0.1, stop_when=all_here(RANKS))
    assert cell.error is not None
    assert cell.error[0] in ("ValueError", "KeyboardInterrupt")
    assert cell.stop_seconds is not None
    assert cell.stop_seconds < STOP_LIMIT
    assert works(nb, RANKS) == before


def test_loops_for_ever_then_the_next_cell(nb: Notebook) -> None:
    """NB6: stopped, nothing of the cell's own is alive, the same ranks run the next cell."""
    before = works(nb, 2)
    code = "child = subprocess.Popen(['sleep', '1000'])\n" + HERE + "while True: pass"
    cell = nb.run(magic(code, 2, "--no-return"), stop_after=0.5, stop_when=all_here(2))
    was_stopped(cell)
    assert works(nb, 2) == before
    left = wait_gone([p for p in nb.processes() if _is_sleep(p)], 5)
    assert not left


def _is_sleep(process: psutil.Process) -> bool:
    try:
        return process.name() == "sleep"
    except psutil.NoSuchProcess:
        return False


def test_a_mistake_on_one_rank_in_time(nb: Notebook) -> None:
    """Stalls: the ranks wait for each other, and the cell says who is where instead of waiting for ever."""
    nb.ok(
        """
import functools
import nbdist.magics.distributed as module
really = module.Request
module.Request = functools.partial(really, stall_limit=2.0)
"""
    )
    start = time.monotonic()
    cell: Cell = nb.run(magic("value = torch.ones(2)\nif rank == 0: dist.all_reduce(value)\nelse: dist.barrier()", 2))
    nb.ok("module.Request = really")
    assert time.monotonic() - start < 2 + END_LIMIT
    assert cell.error is not None
    assert cell.error[0] == "RanksWaitForEachOther", cell.text
    assert "rank 0 is in all_reduce at cell line 4" in cell.error[1]
    assert "rank 1 is in barrier at cell line 5" in cell.error[1]
    works(nb, 2)
