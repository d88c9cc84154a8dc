"""Modules: by name, with their submodules; edited ones are loaded again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nbdist.shipping import CannotShip

from .peers import Notebook


def test_edited_module_is_loaded_again_on_the_ranks(
    nb: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for remote in nb.remotes:
        remote.ask("execute", f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    file = tmp_path / "edited_by_test.py"
    file.write_text("V=1\ndef f(): return V\n")
    nb.here("import edited_by_test\nfrom edited_by_test import f as ef")
    nb.cell("r=(edited_by_test.V, ef())")
    assert nb["r"] == (1, 1)
    file.write_text("V=2222\ndef f(): return V\n")
    nb.cell("r=(edited_by_test.V, ef())")
    assert nb["r"] == (1, 1), "the notebook still runs what it has loaded"
    nb.here("import importlib; importlib.reload(edited_by_test)\nfrom edited_by_test import f as ef")
    nb.cell("r=(edited_by_test.V, ef())")
    assert nb["r"] == (2222, 2222)
    del sys.modules["edited_by_test"]


def test_submodules_that_the_notebook_has_imported(nb: Notebook) -> None:
    nb.here("import xml.dom.minidom, concurrent.futures")
    nb.cell("r=(xml.dom.minidom.Document().nodeName, concurrent.futures.ThreadPoolExecutor.__name__)")
    assert nb["r"] == ("#document", "ThreadPoolExecutor")


def test_module_without_a_file_is_refused_by_name(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    module = types.ModuleType("made_by_hand")
    exec("v=1\ndef f(): return v", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    nb.ns.update(made_by_hand=module, g=module.f)
    for name in ("made_by_hand", "g"):
        with pytest.raises(CannotShip, match="'made_by_hand', which has no file"):
            nb.cell(name)


def test_streams_are_the_ranks_own(nb: Notebook) -> None:
    nb.here("import sys; out=[sys.stdout]")
    nb.cell("import sys; r=out[0] is sys.stdout")
    assert nb["r"] is True
