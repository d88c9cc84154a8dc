"""`%debug` after a cell that failed on the ranks, `%pdb on`, and what asks for a keyboard."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

FAILS = """%%distributed -n 2
def inner(a, b):
    c = a + b
    return c / 0

def outer(x):
    y = [x] * 3
    return inner(x, 2)

if rank == 1:
    outer(5)
import time; time.sleep(20)"""


def test_the_frames_of_the_rank_that_failed_first(nb: Notebook) -> None:
    nb.run(FAILS)
    shown, left = nb.converse(
        "%debug",
        [
            *("w", "p c", "u", "pp y", "d", "l", "ll", "args", "a", "p a + b", "!c = 10", "p c + 1"),
            *("print('said', a)", "nonsense", "import math", "p math.pi", "h", "rank 0", "p rank", "rank 7", "q"),
        ],
    )
    assert left == 0, shown
    asked = shown.split("rank 1> ")
    assert asked[0].startswith("rank 1 as it was") and "inner()" in asked[0] and "-> return c / 0" in asked[0], shown
    assert "outer()" in asked[1] and "(11)<module>()" in asked[1]
    assert asked[2] == "7\n" and "outer()" in asked[3] and asked[4] == "[5, 5, 5]\n" and "inner()" in asked[5]
    assert "  4  ->" in asked[6] and "%%distributed" in asked[6] and "  4  ->" in asked[7]
    assert asked[8] == asked[9] == "a = 5\nb = 2\n" and asked[10] == "7\n" and asked[12] == "11\n"
    assert asked[13] == "said 5\n" and "NameError" in asked[14] and asked[16].startswith("3.14")
    assert "rank N" in asked[17]
    other = asked[18].split("rank 0> ")
    assert "time.sleep(20)" in other[0] and other[1] == "0\n" and "no rank 7" in other[2], shown


def test_it_can_be_opened_again_and_left(nb: Notebook) -> None:
    nb.run(FAILS)
    for leave in ("q", "c", "exit"):
        shown, left = nb.converse("%debug", ["p a", leave])
        assert left == 0 and "rank 1> 5\n" in shown, shown
    assert nb.ranks("rank").results[0]["text/plain"] == "0"


def test_stop_ends_a_command(nb: Notebook) -> None:
    nb.run(FAILS)
    shown, left = nb.converse("%debug", [("while True: pass", 0.5), ("__import__('time').sleep(50)", 0.5), "p a", "q"])
    assert left == 0 and shown.count("KeyboardInterrupt") == 2 and shown.endswith("5\nrank 1> "), shown
    assert "new ranks" not in nb.ranks("1").stderr


def test_a_command_that_cannot_be_stopped_ends_its_rank(nb: Notebook) -> None:
    nb.run("%%distributed -n 2\nimport torch.distributed as dist\n1 / 0")
    shown, _ = nb.converse("%debug", [("dist.barrier()", 0.5), "q"])
    assert "could not be interrupted" in shown and "the next cell starts new ranks" in shown
    assert "new ranks" in nb.ranks("1").stderr


def test_a_frontend_without_a_keyboard_gets_the_stack(nb: Notebook) -> None:
    nb.run(FAILS)
    shown = nb.ok("%debug").stdout
    assert "no keyboard for %debug" in shown and "outer()" in shown and "a = 5" in shown


def test_after_stop(nb: Notebook) -> None:
    nb.run("%%distributed -n 2\nimport time\nfor i in range(1000):\n    time.sleep(0.05)", stop_after=0.6)
    shown, left = nb.converse("%debug", ["p 'i', i > 3, i < 1000", "q"])
    assert left == 0 and "('i', True, True)" in shown and "interrupts.py" not in shown, shown


def test_frames_that_are_gone(nb: Notebook) -> None:
    nb.run(FAILS)
    nb.ranks("1")
    cell = nb.ok("%debug")
    assert "another cell has run on these ranks since" in cell.stderr and "%tb" in cell.stderr
    assert "return c / 0" in nb.run("%tb").traceback
    nb.run(FAILS)
    nb.ok("%distributed stop")
    assert "have ended, and their frames with them" in nb.ok("%debug").stderr


def test_a_rank_that_died(nb: Notebook) -> None:
    nb.run("%%distributed -n 2\nmine = rank + 70\nimport os, time\nif rank == 1: os._exit(3)\ntime.sleep(20)")
    shown, left = nb.converse("%debug", ["p mine", "rank 1", "q"])
    assert (
        left == 0 and "rank 1 ended, and its frames with it" in shown and "rank 0> 70\n" in shown.replace("\n70", "70")
    ), shown


def test_an_ordinary_error_is_ipythons(nb: Notebook) -> None:
    nb.run(FAILS)
    nb.run("def here():\n    mine = 33\n    1 / 0\nhere()")
    shown, left = nb.converse("%debug", ["p mine", "q"])
    assert left == 0 and "33" in shown and "ipdb> " in shown, shown


def test_pdb_on(nb: Notebook) -> None:
    nb.ok("%pdb on")
    shown, left = nb.converse("%%distributed -n 2\nmine = 12\n1 / 0", ["p mine", "q"])
    assert left == 0 and "ZeroDivisionError" in shown and "12\n" in shown, shown
    nb.ok("%pdb off")


def test_the_last_error_is_known(nb: Notebook) -> None:
    nb.run("%%distributed -n 2\nraise ValueError('boom')")
    assert nb.ok("import sys; print(repr(sys.last_value))").stdout == "ValueError('boom')\n"
    again = nb.run("%tb")
    assert "----> 2 raise ValueError('boom')" in again.traceback and "on ranks 0, 1" in again.traceback


@pytest.mark.parametrize(
    ("code", "kind", "what", "line"),
    [
        ("name = input('your name? ')", "EOFError", "input() in line 2: a rank has no keyboard", 2),
        ("import getpass\ngetpass.getpass()", "EOFError", "getpass() in line 3", 3),
        ("breakpoint()", "RuntimeError", "breakpoint() in line 2", 2),
        ("import pdb\npdb.set_trace()", "RuntimeError", "pdb.set_trace() in line 3", 3),
        ("import sys\nsys.stdin.readline()", "EOFError", "a rank has no keyboard", 3),
    ],
)
def test_what_asks_for_a_keyboard(nb: Notebook, code: str, kind: str, what: str, line: int) -> None:
    cell = nb.fails(code)
    assert cell.error is not None and cell.error[0] == kind and what in cell.error[1]
    assert "ordinary cell" in cell.error[1]
    assert cell.stdout == cell.stderr == "", "no question without an answer"
    assert f"---> {line} " in cell.traceback and "on ranks 0, 1" in cell.traceback
    assert "keyboard.py" not in cell.traceback
