"""One cell, in an ordinary notebook and on ranks: the same output, value, error and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

BEFORE = """
x, name, folder, items = 4, "n m", "{folder}", [1, 2]
def f(a): return a * 2
class Thing: pass
distributed, time = 3, 5
"""
TIMES = re.compile(r"\d+(\.\d+)? ?(ns|[uμµ]s|ms|s)\b|±.*")

CELLS = {
    "underscores": "_, __, ___",
    "underscore is changed": "[_].append(1)\n_",
    "Out and In": "Out[max(Out)], type(In).__name__, _i.startswith('1')",
    "a silent value": "x + 1;",
    "a value and then a comment": "x + 1  # ;",
    "no value": "y = x",
    "None": "None",
    "a display and a value": "display(x)\nx + 1",
    "time": "%time z = f(x)\nz",
    "time of a cell": "%%time\nz = f(x)\nz",
    "timeit": "%timeit -n 2 -r 1 f(x)",
    "timeit of a cell": "%%timeit -n 2 -r 1\nf(x)",
    "timeit with a result": "t = %timeit -n 2 -r 1 -o -q f(x)\nt.loops",
    "prun": "%prun -q f(x)",
    "capture": "%%capture out\nprint('inside')\ndisplay(3)\nz = 5\n4",
    "shown again": "out = None\nfrom IPython.utils.capture import capture_output\nwith capture_output() as out:\n"
    "    print('in')\nout.show(), out.stdout",
    "shell": "!echo {name} $name {x + 1} {f(x)} $$HOME",
    "bash": "!for n in 1 2; do echo $x; done; [[ a == a* ]] && echo bash || echo sh",
    "shell assigned": "lines = !ls {folder}\nlines, lines.n",
    "shell fails": "!exit 3\n_exit_code",
    "sx": "s = %sx echo $x\ns",
    "bash cell": "%%bash\necho hello\nexit 0",
    "bash cell fails": "%%bash\nexit 3",
    "script with out": "%%bash --out got\necho {name}",
    "writefile": "%%writefile {file}\ncontent {x}",
    "html": "%%html\n<b>x</b>",
    "env": "%env NBDIST_X=a$x\nimport os\nos.environ['NBDIST_X']",
    "run": "%run {folder}/script.py one two\nmade",
    "matplotlib": "%matplotlib inline\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])",
    "unknown line magic": "%nosuch x",
    "unknown cell magic": "%%nosuch\nx",
    "await": "import asyncio\nawait asyncio.sleep(0, x)",
    "async for": "async def g():\n    yield 1\n    yield 2\nseen = [i async for i in g()]\n"
    "async for i in g(): pass\nseen, i",
    "async with": "from contextlib import nullcontext\nasync with nullcontext(3) as n: pass\nn",
    "generator": "def g(): yield from range(3)\nlist(g())",
    "return outside": "return 3",
    "yield outside": "yield 3",
    "walrus": "if (n := f(x)) > 3: print(n)\nn",
    "match": "match items:\n    case [a, *rest]: print(a, rest)\na, rest",
    "annotation": "k: int = 3\nk",
    "star": "first, *others = range(4)\nothers",
    "future": "from __future__ import annotations\ndef h(a: Nowhere): pass\nh.__annotations__",
    "a name of a magic": "distributed, time\n",
    "a name like a magic is bound": "timeit = 3\ncd = timeit\ncd",
    "display is bound": "display = 3\ndisplay",
    "del": "del x",
    "xmode": "%xmode Context",
    "reset": "%reset_selective -f ^x$\n'x' in globals()",
    "a comment": "# nothing",
    "semicolons": "a = 1; b = 2; a + b",
    "a line that goes on": "a = (1 +\n     2)\na",
    "last expression in a block": "if x: x + 1",
    "a decorated class": "import dataclasses\n@dataclasses.dataclass\nclass D:\n    a: int = 3\nD()",
    "namespace": "sorted(k for k in globals() if k in ('x', 'name'))[:0]\n__name__",
    "run_cell": "r = get_ipython().run_cell('inner = x + 1')\ninner, r.success",
}


@pytest.fixture(scope="module")
def both(nb: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Notebook, Notebook, Path]]:
    folder = tmp_path_factory.mktemp("cells")
    (folder / "script.py").write_text("import sys\nprint('script', __name__, sys.argv[1:])\nmade = 5\n")
    with Notebook() as plain:
        yield plain, nb, folder


def _shown(cell: Cell) -> dict[str, object]:
    data = [{k: v for k, v in part.items() if k in ("text/plain", "text/html")} for part in cell.data]
    return {
        "stdout": TIMES.sub("T", cell.stdout)
        .replace("\r\n", "\n")
        .replace("written1", "written0")
        .replace("Overwriting", "Writing"),
        "stderr": cell.stderr.replace("%%distributed", ""),
        "data": [TIMES.sub("T", str(part)) for part in data],
        "results": len(cell.results),
        "error": cell.error and (cell.error[0], re.sub(r"\(.*, line \d+\)", "", cell.error[1])),
        "pager": [part["data"]["text/plain"] for part in cell.payload if part.get("source") == "page"],
    }


@pytest.mark.parametrize("code", [pytest.param(code, id=name.replace(" ", "-")) for name, code in CELLS.items()])
def test_the_same(both: tuple[Notebook, Notebook, Path], code: str) -> None:
    *notebooks, folder = both
    here = []
    for number, (notebook, magic) in enumerate(
        zip(notebooks, ("", "%%distributed -n 2 --output rank0\n"), strict=True)
    ):
        notebook.ok(
            f"%reset_selective -f ^(?!In|Out|ranks|exit|quit|open|get_ipython)[a-zA-Z]\n{BEFORE.format(folder=folder)}"
        )
        notebook.ok("[10]")
        notebook.ok("11")
        text = code.replace("{file}", f"{folder}/written{number}")
        shown = _shown(notebook.run(magic + text))
        names = notebook.ok(
            "print(sorted((k, repr(v)) for k, v in globals().items() if k in "
            "'_ __ x y z a b k n i s t got made lines rest first others inner seen items display cd timeit'.split() "
            "and 'object at' not in repr(v) and 'function' not in repr(v)))"
        )
        here.append((shown, names.stdout))
    assert here[1] == here[0]
    if "%%writefile" in code:
        assert (folder / "written1").read_text() == (folder / "written0").read_text()


REFUSED = ["%store x", "%debug", "%pdb on", "%history", "%distributed status", "%%distributed -n 2\nx"]


@pytest.mark.parametrize("code", REFUSED)
def test_magics_of_the_notebook_say_so(nb: Notebook, code: str) -> None:
    cell = nb.run(f"%%distributed -n 2\n{code}")
    assert cell.status == "error" and f"{code.split()[0]} belongs to the notebook's own shell" in cell.text, cell.text
    assert "use it in an ordinary cell" in cell.text


def test_who_shows_what_the_cell_has(nb: Notebook) -> None:
    nb.ok("who_one = 1")
    shown = nb.ranks("who_one, In, Out, rank\nfound = %who_ls\nfound").results[0]["text/plain"]
    assert "who_one" in shown
    for hidden in ("In", "Out", "world_size", "device", "display"):
        assert f"'{hidden}'" not in shown


def test_a_changed_folder_is_said_once(nb: Notebook) -> None:
    assert "%cd in an ordinary cell changes it for both" in nb.ranks("%cd /tmp").stderr
    assert nb.ranks("%cd /").stderr == ""


def test_a_reset_on_the_ranks_leaves_the_notebooks_own(fresh: Notebook) -> None:
    fresh.ranks("In, Out, 1")
    fresh.ranks("%reset -f")
    assert fresh.value("(type(In).__name__, type(Out).__name__)") == ("list", "dict")


def test_underscores_go_on_after_a_cell_that_only_read_them(nb: Notebook) -> None:
    nb.ok("globals().pop('_', None)")
    nb.ok("(1, [2])")
    nb.ranks("_[1].append(3)\n_")
    assert nb.ok("_").results[0]["text/plain"] == "(1, [2, 3])"
    nb.ok("7")
    assert nb.ok("_ + 1").results[0]["text/plain"] == "8"
    nb.ranks("_ + 1;")
    assert nb.ok("_").results[0]["text/plain"] == "8", "silenced: not kept"


def test_captured_around_the_magic(nb: Notebook) -> None:
    nb.ok(
        "%%capture cap\n%%distributed -n 2\nimport sys\nprint('hello')\nprint('err', file=sys.stderr)\n"
        "from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\n3"
    )
    nb.ok("shown = cap.stdout, cap.stderr, len(cap.outputs)")
    stdout, stderr, outputs = nb.value("shown")
    assert "hello" in stdout and "err" in stderr and outputs == 2
    again = nb.ok("cap.show()")
    assert "hello" in again.stdout and "err" in again.stderr
    assert [part.get("text/html") for part in again.data] == ["<b>x</b>", None]
    assert again.data[1]["text/plain"] == "3"


@pytest.mark.parametrize("around", ["%%time", "%%timeit -n 1 -r 1", "%%prun -q", "%%capture"])
def test_names_come_back_with_a_magic_around(nb: Notebook, around: str) -> None:
    nb.ok(f"{around}\n%%distributed -n 2\naround = {around!r}")
    assert nb.value("around") == around


def test_a_shell_that_is_overwritten_is_as_in_an_ordinary_cell(fresh: Notebook) -> None:
    fresh.ok("get_ipython = 5")
    cell = fresh.run("%%distributed -n 2\n1")
    assert cell.error is not None and cell.error[0] == "TypeError"
    fresh.ok("del get_ipython")
    assert fresh.ranks("1").results[0]["text/plain"] == "1"


def test_the_notebooks_names_win_over_those_of_the_ranks(nb: Notebook) -> None:
    nb.ok("rank, device, keep = 77, 'mine', ranks\nranks = [1]")
    assert nb.ranks("seen = rank, device, world_size, ranks\nranks.append(2)\nseen").results[0]["text/plain"] == (
        "(77, 'mine', 2, [1, 2])"
    )
    assert nb.value("(rank, device, ranks)") == (77, "mine", [1, 2])
    nb.ok("del rank, device\nranks = keep")
    assert nb.ranks("rank + 1").results[0]["text/plain"] == "1"
