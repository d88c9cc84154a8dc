"""A cell that fails: the rank's own exception at the cell's own lines, and who else failed or was only cut off."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from tests.kernel.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

OURS = re.compile(r"nbdist/\w+|/magics/(distributed|rank|errors)\.py|run_cell_magic|interactiveshell|raise _stand_in")


@pytest.fixture(scope="module", autouse=True)
def notebook_names(nb: Notebook) -> None:
    nb.ok(
        "class NotebookError(ValueError): pass\nhidden_name = 3\nimport threading\n"
        "def helper(a):\n    b = 1\n    return b / a\ncfg = {'a': [1, {'lock': threading.Lock()}]}"
    )
    nb.ranks("import torch")


@dataclass
class Row:
    """A cell that fails, and what is shown.

    Attributes:
        line: where the arrow stands, the magic being line 1; 0 for an error without a traceback.
        note: the line about the ranks.
        more: what else is in the traceback.
    """

    code: str
    kind: str
    text: str
    line: int = 2
    note: str = "on ranks 0, 1"
    more: tuple[str, ...] = field(default=())


ROWS = {
    "class of the cell": Row("class Mine(Exception): pass\nraise Mine('x', 5)", "Mine", "('x', 5)", 3),
    "class whose arguments do not fit": Row(
        "class Mine(Exception):\n    def __init__(self, a, b): super().__init__(a); self.b = b\nraise Mine('x', 5)",
        "Mine",
        "x",
        4,
    ),
    "keyword-only arguments": Row(
        "class Mine(Exception):\n    def __init__(self, *, code): super().__init__(f'code {code}')\nraise Mine(code=3)",
        "Mine",
        "code 3",
        4,
    ),
    "class of the notebook": Row("raise NotebookError('x')", "NotebookError", "x"),
    "attribute that cannot travel": Row(
        "import threading\ne = ValueError('bad value'); e.lock = threading.Lock()\nraise e",
        "ValueError",
        "bad value",
        4,
    ),
    "with slots": Row("class Mine(Exception): __slots__ = ()\nraise Mine('s')", "Mine", "s", 3),
    "whose text fails": Row(
        "class Mine(Exception):\n    def __str__(self): raise ZeroDivisionError('no')\nraise Mine()",
        "Mine",
        "<its __str__ raised ZeroDivisionError: no>",
        4,
    ),
    "cause": Row(
        "try:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e",
        "RuntimeError",
        "outer",
        5,
        more=("----> 3     {}['k']", "KeyError: 'k'", "direct cause of the following"),
    ),
    "context": Row(
        "try:\n    {}['k']\nexcept KeyError:\n    1 / 0",
        "ZeroDivisionError",
        "division by zero",
        5,
        more=("----> 3     {}['k']", "KeyError: 'k'", "another exception occurred"),
    ),
    "suppressed context": Row(
        "try:\n    {}['k']\nexcept KeyError:\n    raise RuntimeError('alone') from None", "RuntimeError", "alone", 5
    ),
    "notes": Row("e = ValueError('v')\ne.add_note('a hint')\nraise e", "ValueError", "v", 4, more=("a hint",)),
    "KeyError": Row("{}['missing']", "KeyError", "'missing'"),
    "OSError": Row("open('/nonexistent')", "FileNotFoundError", "[Errno 2] No such file or directory: '/nonexistent'"),
    "UnicodeDecodeError": Row(
        "b'\\xff'.decode()",
        "UnicodeDecodeError",
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "frames of a library": Row(
        "import json\njson.loads('{')",
        "JSONDecodeError",
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        3,
        more=("json/decoder.py", "in loads("),
    ),
    "torch": Row("import torch\ntorch.ones(2) @ torch.ones(3)", "RuntimeError", "size", 3),
    "function of the cell": Row(
        "def deep(a):\n    return 1 / a\n\ndeep(0)",
        "ZeroDivisionError",
        "division by zero",
        5,
        more=("----> 3     return 1 / a", "in deep("),
    ),
    "function of an earlier cell": Row(
        "helper(0)", "ZeroDivisionError", "division by zero", more=("in helper(", "---->", "    return b / a")
    ),
    "eval": Row(
        "eval('hidden_name')",
        "NameError",
        "name 'hidden_name' is not defined: the notebook has 'hidden_name', but nbdist did not see that the cell reads "
        "it (by eval, for example): mention it in the cell, as in `hidden_name`",
    ),
    "globals": Row("globals()['hidden_name']", "KeyError", "'hidden_name'", more=("mention it in the cell",)),
    "a name that might be read and cannot travel": Row(
        "def reader(): return cfg\nreader()",
        "NameError",
        "name 'cfg' is not defined: the notebook has 'cfg', but it could not be sent: TypeError: cannot pickle "
        "'_thread.lock' object. Make it in a cell there",
        3,
    ),
    "a name that nobody has": Row("no_such_name", "NameError", "name 'no_such_name' is not defined"),
    "assert": Row("assert rank > 5, 'too low'", "AssertionError", "too low"),
    "sys.exit": Row(
        "import sys, time\ntime.sleep(rank / 10)\nsys.exit(3)",
        "RankExited",
        "rank 0 exited with code 3 at cell line 4 (SystemExit)",
        4,
    ),
    "leading blank lines": Row("\n\n\n1 / 0", "ZeroDivisionError", "division by zero", 5),
    "a magic": Row("%time 1 / 0", "ZeroDivisionError", "division by zero"),
    "one rank": Row(
        "import time\nif rank == 1:\n    raise KeyError('user bug')\ntime.sleep(30)",  # NB2
        "KeyError",
        "'user bug'",
        4,
        "rank 1 failed first; cut off by that: rank 0",
    ),
    "one rank, the other in a collective": Row(
        "import torch, torch.distributed as dist\nif rank == 1:\n    raise ValueError('rank one')\n"
        "dist.all_reduce(torch.ones(2))",
        "ValueError",
        "rank one",
        4,
        "rank 1 failed first; cut off by that: rank 0",
    ),
    "one rank exits": Row(
        "import sys, time\nif rank: sys.exit(3)\ntime.sleep(30)",
        "RankExited",
        "rank 1 exited with code 3 at cell line 3 (SystemExit)",
        3,
        "rank 1 failed first; cut off by that: rank 0",
    ),
    "one rank interrupts itself": Row(
        "import time\nif rank: raise KeyboardInterrupt\ntime.sleep(30)",
        "KeyboardInterrupt",
        "",
        3,
        "rank 1 failed first; cut off by that: rank 0",
    ),
    "each another": Row(
        "import time\nif rank == 0:\n    time.sleep(.1)\n    1 / 0\nraise ValueError('b')",
        "ValueError",
        "b",
        6,
        "rank 1 failed first; also failed: rank 0 (ZeroDivisionError: division by zero)",
    ),
    "same kind, other text": Row(
        "import time\ntime.sleep(rank / 10)\nraise ValueError(f'on {rank}')",
        "ValueError",
        "on 0",
        4,
        "rank 0 failed first; also failed: rank 1 (ValueError: on 1)",
    ),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=name.replace(" ", "-")) for name, row in ROWS.items()])
def test_error(nb: Notebook, row: Row) -> None:
    cell = nb.fails(row.code)
    check(cell, row)
    assert nb.ranks("import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)").error is None
    assert cell.seconds < 5


def check(cell: Cell, row: Row) -> None:
    assert cell.error is not None, cell.text
    kind, text, _ = cell.error
    shown = cell.traceback
    assert kind == row.kind, cell.text
    assert row.text in text if row.kind == "RuntimeError" else text == row.text, cell.text
    assert not OURS.search(shown), shown
    source = ["%%distributed -n 2", *row.code.split("\n")]
    arrows = [line for line in shown.splitlines() if line.startswith("-") and ">" in line]
    assert any(re.fullmatch(rf"-+> {row.line} {re.escape(source[row.line - 1])}", line) for line in arrows), shown
    assert re.search(r"Cell In\[\d+\], line " + str(row.line), shown), shown
    if row.line > 2:
        above = source[row.line - 2]
        assert not above or re.search(rf"^ +{row.line - 1} {re.escape(above)}$", shown, re.M), shown
    assert row.note in shown.splitlines(), shown
    for part in row.more:
        assert part in shown, shown
    if row.note.startswith("on ranks"):
        assert "rank 1 failed" not in shown and "cut off" not in shown
    if "alone" in row.text:
        assert "'k'" not in shown.split("alone")[-1] and "KeyError" not in shown.replace("except KeyError", "")


def test_a_group_of_exceptions_ends_the_cell(nb: Notebook) -> None:
    here = nb.run("raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])")
    cell = nb.fails("raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])")
    assert here.status == cell.status == "error"
    text = cell.text
    for part in ("ExceptionGroup: many (2 sub-exceptions)", "ValueError: a", "KeyError: 'b'", "on ranks 0, 1"):
        assert part in text, text


def test_a_rank_that_dies(nb: Notebook) -> None:
    cell = nb.fails(
        "import os, torch, torch.distributed as dist\nif rank == 1: os._exit(7)\ndist.all_reduce(torch.ones(2))"
    )
    assert cell.error is not None and cell.error[0] == "RankLost"
    assert "rank 1 exited with code 7 at cell line 3" in cell.error[1] and "cut off by that: rank 0" in cell.traceback
    cell = nb.ranks("print('here')", "-n 2 --output rank0")
    assert cell.stdout == "here\n" and "new ranks" in cell.stderr
    cell = nb.fails("import ctypes, time\nif rank == 1: ctypes.string_at(0)\ntime.sleep(30)")
    assert cell.error is not None and "SIGSEGV" in cell.error[1] and "at cell line 3" in cell.error[1]
    cell = nb.fails("import os, signal, time\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(30)")
    assert cell.error is not None and "rank 0 was killed by SIGKILL" in cell.error[1] and "memory" in cell.error[1]
    assert cell.seconds < 5


def test_a_syntax_error_is_shown_as_jupyter_shows_it(fresh: Notebook) -> None:
    cell = fresh.fails("x = = 3")
    assert cell.error is not None and cell.error[0] == "SyntaxError"
    shown = cell.traceback
    assert "line 2" in shown and "x = = 3" in shown and "^" in shown and not OURS.search(shown), shown
    assert fresh.ok("%distributed status").stdout.startswith("no ranks")
    here = fresh.run("x = = 3")
    assert here.error is not None
    assert [line.strip() for line in here.traceback.splitlines()][1:] == [line.strip() for line in shown.splitlines()][
        1:
    ], shown
    # the shell is as it was: the next one is an ordinary one
    cell = fresh.run("compile('y = = 4', 'file', 'exec')")
    assert "compile(" in cell.traceback
    cell = fresh.fails("a = 1\ndef f(:\n    pass")
    assert "line 3" in cell.traceback


@pytest.mark.parametrize(
    "cell",
    [
        "%%distributed -n 2\nexec('x = 1\\ny =')",
        "from nbdist import launch\nlaunch(lambda: exec('x = 1\\ny ='), ranks=2)",
    ],
    ids=["cell", "launch"],
)
def test_a_syntax_error_that_the_code_raises_has_no_frames_of_ours(nb: Notebook, cell: str) -> None:
    shown = nb.run(cell)
    assert shown.error is not None and shown.error[0] == "SyntaxError"
    assert "exec(" in shown.traceback and "File <string>:2\n    y =\n" in shown.traceback, shown.traceback
    assert "nbdist/" not in shown.traceback and "magics/" not in shown.traceback and "run_code" not in shown.traceback
    later = nb.run("exec('x =')")
    assert "run_code" in later.traceback  # an ordinary one as ever


def test_except_catches_the_notebooks_class(nb: Notebook) -> None:
    nb.ok(
        "try:\n    get_ipython().run_cell_magic('distributed', '-n 2', 'raise NotebookError(3)')\n"
        "except NotebookError as e:\n    caught = repr(e), type(e) is NotebookError, e.__notes__"
    )
    assert nb.value("caught") == ("NotebookError(3)", True, ["on ranks 0, 1"])
    nb.ok(
        "try:\n    get_ipython().run_cell_magic('distributed', '-n 2', 'class E(LookupError): pass\\nraise E(1)')\n"
        "except LookupError as e:\n    caught = type(e).__name__, e.args"
    )
    assert nb.value("caught") == ("E", (1,))


def test_a_failed_cell_holds_nothing(nb: Notebook) -> None:
    nb.ok("import weakref, gc\nclass Held: pass\nheld = Held(); ref = weakref.ref(held)")
    nb.fails("held.x = 1\nraise ValueError('after')")
    assert nb.value("held.x") == 1
    nb.ok("del held")
    nb.ok("gc.collect()")
    assert nb.value("ref() is None") is True


def test_timeout(nb: Notebook) -> None:
    cell = nb.fails(
        "import time, torch.distributed as dist\nif rank: dist.barrier()\ntime.sleep(20)",
        "-n 2 --timeout 1",
        timeout=30,
    )
    assert cell.error is not None and cell.error[0] == "CellTimeout"
    for part in ("--timeout of 1 s", "rank 0 is ", "at cell line 4", "rank 1 is in barrier", "at cell line 3"):
        assert part in cell.error[1], cell.error[1]
    assert cell.seconds < 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--gpu 2", ("--gpu", "did you mean --gpus")),
        ("--gpus 8", ("this machine has no GPU", "--cpus 8")),
        ("-n", ("-n: takes a number of ranks",)),
        ("-n 0", ("-n 0", "1 or more")),
        ("-n 2 --ranks 0-5", ("ranks 0 to 1", "no rank 5")),
        ("--output some", ("--output some", "merged, all, rank0, none, tabs")),
        ("--ranks x", ("--ranks x", "0,2-3")),
        ("-n 2 --cpus 2", ("-n and --cpus exclude each other",)),
        ("-n 2 something", ("unexpected 'something'", "-n 4")),
        ("--zzz", ("--zzz: there is no such option", "--timeout", "`%%distributed?`")),
        ("--return a.b", ("--return a.b",)),
    ],
)
def test_wrong_options(nb: Notebook, options: str, told: tuple[str, ...]) -> None:
    cell = nb.fails("never = 1", options)
    assert cell.error is not None
    for part in told:
        assert part in cell.error[1], cell.text
    assert len(cell.traceback.splitlines()) == 1, cell.traceback
    assert nb.value("'never' in globals()") is False


def test_a_text_that_a_class_makes_from_its_arguments_is_not_made_twice(nb: Notebook) -> None:
    nb.ok("class Unreadable(Exception):\n    def __init__(self, path): super().__init__(f'cannot read {path!r}')")
    cell = nb.run("%%distributed -n 2\nraise Unreadable('data.csv')")
    assert cell.error is not None
    assert cell.error[:2] == ("Unreadable", "cannot read 'data.csv'")


def test_a_key_that_is_also_a_name_is_not_explained_away(nb: Notebook) -> None:
    nb.ok("rate, config = 1, {}")
    assert "nbdist did not see" not in nb.run("%%distributed -n 2\nconfig['rate']").text


def test_breakpoint_says_what_to_do(nb: Notebook) -> None:
    assert "a rank has no keyboard" in nb.run("%%distributed -n 2\nbreakpoint()").text


def test_return_of_a_name_that_nobody_has_is_said(nb: Notebook) -> None:
    assert "--return nosuchname" in nb.ok("%%distributed -n 2 --return nosuchname\nmade = 1").stderr


def test_two_threads_do_not_share_ranks_at_once(nb: Notebook) -> None:
    nb.ok("%%distributed -n 2\npass")
    cell = nb.run(
        "import threading, time\n"
        "def go(i): get_ipython().run_cell_magic('distributed', '-n 2', f'import time; time.sleep(2); q{i} = rank')\n"
        "thread = threading.Thread(target=go, args=(1,)); thread.start()\n"
        "while not any(pool.busy for pool in ranks._pool and [ranks._pool()]): time.sleep(0.01)\n"
        "go(2)"
    )
    assert cell.error is not None
    assert cell.error[0] == "RanksBusy"
    nb.ok("thread.join()")
    assert nb.value("q1") == 0


def test_the_classes_of_what_an_exception_carries_stay_as_they_are(nb: Notebook) -> None:
    """Reading it here must not give the notebook's class copies of its methods, nor on the rank."""
    nb.ok("""
class Carried(Exception):
    def bump(self):
        global bumped
        bumped = True
method, carried = Carried.bump, Carried('a')
""")
    nb.fails("raise Carried(carried)")
    assert nb.value("Carried.bump is method")
    nb.ranks("carried.bump()\nours = Carried.bump is method")
    assert nb.value("(bumped, ours)") == (True, True)


