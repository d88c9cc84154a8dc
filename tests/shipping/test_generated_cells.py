"""Generated cells as in tests/kernel/test_generated_cells.py, with ranks in plain processes: many more of them."""

from __future__ import annotations

import os
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernel.outcome import Outcome, difference, in_a_plain_namespace, main_module, outcomes, run_plainly
from tests.kernel.programs import Cell, write

from .peers import CellError, Notebook, Remote

EXAMPLES = int(os.environ.get("NBDIST_EXAMPLES", "0"))  # 0: a few, the same ones each time


def type_of(trace: str) -> str:
    """The type of the exception that a traceback ends with."""
    after = trace[trace.rindex('  File "') :].split("\n")[1:]
    name = re.match(r"[\w.]+", next(line for line in after if line[:1] not in " \t"))
    assert name is not None
    return name.group().rpartition(".")[2]


def on_ranks(remotes: list[Remote], cells: list[Cell]) -> list[Outcome]:
    with main_module() as namespace:
        notebook = Notebook(remotes)
        namespace.update(notebook.ns)
        notebook.ns = namespace
        notebook.home.__init__(namespace, len(remotes), fetch=notebook.fetch)  # type: ignore[misc]

        def run(cell: Cell) -> str | None:
            if cell.ranks is None:
                return run_plainly(cell.source, namespace)
            try:
                notebook.cell(cell.source, ranks=[int(cell.ranks)] if cell.ranks else None)
            except CellError as error:
                return type_of(str(error))
            return None

        return outcomes(cells, namespace, run)


@settings(
    max_examples=EXAMPLES or 150,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(st.randoms(use_true_random=bool(EXAMPLES)))
def test_the_notebook_is_as_if_the_cells_had_run_here(remotes: list[Remote], random_: random.Random) -> None:
    cells = write(random_)
    told = difference(cells, in_a_plain_namespace(cells), on_ranks(remotes[:2], cells))
    if told:
        pytest.fail(told, pytrace=False)
