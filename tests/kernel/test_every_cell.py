"""`%distributed on`: cells as they are typed, on ranks; lines, `_`, `In` and errors are those of ordinary cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture
def on(nb: Notebook) -> Iterator[Notebook]:
    assert "on: every following cell runs as under `%%distributed -n 2`" in nb.ok("%distributed on -n 2").stdout
    yield nb
    nb.ok("%distributed off")


def test_a_cell_as_it_is_typed(on: Notebook) -> None:
    cell = on.ok("x = [rank]\nprint('hello', 'ab'[rank])\nworld_size")
    assert cell.stdout == "hello a\n[1] hello b\n"
    assert cell.results[0]["text/plain"] == "2"
    assert on.ok("_ + 40").results[0]["text/plain"] == "42"
    on.ok("last, before = In[-1], In[-2]\ntyped = _i")
    on.ok("%distributed off")
    assert on.value("(x, last, before, typed)") == (
        [0],
        "last, before = In[-1], In[-2]\ntyped = _i",
        "_ + 40",
        "_ + 40",
    )
    assert on.ok("'world_size' in globals()").results[0]["text/plain"] == "False"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("1 / 0", 1),
        ("y = 1\n\n\n1 / 0", 4),
        ("\n\ny = 1\n1 / 0", 4),
        ("    y = 1\n    1 / 0", 2),
        ("%%time\n\ny = 1\n1 / 0", 4),
        ("%%time\n%%distributed -n 2\n\ny = 1\n1 / 0", 5),
        ("\n%%distributed -n 2\n\ny = 1\n1 / 0", 5),
    ],
)
def test_lines_are_those_that_were_typed(on: Notebook, code: str, line: int) -> None:
    shown = on.run(code).traceback
    assert f", line {line}\n" in shown and f"---> {line} " in shown, shown
    assert "%%distributed" not in shown or "%%distributed" in code, shown
    on.ok("y = 5")  # it survives the error, and the cell was on the ranks
    assert "on ranks 0, 1" in shown


def test_magics_around(on: Notebook) -> None:
    cell = on.ok("%%time\nz = world_size + 1\nz")
    assert cell.stdout.count("Wall time") == 1 and cell.results[0]["text/plain"] == "3"
    on.ok("%%capture cap\nprint('captured', world_size)")
    cell = on.ok("%%time\n%%capture cap2\nprint('captured', world_size)")
    assert "captured" not in cell.stdout and cell.stdout.count("Wall time") == 1
    cell = on.ok("%%timeit -n 1 -r 1\nworld_size")
    assert cell.stdout.count("per loop") == 1  # one time stands for all
    cell = on.ok("%time world_size")
    assert cell.results[0]["text/plain"] == "2"
    on.ok("%distributed off")
    for name in ("cap", "cap2"):
        assert on.value(f"{name}.stdout") == "captured 2\n"


def test_what_stays_in_the_notebook(fresh: Notebook) -> None:
    fresh.ok("%distributed on -n 2")
    cell = fresh.ok("!echo shell $$PPID")
    assert f"shell {fresh.pid}" in cell.stdout
    assert "this cell ran in the notebook" in cell.stderr
    cell = fresh.ok("%%bash\necho $PPID")
    assert cell.stdout.strip() == str(fresh.pid) and cell.stderr == "", "said once"
    fresh.ok("%cd /tmp")
    fresh.ok("import os\nhere, pid = os.getcwd(), os.getpid()")
    for quiet in ("# nothing", "%load_ext nbdist", "pid?", "%distributed status"):
        assert fresh.ok(quiet).stderr == ""
    assert "on: every cell runs as under `%%distributed -n 2`" in fresh.ok("%distributed status").stdout
    fresh.ok("%distributed off\nthe_notebooks = os.getpid()")
    assert fresh.value("here") == "/tmp" and fresh.value("pid != the_notebooks") is True
    assert fresh.value("the_notebooks") == fresh.pid


def test_a_syntax_error_is_ipythons_own(on: Notebook) -> None:
    cell = on.run("x = = 3")
    assert cell.error is not None and cell.error[0] == "SyntaxError" and "line 1" in cell.traceback


def test_another_number_for_one_cell(on: Notebook) -> None:
    assert on.ranks("world_size", "-n 1").results[0]["text/plain"] == "1"
    assert on.ok("world_size").results[0]["text/plain"] == "2"


def test_await_and_stop(on: Notebook) -> None:
    assert on.ok("import asyncio\nawait asyncio.sleep(0, world_size)").results[0]["text/plain"] == "2"
    cell = on.run("import time\nfor i in range(1000): time.sleep(0.05)", stop_after=0.5)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert cell.stop_seconds is not None and cell.stop_seconds < 2
    assert on.ok("world_size").results[0]["text/plain"] == "2"


def test_what_frontends_run_by_themselves_stays_here(on: Notebook) -> None:
    message = on.client.execute("__import__('os').environ['SEEN'] = str('world_size' in globals())", silent=True)
    on.wait(message)
    on.ok("%distributed off")
    assert on.value("__import__('os').environ['SEEN']") == "False"


def test_what_a_cell_runs_itself_is_not_distributed_again(nb: Notebook) -> None:
    nb.ok("%distributed on -n 2")
    nb.ok(
        "%distributed off\nget_ipython().run_line_magic('distributed', 'on -n 2')\nget_ipython().run_cell('inner = 1')"
    )
    nb.ok("%distributed off")
    assert nb.value("(inner, 'world_size' in globals())") == (1, False)


@pytest.mark.parametrize(
    ("line", "told"),
    [("on --gpu 3", "did you mean --gpus"), ("on --fresh", "%distributed restart"), ("onn", "did you mean on")],
)
def test_wrong_options(nb: Notebook, line: str, told: str) -> None:
    cell = nb.run(f"%distributed {line}")
    assert cell.error is not None and told in cell.error[1]
    assert nb.ok("'world_size' in globals()").results[0]["text/plain"] == "False", "it is not on"


def test_off_twice_and_unloading(fresh: Notebook) -> None:
    assert "as before" in fresh.ok("%distributed off").stdout
    fresh.ok("%distributed on -n 2")
    fresh.ok("%unload_ext nbdist")
    assert fresh.ok("'world_size' in globals()").results[0]["text/plain"] == "False"
