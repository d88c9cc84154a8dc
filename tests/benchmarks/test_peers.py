"""The comparison with the peers: its arithmetic and words, and its driver with nbdist alone. No peer is needed here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import report, rows, run
from benchmarks.peers.kernel import Kernel, Shown
from benchmarks.peers.tools import TOOLS, Nbdist, Tool

BY_NAME = {tool.name: tool for tool in TOOLS}
FIGURES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50)


def record(tool: str, row: str, seconds: float | None, ok: bool = True, words: str = "", **more: Any) -> dict[str, Any]:
    return {"round": 0, "tool": tool, "row": row, "ok": ok, "seconds": seconds, "words": words} | more


def said(records: list[dict[str, Any]], tool: str, row: str) -> str:
    return report.cell(records, BY_NAME[tool], row, "nbdist")


@given(FIGURES, st.floats(0, 1))
def test_quantiles_are_those_of_numpy(figures: list[float], share: float) -> None:
    assert report.quantile(figures, share) == pytest.approx(numpy.quantile(figures, share), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00123, "1.2 ms"), (0.00996, "10 ms"), (0.0421, "42 ms"), (0.9, "900 ms"), (0.996, "1.0 s"), (33.4, "33 s")],
)
def test_times_are_written_as_one_reads_them(value: float, text: str) -> None:
    assert report.seconds(value) == text


def test_a_figure_has_its_spread_and_its_ratio() -> None:
    records = [record("nbdist", "simple", s) for s in (0.010, 0.012, 0.011)]
    records += [record("ipyparallel", "simple", s) for s in (0.020, 0.022, 0.024)]
    assert said(records, "nbdist", "simple") == "11 ms (10 ms to 12 ms)"
    assert said(records, "ipyparallel", "simple") == "22 ms (20 ms to 24 ms), 2.0 x"
    assert said(records, "torchrunx", "simple") == "not measured"


def test_what_a_tool_cannot_do_is_said_in_its_words() -> None:
    records = [record("nbdist", "capture", 0.1), record("nbdist", "stop loop", 0.02, usable=True)]
    records.append(record("nbdistributed", "capture", 0.1, ok=False, words="NameError: name 'big' | is not defined"))
    assert said(records, "nbdistributed", "capture") == "no: NameError: name 'big' / is not defined"
    records.append(record("torchrunx", "stop loop", None, ok=False, words="never: still running after 35 s"))
    assert said(records, "torchrunx", "stop loop") == "never: still running after 35 s"
    records.append(record("ipyparallel", "stop loop", 0.01, usable=False, words="still running after 60 s"))
    assert said(records, "ipyparallel", "stop loop").startswith("back after 10 ms, but the next cell fails: still")
    records.append(record("ipyparallel", "stop loop", 0.02, usable=True))
    assert "ranks and state kept; 1 of 2: back after" in said(records, "ipyparallel", "stop loop")


def test_a_stop_after_which_nothing_works_is_no_figure() -> None:
    records = [record("ipyparallel", "stop loop", 0.01, usable=False), record("nbdist", "stop loop", 1.0, usable=True)]
    assert report.times(records, "ipyparallel", "stop loop") == []
    assert report.times(records, "nbdist", "stop loop") == [1.0]


def test_what_is_not_the_same_thing_gets_no_ratio() -> None:
    records = [record("nbdist", "capture", 0.1), record("jupyter-distributed", "capture", 0.01)]
    assert said(records, "jupyter-distributed", "capture") == "10 ms; no notebook but the ranks: each made its own"


def test_orphans_are_counted() -> None:
    records = [record("nbdist", "orphans", 0.4, left=0, cpu=0), record("torchrunx", "orphans", 3.0, left=2, cpu=99)]
    assert said(records, "nbdist", "orphans") == "none, after 400 ms at most"
    assert said(records, "torchrunx", "orphans") == "2, still computing"


def _result() -> dict[str, Any]:
    versions = {tool.name: {"tool": "1", "torch": "2", "ipykernel": "7", "python": "3"} for tool in TOOLS}
    about = {"date": "2026-01-01", "cpu": "c", "cores": 2, "memory_gib": 8, "system": "s", "versions": versions}
    records = []
    for tool in TOOLS:
        for row in rows.TITLES:
            more = {"left": 0, "cpu": 0} if row == "orphans" else {"usable": True} if row.startswith("stop") else {}
            ok = not (tool.name == "accelerate" and row == "return")
            records.append(record(tool.name, row, 0.1, ok, "" if ok else "nothing comes home", **more))
    return {"about": about | {"loads": [1.5, 2]}, "records": records}


def test_the_page_has_every_row_and_tool_and_says_the_load() -> None:
    page = report.table(_result())
    body = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(body) == 1 + len(rows.TITLES) - len(report.HIDDEN)
    assert {line.count(" | ") for line in body} == {len(TOOLS)}
    assert "load average 1.5, 2 " in page and "no: nothing comes home" in page
    assert all(tool.setting in page for tool in TOOLS)


def test_the_plot_is_a_small_picture(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    report.plot(_result(), file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 80_000


def test_words_of_the_plot() -> None:
    assert report._word("never: still running after 35 s", "stop loop") == "never"
    assert report._word("still running after 35 s", "stop loop") == "ranks are lost"
    assert report._word("it did not begin: RuntimeError", "stop loop") == report._word("", "cold") == "not measured"
    assert report._word("NameError: name 'y' is not defined", "return") == "cannot"


def _python(cell: str) -> str:
    """A cell without its magics."""
    lines = cell.splitlines()
    return "\n".join(line for line in lines if not line.startswith("%"))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_cell_is_python(tool: Tool) -> None:
    cells = [*tool.start(), *tool.first(), *tool.on_ranks(rows.busy("/tmp", rows.STOPS["stop collective"][1]))]
    for row in rows.ROWS:
        made = row.cells(tool, 3)
        cells += [*made.before, *made.timed, *made.check]
    assert len(cells) > 8
    for cell in cells:
        compile(_python(cell), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_a_printed_error_is_a_failure_and_so_is_no_end() -> None:
    assert Shown(1.0, True, "Error on Rank 0: NameError: name 'x' is not defined").failed
    assert Shown(20.0, False).words == "still running after 20 s"
    assert not Shown(1.0, True, "3").failed


def test_what_was_seen_instead_is_told() -> None:
    assert run._telling("y is 1\nNameError: y\nout", "y is 3") == "NameError: y"
    assert run._telling("mode off\ny is 0\nmode on", "y is 3") == "y is 0"
    assert run._telling("mode on", "y is 3") == "nothing shown"


@pytest.mark.kernel
def test_a_limit_is_a_result_and_nothing_is_left() -> None:
    kernel = Kernel(sys.executable)
    try:
        assert kernel.run("1 + 1").text == "2\n"
        assert kernel.run("print(undefined)").words == "NameError: name 'undefined' is not defined"
        shown = kernel.run("import time; time.sleep(60)", limit=0.5)
        assert shown.failed and not shown.finished
        kernel.press_stop()
        while kernel.run("1").failed:  # what is sent before the error is handled is passed over
            pass
        assert not kernel.run("import pathlib, subprocess; subprocess.Popen(['sleep', '60'])").failed
        assert len(kernel.alive()) == 2
        began = Path(kernel.folder) / "began"
        stopped = kernel.run("pathlib.Path('began').touch(); time.sleep(60)", 20, began.exists)
        assert stopped.error.startswith("KeyboardInterrupt") and stopped.stop_seconds is not None
    finally:
        kernel.close()
    assert kernel.alive() == [] and not Path(kernel.folder).exists()


@pytest.mark.kernel
@pytest.mark.ranks
def test_one_round_of_nbdist() -> None:
    tool = Nbdist()
    bench = run.Bench([tool], repetitions=1, say=lambda line: None, python=lambda name: sys.executable)
    bench.one_round(["warm", "stop", "orphans"])
    assert {r["row"] for r in bench.records} == {key for key in rows.TITLES if key != "plain px"}
    assert [r for r in bench.records if not r["ok"]] == []
    assert all(r["usable"] for r in bench.records if r["row"].startswith("stop"))
    assert [r["copy"] for r in bench.records if r["row"] == "model"] == [False]
    assert bench.live == {}