CLASSES = """
import nbdist, sys, threading
class Coded(Exception):
    def __init__(self, message, code): super().__init__(message); self.code = code
class Keyed(ValueError):
    def __init__(self, *, code):
        super().__init__(f'code {code}'); self.code = code; self.lock = threading.Lock(); self.more = [1]
held = {'a': 1}
def chained():
    try: raise Keyed(code=3)
    except Keyed as error: raise Coded('outer', 4) from error
"""


def test_except_catches_the_notebooks_own_class(nb: Notebook) -> None:
    nb.ok(CLASSES)
    nb.fails("error = Coded('boom', 9); error.held = held\nraise error")
    assert nb.value("(type(sys.last_value) is Coded, sys.last_value.code, sys.last_value.args)") == (True, 9, ("boom",))
    assert nb.value("(sys.last_value.held is held, sys.last_value is error)") == (True, True)
    assert nb.ranks("print(error.code, error.held is held)").stdout == "9 True\n"  # shown here, it travels on
    shown = nb.fails("if rank == 1: raise Keyed(code=8)")
    assert "left on rank 1: .lock (a lock)" in shown.traceback
    assert nb.value("(type(sys.last_value) is Keyed, sys.last_value.code, sys.last_value.more)") == (True, 8, [1])
    nb.fails("class InCell(Exception):\n    def __init__(self, *, c): self.c = c\nif rank == 1: raise InCell(c=5)")
    assert nb.value("(type(sys.last_value) is InCell, sys.last_value.c)") == (True, 5)


