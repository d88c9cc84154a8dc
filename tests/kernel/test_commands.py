"""`%distributed status | stop | restart | pull | resync`, help, and loading and unloading."""

from __future__ import annotations

import re

import pytest

from tests.kernel.notebook import Notebook, wait_gone

pytestmark = pytest.mark.kernel


def error_of(nb: Notebook, code: str) -> tuple[str, str]:
    cell = nb.run(code)
    assert cell.error is not None, cell.text
    assert len(cell.traceback.splitlines()) == 1, cell.traceback
    return cell.error[0], cell.error[1]


def pids(nb: Notebook) -> list[int]:
    """Of the ranks, as %distributed status tells them."""
    return [int(pid) for pid in re.findall(r"rank \d+  pid (\d+)", nb.ok("%distributed status").stdout)]


def test_without_ranks(fresh: Notebook) -> None:
    assert fresh.ok("%distributed status").stdout == "no ranks: a %%distributed cell starts them\n"
    assert fresh.ok("%distributed stop").stdout == "no ranks are running\n"
    for code in ("%distributed restart", "%distributed pull x", "%distributed resync"):
        kind, text = error_of(fresh, code)
        assert kind == "NotOnTheRanks" and "%%distributed cell starts them" in text
    assert "no ranks" in fresh.ok("ranks").text
    cell = fresh.run("ranks['x']")
    assert cell.error is not None and cell.error[0] == "NotOnTheRanks"


def test_status(nb: Notebook) -> None:
    nb.ranks("gen = (i for i in range(3))")
    shown = nb.ok("%distributed status").stdout
    assert re.search(r"^2 ranks on the CPU \(used last\): \d+ cells? run, idle for \d+ s$", shown, re.M), shown
    assert len(re.findall(r"^  rank [01]  pid \d+  ready  \d+ MiB of its own", shown, re.M)) == 2, shown
    assert "only on the ranks: gen" in shown


def test_restart_and_stop(nb: Notebook) -> None:
    nb.ok("kept = [1]")
    nb.ranks("held = (i for i in range(3))\nkept.append(2)")
    old = pids(nb)
    shown = nb.ok("%distributed restart").stdout
    assert "restarted: 2 ranks on the CPU" in shown and "held" in shown
    new = pids(nb)
    assert len(new) == 2 and not set(new) & set(old)
    nb.ranks("kept.append(3)")
    assert nb.value("kept") == [1, 2, 3] and pids(nb) == new
    below = [process for process in nb.processes() if process.pid in new]
    assert "ended: 2 ranks on the CPU" in nb.ok("%distributed stop").stdout
    assert wait_gone(below, 2.0) == []
    assert nb.ok("%distributed status").stdout.startswith("no ranks")
    nb.ranks("kept.append(4)")
    assert nb.value("kept") == [1, 2, 3, 4]


def test_pull(nb: Notebook) -> None:
    nb.ok("pulled = [1]")
    nb.ranks("gen2 = (i for i in range(3))\npulled.append(2)\nunseen = 5", "-n 2 --no-return")
    assert nb.value("pulled") == [1]
    nb.ok("%distributed pull unseen")
    assert nb.value("unseen") == 5
    nb.ranks("gen2 = (i for i in range(3))")
    assert "gen2 cannot come home" in nb.ok("%distributed pull gen2").stdout
    kind, text = error_of(nb, "%distributed pull no_such")
    assert kind == "NameError" and "'no_such'" in text
    assert "takes one name" in error_of(nb, "%distributed pull a b")[1]
    assert "takes one name" in error_of(nb, "%distributed pull")[1]


def test_resync(nb: Notebook) -> None:
    nb.ranks(
        "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.weight.data.fill_(rank)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)\nmodel(torch.ones(1)).sum().backward()\n"
        "opt.step()\nstep = 10 + rank\nw = torch.full((3,), float(rank))"
    )
    assert nb.value("len(set(ranks['step']))") == 2
    shown = nb.ok("%distributed resync").stdout
    assert "rank 0's values are on every rank now" in shown and "model" in shown and "step" in shown
    nb.ranks("seen = (model.weight.item(), step, w.tolist())")
    assert nb.value("len(set(map(repr, ranks['seen'])))") == 1
    assert nb.value("seen == (model.weight.item(), 10, [0., 0., 0.])")


def test_unknown_command(nb: Notebook) -> None:
    kind, text = error_of(nb, "%distributed restrat")
    assert kind == "OptionError" and "did you mean restart" in text
    assert "status, stop, restart, pull, resync" in error_of(nb, "%distributed")[1]
    assert "%distributed -n: takes one of" in error_of(nb, "%distributed -n 2")[1]


def test_help(nb: Notebook) -> None:
    for code in ("%%distributed?", "?%%distributed", "%distributed?"):
        cell = nb.ok(code)
        page = "".join(part["data"]["text/plain"] for part in cell.payload if part.get("source") == "page")
        assert "--timeout S" in page or "resync" in page, page


def test_loading_twice(nb: Notebook) -> None:
    nb.ranks("mine = rank")
    before = pids(nb)
    nb.ok("%load_ext nbdist")
    assert pids(nb) == before
    nb.ok("%reload_ext nbdist")
    nb.ranks("mine = rank + 1")
    assert nb.value("list(ranks['mine'])") == [1, 2]


def test_unloading_ends_everything(fresh: Notebook) -> None:
    fresh.ranks("x = rank\nimport subprocess\n_child = subprocess.Popen(['sleep', '100'])")
    fresh.ranks("y = rank", "-n 3")
    below = fresh.processes()
    assert len(below) >= 6
    fresh.ok("%unload_ext nbdist")
    assert wait_gone(below, 5.0) == []
    assert fresh.value("('ranks' in globals(), x)") == (False, 0)
    cell = fresh.run("%%distributed -n 2\n1")
    assert "distributed" in cell.text and "not found" in cell.text
    fresh.ok("%load_ext nbdist")
    fresh.ranks("x += 5")
    assert fresh.value("x") == 5


def test_the_notebooks_own_name_ranks_is_left(fresh: Notebook) -> None:
    fresh.ok("ranks = 'mine'\n%reload_ext nbdist")
    fresh.ranks("seen = ranks")
    assert fresh.value("(ranks, seen)") == ("mine", "mine")


def test_torch_is_not_imported_in_the_kernel(fresh: Notebook) -> None:
    fresh.ranks("import os\nplain = [rank]")
    assert fresh.value("('torch' in __import__('sys').modules, plain)") == (False, [0])
