"""Running a program in a plain namespace: what it should give."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.kernel.graph import Watch
from tests.kernel.programs import Cell


@dataclass
class Outcome:
    """After one cell: the type of its exception or None, and the namespace as lines."""

    error: str | None
    lines: list[str]


@contextlib.contextmanager
def main_module() -> Iterator[dict[str, Any]]:
    """A namespace that is `__main__` meanwhile: dataclasses, enum and pickle look there."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield module.__dict__
    finally:
        sys.modules["__main__"] = before


def in_a_plain_namespace(cells: list[Cell]) -> list[Outcome]:
    with main_module() as namespace:
        builtins_rank = {"rank": 0, "world_size": 2}
        namespace.update(builtins_rank)
        return outcomes(cells, namespace, lambda cell: run_plainly(cell.source, namespace))


def run_plainly(source: str, namespace: dict[str, Any]) -> str | None:
    """Run a cell; returns the type of its exception."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, "<cell>", "exec", dont_inherit=True), namespace)
    except Exception as error:
        return type(error).__qualname__.rpartition(".")[2]  # numpy gives some another __name__
    return None


def outcomes(cells: list[Cell], namespace: dict[str, Any], run: Callable[[Cell], str | None]) -> list[Outcome]:
    """Run every cell, and look at the namespace after each."""
    watch, found = Watch(namespace), []
    for cell in cells:
        error = run(cell)
        found.append(Outcome(error, watch.look()))
    return found


def difference(cells: list[Cell], want: list[Outcome], got: list[Outcome]) -> str:
    """The first difference, with the program up to there; empty when there is none."""
    for index, (one, other) in enumerate(zip(want, got, strict=True)):
        if one == other:
            continue
        shown = [
            f"--- {'here' if c.ranks is None else 'ranks ' + (c.ranks or 'all')}\n{c.source}"
            for c in cells[: index + 1]
        ]
        if one.error != other.error:
            return "\n".join([*shown, f"error: {one.error!r} plainly, {other.error!r} on ranks"])
        lines = [f"- {a}\n+ {b}" for a, b in zip(one.lines, other.lines, strict=False) if a != b][:8]
        return "\n".join([*shown, f"{len(one.lines)} and {len(other.lines)} lines", *lines])
    return ""
