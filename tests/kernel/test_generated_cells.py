"""Generated cells over generated names: run in a plain namespace, and by nbdist on two real ranks.

The notebook ends with the same names, equal values, the same aliases and the same exceptions; what it held before is
the very same object where it would be in the plain run. `programs.LIMITS` lists what is not written.

`NBDIST_EXAMPLES=5000 pytest tests/kernel/test_generated_cells.py` looks for longer, at other programs each time. The
same with ranks in plain processes, which is faster: tests/shipping/test_generated_cells.py.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernel.notebook import Notebook
from tests.kernel.outcome import Outcome, difference, in_a_plain_namespace
from tests.kernel.programs import Cell, write

pytestmark = pytest.mark.kernel

EXAMPLES = int(os.environ.get("NBDIST_EXAMPLES", "0"))  # 0: a few, the same ones each time
ROOT = Path(__file__).parents[2]


def on_ranks(notebook: Notebook, cells: list[Cell]) -> list[Outcome]:
    program = json.dumps([asdict(cell) for cell in cells])
    cell = notebook.run(  # the errors of the program are shown as the cell's own
        f"import sys\nsys.path.append({str(ROOT)!r}) if {str(ROOT)!r} not in sys.path else None\n"
        f"from tests.kernel import played as _played\nprint(_played.play(get_ipython(), {program!r}))"
    )
    told = cell.stdout.strip().rpartition("\n")[2]
    assert told.startswith("["), cell.text
    return [Outcome(**outcome) for outcome in json.loads(told)]


@settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(st.randoms(use_true_random=bool(EXAMPLES)))
def test_the_notebook_is_as_if_the_cells_had_run_here(nb: Notebook, random_: random.Random) -> None:
    cells = write(random_)
    told = difference(cells, in_a_plain_namespace(cells), on_ranks(nb, cells))
    if told:
        pytest.fail(told, pytrace=False)
