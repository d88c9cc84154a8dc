"""Runs a program in a kernel, from inside: each cell as Jupyter would, the distributed ones on real ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from IPython.utils.capture import capture_output

from tests.kernel.graph import names_of
from tests.kernel.outcome import outcomes
from tests.kernel.programs import Cell


def play(shell: Any, program: str) -> str:
    """The outcomes of a program as JSON; the shell's names of before are gone."""
    namespace = shell.user_ns
    for name in names_of(namespace):
        del namespace[name]
    cells = [Cell(**cell) for cell in json.loads(program)]

    def run(cell: Cell) -> str | None:
        options = "" if cell.ranks is None else f"%%distributed -n 2 {'--ranks ' + cell.ranks if cell.ranks else ''}\n"
        with capture_output():
            result = shell.run_cell(options + cell.source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
        return None if error is None else type(error).__qualname__.rpartition(".")[2]

    return json.dumps([asdict(outcome) for outcome in outcomes(cells, namespace, run)])
