"""Which names a cell reads, IPython's own syntax included: `!echo {name}`, `%timeit f(x)`, top-level `await`."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbdist.shipping import Names, analyse

# Cell magics whose body is Python that runs in the namespace.
_PYTHON_BODIES = {"time", "timeit", "capture", "prun"}
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"\{([^{}]*)\}|\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class CellSource:
    """A cell as the ranks will run it.

    Attributes:
        source: plain Python, its line numbers those of the cell as it was typed.
        file: the name under which IPython knows the cell.
        flags: compiler flags (`from __future__` in an earlier cell).
    """

    source: str
    file: str
    flags: int
    reads: frozenset[str]
    maybe: frozenset[str]
    stores: frozenset[str]
    deletes: frozenset[str]


def capture(
    shell: Any, line: str, cell: str, typed: str | None = None, transform: Callable[[str], str] | None = None
) -> CellSource:
    """Read a cell.

    Args:
        typed: what the user typed; the magic's body is its end, or it is not used.
        transform: IPython's syntax as plain Python; by default the shell's own.

    Raises:
        SyntaxError: as Jupyter would show it, with the cell's own line.
    """
    raw, above = f"%%distributed {line}\n{cell}", 1
    if typed is not None and (lines := _lines_above(typed, cell)) is not None:
        raw, above = typed, lines
    file = shell.compile.cache(raw, count(shell), raw_code=raw)
    source = "\n" * (above + _blank_lines(cell)) + (transform or shell.transform_cell)(cell)
    flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    names: Names = analyse(source, file, flags)
    reads, maybe, stores = set(names.reads), set(names.maybe), set(names.stores)
    for read, stored in _in_magics(ast.parse(source, file), file, flags):
        maybe |= read  # text of a magic: what looks like a name may be none
        stores |= stored
    maybe -= reads
    return CellSource(
        source, file, flags, frozenset(reads), frozenset(maybe), frozenset(stores), names.deletes - frozenset(reads)
    )


def count(shell: Any) -> int:
    """The number of the cell that runs now, as in `In [n]`: when IPython raises its own differs between versions."""
    return shell.displayhook.prompt_count


def cell_named(shell: Any, file: str) -> str:
    """What IPython calls the cell that it knows under this file name: "Cell In[3]"; empty where it has no word."""
    told = getattr(shell.compile, "format_code_name", lambda name: None)(file)
    return " ".join(told) if told else ""


def _lines_above(typed: str, cell: str) -> int | None:
    """How many lines of what was typed stand above the magic's body: more than one when the magic is not the first
    line, none when `%distributed on` put it there. None: this is not the end of what was typed.
    """
    whole, body = typed.rstrip().split("\n"), cell.rstrip().split("\n")
    above = len(whole) - len(body)
    if above < 0 or not cell.strip():
        return None
    same = all(one.strip() == other.strip() for one, other in zip(whole[above:], body, strict=True))
    return above if same else None


def _blank_lines(cell: str) -> int:
    """Leading lines that IPython's transformation drops."""
    return sum(1 for _ in itertools.takewhile(str.isspace, cell.splitlines(keepends=True)))


def _in_magics(tree: ast.AST, file: str, flags: int) -> list[tuple[set[str], set[str]]]:
    found: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        called = node.func.attr
        if called in ("system", "getoutput", "getoutput_list") and texts:
            found.append((_expanded(texts[0]), set()))
        elif called == "run_line_magic" and len(texts) == 2:
            found.append(_of_python(texts[1], file, flags))
        elif called == "run_cell_magic" and len(texts) == 3:
            if texts[0] in _PYTHON_BODIES:
                found.append(_of_python(texts[2], file, flags))
            else:
                found.append((_expanded(texts[2]), set()))
            found.append(_of_python(texts[1], file, flags))
    return found


def _of_python(text: str, file: str, flags: int) -> tuple[set[str], set[str]]:
    """Names in the text of a magic: read as Python when it is, else every word that could be one."""
    code = re.sub(r"^(\s*-\w+(\s+\d+)?)+\s+", "", text)  # options of the magic: %timeit -n 10 f(x)
    try:
        names = analyse(code, file, flags)
    except SyntaxError:
        return {*_IDENTIFIER.findall(text)}, set()
    return set(names.reads | names.maybe), set(names.stores)


def _expanded(text: str) -> set[str]:
    """Names that IPython puts into a shell command: {name}, {expression}, $name."""
    found: set[str] = set()
    for expression, name in _EXPANSION.findall(text):
        found.update([name] if name else _IDENTIFIER.findall(expression))
    return found
