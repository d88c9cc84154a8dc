"""A checkpoint that is written behind the cells: told under its own, whatever is stopped or ended meanwhile."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from nbdist.checkpoint import manifest
from tests.kernel.notebook import Notebook

BEGIN = """%%distributed -n 2
import threading, time, torch
from nbdist import Accelerator
from nbdist.checkpoint import writing
go, write = threading.Event(), writing.write
def slow(*args):
    go.wait()
    write(*args)
writing.write = slow
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(3, 3))
"""
SAVED = re.compile(r"saved (\S+) in \d+\.\d s\n")


def test_cells_end_stop_and_so_do_ranks(tmp_path: Path) -> None:
    with Notebook(cwd=str(tmp_path)) as nb:
        nb.ok("%load_ext nbdist")
        nb.ok(BEGIN)
        first = nb.start("%%distributed -n 2\naccelerator.save_state('first', async_save=True)")
        assert nb.wait(first).error is None and not (tmp_path / "first").exists()
        loop = "while True:\n    time.sleep(0.01)"
        stopped = nb.run(f"%%distributed -n 2\nprint('in it')\n{loop}", stop_when=lambda cell: "in it" in cell.stdout)
        assert stopped.error and stopped.error[0] == "KeyboardInterrupt"
        nb.ok("%%distributed -n 2\ngo.set()")
        nb.late_output(first, 1.0)
        assert SAVED.fullmatch(nb.late[first].stdout), nb.late[first].text
        assert manifest.is_checkpoint(tmp_path / "first")

        # Ranks that are to end finish it, here and where a launched function has returned.
        nb.ok(
            "%%distributed -n 2\ngo.clear()\naccelerator.save_state('second', async_save=True)\n"
            "threading.Timer(0.5, go.set).start()"
        )
        nb.ok("%distributed stop")
        assert manifest.is_checkpoint(tmp_path / "second")
        launched = nb.ok(
            "def train():\n    namespace = {}\n"
            f"    exec({BEGIN.partition(chr(10))[2]!r}, namespace)\n"
            "    namespace['threading'].Timer(0.5, namespace['go'].set).start()\n"
            "    namespace['accelerator'].save_state('third', async_save=True)\n"
            "import nbdist\nnbdist.launch(train, ranks=2)"
        )
        assert manifest.is_checkpoint(tmp_path / "third") and SAVED.search(launched.stdout), launched.text

        # Killed in the middle: the one before stays, and the next save finds nothing in its way.
        nb.ok(BEGIN)
        nb.ok("%%distributed -n 2\naccelerator.save_state('first', async_save=True)\ntime.sleep(0.2)")
        before = manifest.read(tmp_path / "first").id
        nb.run("%%distributed -n 2\nimport os\nos.kill(os.getpid(), 9)")
        assert manifest.read(tmp_path / "first").id == before
        nb.ok(BEGIN)
        nb.ok("%%distributed -n 2\ngo.set()\naccelerator.save_state('first')")
        assert sorted(os.listdir(tmp_path)) == ["first", "second", "third"]
        assert manifest.read(tmp_path / "first").id != before
        begun = time.perf_counter()
        nb.ok("%distributed stop")
        assert time.perf_counter() - begun < 20, "nothing is waited for"
