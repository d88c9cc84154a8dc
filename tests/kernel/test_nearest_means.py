"""A real kernel without pidfd, prctl, memfd and /proc, as on macOS: forced by NBDIST_WITHOUT on a machine that has them
all.
"""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook, wait_gone

pytestmark = pytest.mark.kernel

WITHOUT = {"NBDIST_WITHOUT": "pidfd,prctl,memfd,proc"}
CHILD = "import subprocess\n_child = subprocess.Popen(['sleep', '1000'])"


def test_cells_stop_death_and_orphans_with_the_linux_means_switched_off() -> None:
    with Notebook(WITHOUT) as nb:
        nb.ok("%load_ext nbdist\nimport torch\nbig, numbers = torch.zeros(1 << 20), [1]")
        nb.ranks(
            "import torch.distributed as dist\ndist.all_reduce(x := torch.ones(1) + rank)\nbig += 1\nnumbers += [2]"
        )
        assert nb.value("(numbers, big.sum().item(), x.item())") == ([1, 2], float(1 << 20), 3.0)
        assert nb.value("__import__('nbdist.system').system.missing()") == ["pidfd", "prctl", "memfd", "proc"]
        before = nb.value("[one._pool.pids[one._rank] for one in ranks]")
        for code in ("while True: pass", "dist.barrier() if rank == 0 else __import__('time').sleep(100)"):
            stopped = nb.run(f"%%distributed -n 2\n{code}", stop_after=1.0)
            assert stopped.error is not None and stopped.error[0] == "KeyboardInterrupt", stopped.text
        nb.ranks("dist.barrier()")
        assert nb.value("[one._pool.pids[one._rank] for one in ranks]") == before
        # A rank that dies: its own children end with it, and so do those of the rank that is replaced.
        nb.ranks(CHILD)
        lost = nb.fails("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert lost.error is not None and lost.error[0] == "RankLost"
        sleepers = [process for process in nb.marked() if process.name() == "sleep"]
        nb.ranks("dist.barrier()")
        assert wait_gone(sleepers, 5.0) == []
        nb.ranks(CHILD)
        everything = nb.marked()
        assert len([process for process in everything if process.name() == "sleep"]) == 2
        nb.kill()
        assert wait_gone(everything, 5.0) == []


def test_the_supervisors_death_ends_the_ranks_with_the_linux_means_switched_off() -> None:
    with Notebook(WITHOUT) as nb:
        nb.ok("%load_ext nbdist")
        nb.ranks("x = rank")
        everything = nb.processes()
        supervisor = next(process for process in everything if process.ppid() == nb.pid)
        supervisor.kill()
        assert wait_gone([process for process in everything if process.pid != supervisor.pid], 5.0) == []
        nb.ranks("y = rank + 1")
        assert nb.value("y") == 1
