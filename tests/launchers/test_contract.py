"""What every launcher must do, and the cell with them: one contract, run against each.

A launcher here is something that runs source text, the body of a function, on two ranks of a real kernel and tells the
ranks' values through a name `told`.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.kernel.notebook import Cell, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]


@dataclass
class Launcher:
    """`cell(body)`: the cell that runs this body on two ranks. `line` of the body is that much lower in the cell."""

    name: str
    template: str
    stays: bool  # its ranks stay for the next call

    def cell(self, body: str) -> str:
        indent = "    " if "def work" in self.template else ""
        return self.template.replace("BODY", textwrap.indent(textwrap.dedent(body).strip(), indent))

    @property
    def before(self) -> int:
        return self.template[: self.template.index("BODY")].count("\n")


_HEAD = "import os, signal, time, torch, torch.distributed as dist\n"
LAUNCHERS = [
    Launcher("cell", f"%%distributed -n 2\n{_HEAD}BODY", True),
    Launcher("launch", f"def work():\n    {_HEAD}BODY\nshown = nbdist.launch(work, ranks=2)", False),
    Launcher(
        "notebook_launcher", f"def work():\n    {_HEAD}BODY\nshown = notebook_launcher(work, num_processes=2)", False
    ),
    Launcher("debug_launcher", f"def work():\n    {_HEAD}BODY\nshown = debug_launcher(work)", False),
]


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbdist\nimport nbdist\nfrom nbdist import notebook_launcher, debug_launcher")
        yield notebook


@pytest.fixture(params=LAUNCHERS, ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    chosen: Launcher = request.param
    return chosen


Run = Callable[[str], Cell]


def test_two_ranks_with_a_group_open(nb: Notebook, launcher: Launcher) -> None:
    cell = nb.ok(
        launcher.cell(
            """
            total = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(total)
            print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
            """
        )
    )
    assert (
        sorted(line for line in cell.stdout.splitlines() if "sum" in line)
        == [
            "rank 0 of 2 sum 3.0",
        ]
        and "[1] the same 1 line but for the rank" in cell.stdout
    )


def test_what_rank_0_made_of_what_it_reads_comes_back_in_place(nb: Notebook, launcher: Launcher) -> None:
    nb.ok("import torch\nitems = [1]; alias = items")
    nb.ok("weights = torch.zeros(3); view = weights[1:]; ptr = weights.data_ptr()")
    nb.ok(launcher.cell("items.append(10 + dist.get_rank())\nweights.add_(1 + dist.get_rank())"))
    assert nb.value("(alias, items is alias, view.tolist(), weights.data_ptr() == ptr)") == (
        [1, 10],
        True,
        [1.0, 1.0],
        True,
    )


def test_the_first_failing_ranks_own_exception_at_its_own_line(nb: Notebook, launcher: Launcher) -> None:
    """NB2."""
    cell = nb.run(launcher.cell('if dist.get_rank() == 1:\n    raise KeyError("user bug")\ndist.barrier()'))
    assert cell.error is not None and cell.error[0] == "KeyError" and "user bug" in cell.error[1]
    assert "rank 1 failed first; cut off by that: rank 0" in cell.traceback
    assert (
        f"{launcher.before + 2}     raise KeyError"
        in cell.traceback.replace("----> ", "").replace("  ", " ").replace("  ", " ")
        or f"{launcher.before + 2} " in cell.traceback
    )
    assert "nbdist/" not in cell.traceback and "launchers" not in cell.traceback, cell.traceback


def test_a_rank_that_is_killed_is_named(nb: Notebook, launcher: Launcher) -> None:
    cell = nb.run(launcher.cell("if dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"))
    assert cell.error is not None and cell.error[0] == "RankLost"
    assert f"rank 1 was killed by SIGKILL (signal 9) at cell line {launcher.before + 2}" in cell.error[1]


def test_stop_is_a_keyboard_interrupt_and_keeps_what_was_made(nb: Notebook, launcher: Launcher) -> None:
    nb.ok("made = []")
    cell = nb.run(
        launcher.cell(
            'made.append(1)\nprint("begun", "ab"[dist.get_rank()])\n'
            "if dist.get_rank() == 1:\n    dist.barrier()\nwhile True: pass"
        ),
        stop_when=lambda cell: cell.stdout.count("begun") == 2,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt" and "stopped" in cell.error[1]
    assert nb.value("made") == [1]


def test_the_environment_is_the_notebooks_and_nothing_leaks_back(nb: Notebook, launcher: Launcher) -> None:
    nb.ok("import os\nos.environ['FROM_HERE'] = 'here'; os.environ.pop('RANK', None); told = []")
    nb.ok(
        launcher.cell(
            """
            told.append((os.environ["FROM_HERE"], os.environ["RANK"], os.environ["WORLD_SIZE"], os.getcwd()))
            os.environ["LEFT"] = "x"
            """
        )
    )
    assert nb.value("(told, os.getcwd(), 'RANK' in os.environ, 'LEFT' in os.environ)")[0][0][:3] == ("here", "0", "2")
    assert nb.value("(told[0][3] == os.getcwd(), 'RANK' in os.environ, 'LEFT' in os.environ)") == (True, False, False)


def test_the_kernel_is_not_forked(nb: Notebook, launcher: Launcher) -> None:
    """NB4: nothing that the notebook's process has initialised is in a rank."""
    nb.ok(
        "import torch, threading, time\n"
        "torch.cuda.is_initialized = lambda: True  # what a fork would choke on\n"
        "product = torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()\nparents = []"
    )
    nb.ok(
        launcher.cell(
            """
            import multiprocessing, threading
            torch.ones(500, 500) @ torch.ones(500, 500)
            method = multiprocessing.get_start_method(allow_none=True)
            parents.append((os.getppid(), torch.cuda.is_initialized(), method))
            """
        )
    )
    parent, initialised, method = nb.value("parents[0]")
    assert parent != nb.pid and initialised is False and method != "fork"


def test_displays_are_shown(nb: Notebook, launcher: Launcher) -> None:
    cell = nb.ok(launcher.cell('from IPython.display import HTML, display\ndisplay(HTML("<b>bold</b>"))'))
    assert [data["text/html"] for data in cell.data if "text/html" in data] == ["<b>bold</b>"]


CALLS = {
    "launch": "nbdist.launch(len, [])",
    "notebook_launcher": "nbdist.notebook_launcher(len, ([],))",
    "debug_launcher": "nbdist.debug_launcher(len, ([],))",
}


@pytest.mark.parametrize(
    "launcher", [launcher for launcher in LAUNCHERS if launcher.name in CALLS], ids=lambda launcher: launcher.name
)
def test_inside_a_rank_it_is_refused(nb: Notebook, launcher: Launcher) -> None:
    cell = nb.fails(f"import nbdist\n{CALLS[launcher.name]}")
    assert cell.error is not None and cell.error[0] == "RuntimeError"
    assert f"{launcher.name} was called on rank" in cell.error[1] and "call the function itself" in cell.error[1]


def test_no_rank_of_a_call_is_left(nb: Notebook, launcher: Launcher) -> None:
    nb.ok("%distributed stop\npids = []")
    nb.ok(launcher.cell("both = [None, None]\ndist.all_gather_object(both, os.getpid())\npids.extend(both)"))
    pids = nb.value("pids")
    assert len(set(pids)) == 2

    def alive() -> set[int]:
        return {process.pid for process in nb.processes()} & set(pids)

    if launcher.stays:
        assert alive() == set(pids)
        return
    end = time.monotonic() + 5
    while alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive()
