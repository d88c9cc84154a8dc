"""The user's own modules: ranks hold the notebook's version: by hand, by `%autoreload`, and after edits."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

Edit = Callable[..., None]
CLASS = "import {inner}\nclass C:\n    def who(self): return {v}\ndef f(): return {v}, {inner}.V\nV = {v}\n"
SEE = (
    "def see(): return [{m}.V, f(), c.who(), C().who(), isinstance(c, {m}.C), isinstance(C(), C), C is {m}.C, "
    "isinstance({m}.C(), C), c.extra() if hasattr(c, 'extra') else None]"
)


@pytest.fixture
def edit(nb: Notebook, tmp_path: Path) -> Edit:
    """Writes modules into a folder of their own, each write a second later than the one before."""
    nb.ok(f"import sys, importlib\nsys.path.insert(0, {str(tmp_path)!r})")
    later = itertools.count(int(time.time()) - 1000)

    def write(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path / f"{name}.py"
            path.write_text(text)
            os.utime(path, (when := next(later), when))

    return write


def same(nb: Notebook, expression: str) -> object:
    """Evaluated on the ranks first, as a user would after an edit, then in the notebook: the same everywhere."""
    nb.ranks(f"_there = {expression}")
    there = nb.value("list(ranks['_there'])")
    nb.ok(f"_here = {expression}")  # where %autoreload would reload, if it had not
    assert there == [nb.value("_here")] * 2
    return there[0]


@pytest.mark.parametrize("mode", ["1", "2", "3"])
def test_autoreload(nb: Notebook, edit: Edit, mode: str) -> None:
    m, inner = f"auto{mode}", f"autoinner{mode}"
    edit(**{m: CLASS.format(v=1, inner=inner), inner: "V = 1\n"})
    nb.ok("%load_ext autoreload\n%autoreload 0")
    nb.ok(f"%autoreload {mode}")
    if mode == "1":
        nb.ok(f"%aimport {m}, {inner}")
    nb.ok(f"import {m}\nfrom {m} import f, C\nc = C()\n" + SEE.format(m=m))
    assert same(nb, "see()")[:3] == [1, (1, 1), 1]  # type: ignore[index]
    edit(**{m: CLASS.format(v=22, inner=inner)})
    assert same(nb, "see()")[:4] == [22, (22, 1), 22, 22]  # type: ignore[index]
    edit(**{inner: "V = 333\n"})  # which no name of the notebook refers to
    assert same(nb, "see()")[1] == (22, 333)  # type: ignore[index]
    edit(**{m: "x = = 3\n"})
    cell = nb.ranks("broken = see()")
    assert f"autoreload of {m} failed" in cell.stderr
    assert nb.value("broken")[1] == (22, 333), "what the notebook runs goes on"
    text = CLASS.format(v=4444, inner=inner).replace(
        "class C:", "class B: pass\nclass C(B):\n    def extra(self): return 7"
    )
    edit(**{m: text})  # mended; it cannot be patched any more, and is loaded anew
    assert same(nb, "see()")[:4] == [4444, (4444, 333), 4444, 4444]  # type: ignore[index]
    assert "importlib.reload" not in nb.ranks("see()").stderr
    nb.ok("%autoreload 0")


def test_without_autoreload_a_note_says_it_once(nb: Notebook, edit: Edit) -> None:
    edit(noted="V = 1\n")
    nb.ok("import noted")
    assert nb.ranks("noted.V").results[0]["text/plain"] == "1"
    edit(noted="V = 22\n")
    cell = nb.ranks("noted.V")
    assert cell.results[0]["text/plain"] == "1"
    assert "noted was edited after the notebook had imported it" in cell.stderr
    assert "importlib.reload(noted)" in cell.stderr and "%autoreload 2" in cell.stderr
    assert nb.ranks("noted.V").stderr == ""
    edit(noted="V = 333\n")
    assert "noted was edited" in nb.ranks("noted.V").stderr
    nb.ok("importlib.reload(noted)")
    cell = nb.ranks("noted.V")
    assert cell.results[0]["text/plain"] == "333" and cell.stderr == ""


def test_edited_between_the_import_here_and_there(nb: Notebook, edit: Edit) -> None:
    edit(early="from earlyinner import V\ndef where(): return V\n", earlyinner="V = 1\n")
    nb.ok("import early")
    edit(early="V = = 2\n", earlyinner="raise RuntimeError('half written')\n")
    cell = nb.ranks("import inspect\nseen = early.where(), inspect.getsource(early.where)")
    assert nb.value("seen") == (1, "def where(): return V\n")
    assert "early" in cell.stderr and "earlyinner" in cell.stderr
    for name in ("early", "earlyinner"):
        nb.ok(f"import os; os.remove(sys.modules['{name}'].__file__)")
    cell = nb.ranks("early.where()", "-n 1")  # new ranks, and no file any more
    assert cell.results[0]["text/plain"] == "1"


def test_a_package(nb: Notebook, edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    edit(**{"pack/__init__": "from . import part\n", "pack/part": "V = 1\n"})
    nb.ok("import pack")
    edit(**{"pack/part": "V = 22\n"})
    assert nb.ranks("pack.part.V").results[0]["text/plain"] == "1"
    nb.ok("importlib.reload(pack.part)")
    assert nb.ranks("pack.part.V").results[0]["text/plain"] == "22"


def test_what_others_import_from_is_reloaded_first(nb: Notebook, edit: Edit) -> None:
    edit(user="from usedby import V\n", usedby="V = 1\n")
    nb.ok("import user, usedby")
    nb.ranks("user.V")
    edit(user="from usedby import V\nW = 1\n", usedby="V = 22\n")
    nb.ok("importlib.reload(usedby)\nimportlib.reload(user)")
    assert same(nb, "(user.V, user.W, usedby.V)") == (22, 1, 22)


def test_a_module_that_fails_on_a_rank_blocks_nothing(nb: Notebook, edit: Edit) -> None:
    edit(onone="V = 1\n")
    nb.ok("import onone")
    nb.ranks("onone.V")
    edit(onone="import os\nV = 22\nif os.environ.get('RANK') == '1':\n    raise OSError('not here')\n")
    nb.ok("importlib.reload(onone)")
    cell = nb.ranks("v = onone.V")
    assert "rank 1: onone was not reloaded: OSError: not here (onone.py, line 4)" in cell.stderr
    assert "the version from before stays in use" in cell.stderr and "rank 0: onone" not in cell.stderr
    assert nb.value("list(ranks['v'])") == [22, 1]
    assert nb.ranks("v = onone.V").stderr == "", "said once"
    edit(onone="V = 333\n")
    nb.ok("importlib.reload(onone)")
    cell = nb.ranks("v = onone.V")
    assert nb.value("list(ranks['v'])") == [333, 333] and cell.stderr == ""


def test_a_reload_that_failed_here_changes_nothing_there(nb: Notebook, edit: Edit) -> None:
    edit(failing="V = 1\n")
    nb.ok("import failing")
    nb.ranks("failing.V")
    edit(failing="V = = 2\n")
    assert nb.run("importlib.reload(failing)").error is not None
    assert nb.ranks("failing.V").results[0]["text/plain"] == "1"
    edit(failing="V = 22\n")
    nb.ok("importlib.reload(failing)")
    assert nb.ranks("failing.V").results[0]["text/plain"] == "22"


def test_imported_on_the_ranks_first(nb: Notebook, edit: Edit) -> None:
    edit(there="V = 1\n")
    assert nb.ranks("import there\nthere.V").results[0]["text/plain"] == "1"
    edit(there="V = 22\n")
    nb.ok("importlib.reload(there)")
    assert nb.ranks("there.V").results[0]["text/plain"] == "22"
    edit(alone="V = 1\n")
    nb.ranks("import alone", "-n 2 --no-return")
    edit(alone="V = 22\n")
    nb.ok("import alone")
    assert nb.ranks("alone.V").results[0]["text/plain"] == "22", "the notebook's"
