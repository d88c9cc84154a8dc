"""What runs inside a rank: the worker knows how to run *something* between receiving and giving; a CellRunner says
what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nbdist.worker.output import Output


class CellRunner(Protocol):
    """Runs one cell. Made once a rank by `make_runner(namespace, spec, output)` in the module that the start
    message names.
    """

    injected: frozenset[str]  # names that it puts into the namespace by itself

    def prepare(self, cell: dict[str, Any]) -> None:
        """Before the namespace is looked at: put the injected names in."""

    def run(self, cell: dict[str, Any], extra: Any) -> Any:
        """Run the cell; what it returns travels back with rank 0's results."""

    def settings(self) -> dict[str, Any]:
        """What the run has set of the global settings of libraries, for the notebook; after `run`."""

    def finish(self, value: Any) -> None:
        """After the results were packed."""


RunnerFactory = Callable[[dict[str, Any], dict[str, Any], Output], CellRunner]
