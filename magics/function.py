"""A launched function in a notebook: its displays and plots are shown, and a traceback has the user's frames only.

`nbdist.launch` and the launchers built on it load this by name when they are called from IPython. `NotebookSurface` is
the kernel's side; `make_runner` the rank's, where a shell of IPython stands around the function as it does around a
cell.
"""

from __future__ import annotations

import linecache
import os
import types
from typing import Any

from nbdist.launchers import launch
from nbdist.launchers.request import Screen
from nbdist.magics import global_settings
from nbdist.magics.errors import print_without_our_frames
from nbdist.magics.output import NotebookScreen
from nbdist.magics.rank import CellRunner
from nbdist.shipping.wire import RESULT
from nbdist.worker.calls import call
from nbdist.worker.output import Output

_OURS = os.path.dirname(os.path.abspath(launch.__file__)).removesuffix("launchers")
_OURS_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # magics/ lies beside the package in the source tree
_IN_MEMORY = 4  # fields of a linecache entry that has its lines; a lazy one has one


class NotebookSurface:
    """See nbdist.launchers.launch.Surface."""

    runner = "nbdist.magics.function"

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def screen(self, mode: str, ranks: int) -> Screen:
        return NotebookScreen(self._shell, mode, 0, range(ranks), each="")

    def sources(self) -> dict[str, str]:
        """Every cell that was run: IPython keeps their text in linecache, under names that no file has."""
        entries: list[tuple[str, Any]] = list(linecache.cache.items())
        return {
            name: "".join(entry[2])
            for name, entry in entries
            if len(entry) == _IN_MEMORY and entry[1] is None and not os.path.exists(name)
        }

    def settings(self) -> dict[str, Any]:
        return global_settings.changed({}, global_settings.read_all())

    def show_as_here(self, error: BaseException) -> None:
        shell = self._shell

        def lines() -> list[str]:
            told = without_ours(error.__traceback__)
            return shell.InteractiveTB.structured_traceback(type(error), error, told, tb_offset=0)

        try:
            error._render_traceback_ = lines  # type: ignore[attr-defined]
        except Exception:  # a class with __slots__: shown with our frames, which is ugly and not wrong
            pass
        print_without_our_frames(shell, error, lambda: without_ours(error.__traceback__))


def without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without this package's frames and what IPython has above the cell."""
    frames: list[types.TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    mine = [part for part in frames if not part.tb_frame.f_code.co_filename.startswith((_OURS, _OURS_HERE))]
    first = next((i for i, part in enumerate(mine) if part.tb_frame.f_globals.get("__name__") == "__main__"), 0)
    told: types.TracebackType | None = None
    for part in reversed(mine[first:]):
        told = types.TracebackType(told, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return told


class FunctionRunner(CellRunner):
    """Calls one function, and keeps what it returned for the asking."""

    injected = frozenset()

    def prepare(self, cell: dict[str, Any]) -> None:
        self._namespace.pop(RESULT, None)
        global_settings.put(cell.get("globals", {}))

    def settings(self) -> dict[str, Any]:
        return {}  # these ranks end: what they set is theirs

    def run(self, cell: dict[str, Any], extra: Any) -> Any:
        for file, source in cell["sources"].items():
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        try:
            return call(extra)
        finally:
            self.shell.events.trigger("post_execute")  # matplotlib's inline backend shows its figures here

    def finish(self, value: Any) -> None:
        self._namespace[RESULT] = value


def warm() -> None:
    """In the fork server: see nbdist.magics.rank."""
    from nbdist.magics import rank

    rank.warm()


def make_runner(namespace: dict[str, Any], spec: dict[str, Any], output: Output) -> FunctionRunner:
    return FunctionRunner(namespace, spec, output)
