"""Which names a cell reads and makes, and at which lines it stands: `capture` with a shell and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbdist.magics.capture import CellSource, capture


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@dataclass
class Case:
    """A cell; `reads` and `maybe` are names besides get_ipython that must be there, exactly."""

    cell: str
    reads: str = ""
    maybe: str = ""
    stores: str | None = None
    deletes: str = ""


CASES = {
    "plain": Case("y = x + 1", "x", stores="y"),
    "assigned before": Case("x = 1\ny = x", stores="x y"),
    "augmented": Case("x += 1", "x", stores="x"),
    "attribute": Case("y = x.data", "x", stores="y"),
    "deleted": Case("del x", stores="", deletes="x"),
    "read and deleted": Case("y = x\ndel x", "x", stores="y"),
    "comprehension": Case("y = [i * k for i in xs if i]", "k xs", stores="y"),
    "f-string": Case("f'{a} {b:{c}} {d!r}'", "a b c d", stores=""),
    "function": Case("def f(p, q=d):\n    return p + q + g", "d", "g", stores="f"),
    "decorator": Case("@deco\ndef f(): pass", "deco", stores="f"),
    "class": Case("class A(B, metaclass=M):\n    x = y\n    def f(self): return z", "B M y", "z", stores="A"),
    "global": Case("def f():\n    global n\n    n += 1", "", "n", stores="f n"),
    "except": Case("try:\n    pass\nexcept E as e:\n    print(e)", "E", stores="e", deletes="e"),
    "import": Case("import a.b, c as d\nfrom m import n as o", stores="a d o"),
    "walrus": Case("if (n := f(x)): pass", "f x", stores="n"),
    "with": Case("with f() as g: g.h()", "f", stores="g"),
    "await": Case("y = await f(x)", "f x", stores="y"),
    "line magic": Case("%timeit -n 10 f(x)", "", "f x"),
    "time": Case("%time y = f(x)", "", "f x", stores="y"),
    "shell": Case("!echo {name} $other {d['k']} plain", "", "name other d k"),
    "shell assigned": Case("lines = !ls {folder}", "", "folder", stores="lines"),
    "cell magic": Case("%%time\ny = f(x)", "", "f x", stores="y"),
    "magic that is not python": Case("%%bash\necho {name} word", "", "name"),
}


def _names(text: str) -> set[str]:
    return set(text.split())


def _captured(shell: Any, cell: str, line: str = "-n 2") -> CellSource:
    return capture(shell, line, cell + "\n")


_BUILTIN = {"get_ipython", "print"}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_names(shell: Any, case: Case) -> None:
    source = _captured(shell, case.cell)
    assert source.reads - _BUILTIN == _names(case.reads)
    assert source.maybe - _BUILTIN >= _names(case.maybe)
    if "!" not in case.cell and "%" not in case.cell:  # in the text of a magic what looks like a name may be none
        assert source.maybe - _BUILTIN == _names(case.maybe)
    if case.stores is not None:
        assert source.stores == _names(case.stores)
    assert source.deletes == _names(case.deletes)


@pytest.mark.parametrize("blank", range(4))
@pytest.mark.parametrize("before", ["", "%time 1\n", "!ls\n"])
def test_lines_are_those_of_the_notebook(shell: Any, blank: int, before: str) -> None:
    source = _captured(shell, "\n" * blank + before + "first = 1\n\nsecond = 2")
    lines = {
        node.targets[0].id: node.lineno  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source.source))
        if isinstance(node, ast.Assign)
    }
    first = 2 + blank + before.count("\n")  # the magic is line 1
    assert lines == {"first": first, "second": first + 2}


def test_blank_lines_with_spaces(shell: Any) -> None:
    source = _captured(shell, "  \n\n    \nfirst = 1")
    assert source.source.split("\n").index("first = 1") == 4


def test_an_indented_cell(shell: Any) -> None:
    source = _captured(shell, "    a = b\n    c = a")
    assert (source.reads, source.stores) == ({"b"}, {"a", "c"})
    assert source.source.split("\n")[1:3] == ["a = b", "c = a"]


def test_a_syntax_error_has_the_cells_line(shell: Any) -> None:
    with pytest.raises(SyntaxError) as caught:
        _captured(shell, "\nx = 1\nx = = 3")
    assert caught.value.lineno == 4


def test_flags_of_an_earlier_cell(shell: Any) -> None:
    assert "Ann" in _captured(shell, "def f(x: Ann): ...").reads
    shell.run_cell("from __future__ import annotations")
    assert "Ann" not in _captured(shell, "def f(x: Ann): ...").reads


def test_the_file_is_ipythons_own(shell: Any) -> None:
    import linecache

    source = _captured(shell, "x = 1", "-n 4 --fresh")
    assert linecache.getlines(source.file)[:2] == ["%%distributed -n 4 --fresh\n", "x = 1\n"]