@pytest.mark.parametrize("call", ["nbdist.launch(chained, ranks=2)", "nbdist.notebook_launcher(chained, (), 2)"])
def test_except_catches_what_a_launched_function_raised(nb: Notebook, call: str) -> None:
    nb.ok(CLASSES)
    nb.ok(
        f"try: {call}\nexcept Coded as error: caught = error.code, type(error.__cause__) is Keyed, error.__cause__.code"
    )
    assert nb.value("caught") == (4, True, 3)


def test_a_traceback_has_the_arguments_of_functions_and_a_group_no_frames_of_ours(nb: Notebook) -> None:
    code = "def inner(a, *rest, k=1, **more):\n    return 1 / 0\ninner(2)"
    here, there = nb.run(code), nb.run(f"%%distributed -n 2\n{code}")
    assert "inner(a, k, *rest, **more)" in here.traceback and "inner(a, k, *rest, **more)" in there.traceback
    cell = nb.run("%%distributed -n 2\nraise ExceptionGroup('several', [ValueError(1), KeyError(2)])")
    assert "Exception Group Traceback" in cell.stderr and "| KeyError: 2" in cell.stderr and "line 2, in" in cell.stderr
    assert "distributed.py" not in cell.stderr and "errors.py" not in cell.stderr, cell.stderr
    assert nb.run("1 / 0").error is not None  # the shell is as it was


