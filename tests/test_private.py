"""The list of private interfaces is whole, says nothing that is not so, and each of its self-tests passes here."""

from __future__ import annotations

import ast
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from nbdist import private
from nbdist.private import INTERFACES, Interface

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for room in ("nbdist", "magics", "widgets") for path in sorted((ROOT / room).rglob("*.py"))]
LIST = {"nbdist/private.py", "nbdist/self_tests.py", "nbdist/self_tests_sharded.py"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))


def is_own(node: ast.expr) -> bool:
    """self, cls, super(), and classes of this package by name: what they have is ours."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "Rank", "Groups")


def made_here(trees: dict[str, ast.Module]) -> set[str]:
    """Private names that this package gives: functions, classes, variables, attributes of self, arguments."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def used_names(tree: ast.Module) -> set[tuple[str, int]]:
    """(private name, line): attributes of others, imports, and strings that are names (for getattr, or full paths)."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [part for part in node.value.replace(":", ".").split(".") if part.isidentifier()]
        found |= {(name, node.lineno) for name in names if is_private(name)}  # type: ignore[attr-defined]
    return found


TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}
OURS = {name for name in made_here(TREES) if is_private(name)}
LISTED = {name: interface for interface in INTERFACES for name in interface.names.split()}


@pytest.mark.parametrize("file", sorted(TREES.keys() - LIST))
def test_every_private_name_of_others_is_listed(file: str) -> None:
    """A name that is not here must go into nbdist/private.py, with a self-test and a fallback."""
    for name, line in sorted(used_names(TREES[file])):
        if name in private.DOCUMENTED or (name in OURS and name not in LISTED) or name.startswith("_nbdist"):
            continue
        interface = LISTED.get(name)
        assert interface is not None, f"{file}:{line}: {name} is in no row of nbdist/private.py"
        if name not in OURS:
            assert file in interface.used_in.split(), f"{file}:{line}: {name} is listed, but not as used in this file"


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.names.split()[0])
class TestRow:
    def test_it_is_used_where_it_says(self, interface: Interface) -> None:
        texts = {file: (ROOT / file).read_text() for file in interface.used_in.split()}
        for name in interface.names.split():
            assert any(name in text for text in texts.values()), f"{name} is used in none of {', '.join(texts)}"
        for file, text in texts.items():
            assert any(name in text for name in interface.names.split()), f"{file} uses none of these"

    def test_it_is_as_we_use_it(self, interface: Interface) -> None:
        """Where this fails, another release has changed it: look at the row's fallback."""
        interface.self_test()

    def test_its_fallback_has_a_test(self, interface: Interface) -> None:
        if not interface.taken_away:
            return
        file, _, test = interface.taken_away.partition("::")
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert test in names, f"there is no {interface.taken_away}"


@pytest.mark.parametrize("name", [name for name in private.RUN_ON if name != "Python"])
def test_the_versions_are_those_that_were_run(name: str) -> None:
    """With a newer one: run `python -m nbdist.private` and the tests, then add it to RUN_ON."""
    assert version(name).partition("+")[0] in private.RUN_ON[name]


def test_this_python_is_one_that_was_run() -> None:
    assert ".".join(platform.python_version_tuple()[:2]) in private.RUN_ON["Python"]


def test_the_list_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert private.main() == 0
    out = capsys.readouterr().out
    assert out.count("works  ") == len(INTERFACES) and "FAILS" not in out


def test_a_self_test_that_fails_is_told_with_what_happens_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.delattr(torch, "_foreach_mul_")
    assert private.main() == 1
    assert "FAILS  torch: _foreach_mul_" in (out := capsys.readouterr().out) and "instead: one call for each" in out
