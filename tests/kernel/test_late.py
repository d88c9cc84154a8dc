"""What a cell's threads write later lands under that cell, whatever runs by then."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.test_display import update

BEGIN = """%%distributed -n 2 {options}
from IPython.display import HTML, display
gates = {{name: threading.Event() for name in ("distributed", "ordinary", "idle")}}
def later():
    for name, gate in gates.items():
        gate.wait()
        print(name, "ab"[rank], "is late")
        print("equal", file=sys.stderr)
        display(HTML(name))
threading.Thread(target=later).start()
print("in time")
"""


@pytest.fixture(autouse=True)
def _imports(nb: Notebook) -> None:
    nb.ok("import sys, threading, time")


def late_of_three(nb: Notebook, options: str = "") -> str:
    """A cell whose threads print while a distributed cell runs, while an ordinary one does, and between cells."""
    nb.late.clear()
    first = nb.start(BEGIN.format(options=options))
    assert "in time" in nb.wait(first).text
    other = nb.ranks("gates['distributed'].set()\ntime.sleep(.6)\nprint('other')")
    assert (other.stdout, other.stderr, other.data) == ("other\n", "", [])
    nb.ranks("threading.Timer(.2, gates['ordinary'].set).start()\nthreading.Timer(1.4, gates['idle'].set).start()")
    ordinary = nb.ok("print('here')\ntime.sleep(.9)\nprint('here')")
    assert (ordinary.stdout, ordinary.stderr, ordinary.data) == ("here\nhere\n", "", [])
    return first


def test_each_under_its_own_cell(nb: Notebook) -> None:
    first = late_of_three(nb)
    late = nb.late_output(first, 30, lambda cell: cell.stdout.count("is late") == 6 and len(cell.data) == 3)
    names = ("distributed", "ordinary", "idle")
    assert late.stdout == "".join(f"{name} a is late\n[1] {name} b is late\n" for name in names)
    assert late.stderr == "equal\n" * 3 and [data["text/html"] for data in late.data] == list(names)
    assert set(nb.late) == {first}


def test_in_its_tabs(nb: Notebook) -> None:
    first = late_of_three(nb, "--output tabs")
    last = ("idle a is late", "idle b is late")
    late = update(nb.late_output(first, 30, lambda cell: all(line in str(cell.data[-1:]) for line in last)))
    assert {kind for kind, _, _ in late} == {"update_display_data"} and len({name for _, _, name in late}) == 1
    for rank, me in enumerate("ab"):
        tab = late[-1][1].split("\n\n")[rank]
        lines = [line for line in tab.splitlines() if "late" in line]
        assert lines == [f"{name} {me} is late" for name in ("distributed", "ordinary", "idle")]
    assert set(nb.late) == {first}


def test_several_cells_at_once_after_an_error_and_after_stop(nb: Notebook) -> None:
    nb.late.clear()
    speak = (
        "threading.Thread(target=lambda: (go.wait(), time.sleep({wait}), print('of {name}')), daemon=True).start()\n"
    )
    nb.ranks("go = threading.Event()")
    fine, failed, stopped = (
        f"%%distributed -n 2\n{speak.format(name=name, wait=wait)}{rest}"
        for name, wait, rest in (("fine", 0.1, ""), ("failed", 0.2, "1 / 0"), ("stopped", 0.3, "time.sleep(60)"))
    )
    ids = [nb.start(fine)]
    nb.wait(ids[-1])
    ids.append(nb.start(failed))
    assert nb.wait(ids[-1]).error is not None
    ids.append(nb.start(stopped))
    cell = nb.wait(ids[-1], stop_after=1.0)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    last = nb.ranks("go.set()\ntime.sleep(.8)")
    assert last.text == ""
    nb.late_output(ids[2], 30, lambda cell: cell.stdout != "")
    assert {name: nb.late[name].stdout for name in ids} == dict(
        zip(ids, ("of fine\n", "of failed\n", "of stopped\n"), strict=True)
    )


def test_work_for_a_pool_of_an_earlier_cell_is_this_cells(nb: Notebook) -> None:
    nb.ranks(
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\npool.submit(int).result()"
    )
    assert nb.ranks("pool.submit(print, 'of this cell').result()\npool.shutdown()").stdout == "of this cell\n"


def test_a_late_flood_does_not_hold_up_the_next_cell(nb: Notebook) -> None:
    nb.ranks(
        "flood = threading.Event()\ndef much():\n    while not flood.is_set():\n        print('x' * 60)\n"
        "threading.Thread(target=much, daemon=True).start()"
    )
    try:
        assert nb.ranks("print('other')").stdout == "other\n"
        cell = nb.run("%%distributed -n 2\ntime.sleep(60)", stop_after=0.5)
        assert cell.error is not None and cell.error[0] == "KeyboardInterrupt" and (cell.stop_seconds or 99) < 10
    finally:
        nb.run("%%distributed -n 2\nflood.set()")