def test_ranks_in_different_operations_are_told_by_their_cells(nb: Notebook) -> None:
    nb.ok("from nbdist import Accelerator\nimport torch\ndef gathers(a):\n    a.gather(torch.ones(1))")
    cell = nb.run(
        "%%distributed -n 2\na = Accelerator()\nif rank == 0:\n    gathers(a)\nelse:\n    a.wait_for_everyone()"
    )
    assert cell.error is not None
    assert re.search(
        r"rank 0 is in gather \(Cell In\[\d+\], line 4\); rank 1 is in wait_for_everyone \(Cell In\[\d+\], line 6\)",
        cell.error[1],
    ), cell.error[1]


def test_h1_the_error_that_another_rank_only_tells_of_is_not_the_cause(nb: Notebook) -> None:
    """The rank that hears of it is faster here than the one that it happened to."""
    cell = nb.run(
        "%%distributed -n 2\nimport time\nfrom nbdist import PartialState\nstate = PartialState()\ntry:\n"
        "    with state.main_process_first():\n        if rank == 0: raise LookupError('no such file')\n"
        "finally:\n    time.sleep(0.1 * (rank == 0))"
    )
    assert cell.error is not None
    assert cell.error[:2] == ("LookupError", "no such file")
    assert "rank 0 failed first; cut off by that: rank 1" in cell.traceback
