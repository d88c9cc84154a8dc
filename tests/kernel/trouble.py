"""Words that the tests of stopping, dying and healing share."""

from __future__ import annotations

from collections.abc import Callable

from tests.kernel.notebook import Cell, Notebook

IMPORTS = "import torch, torch.distributed as dist, time, os, signal, subprocess, threading\n"
# A rank is at the place that matters: see `all_here`. By a letter: lines that differ only by the rank are folded.
HERE = "print('here', 'abcdefgh'[rank])\n"
STOP_LIMIT = 5.0  # seconds; the figure is 2, measured in benchmarks/
END_LIMIT = 10.0  # seconds until a cell whose rank died is back; the figure is 2

# `Slow(seconds)` is a dataset whose every item takes so long.
SLOW_DATA = """
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __init__(self, seconds): self.seconds = seconds
    def __len__(self): return 10**6
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(3)
"""


def magic(body: str, ranks: int, options: str = "") -> str:
    """A cell for so many ranks; its line 1 is the magic, its line 2 the imports, and the body starts at line 3."""
    return f"%%distributed -n {ranks} {options}\n{IMPORTS}{body}"


def all_here(ranks: int) -> Callable[[Cell], bool]:
    """Every rank has printed HERE."""
    return lambda cell: all(f"here {letter}" in cell.stdout for letter in "abcdefgh"[:ranks])


def was_stopped(cell: Cell) -> None:
    """The stop button worked: in time, and as a KeyboardInterrupt that also ends Run All."""
    assert cell.error is not None, cell.text
    assert cell.error[0] == "KeyboardInterrupt", cell.text
    assert cell.status == "error"
    assert cell.stop_seconds is not None
    assert cell.stop_seconds <= STOP_LIMIT, cell.text[-2000:]


def works(notebook: Notebook, ranks: int) -> list[int]:
    """The next cell works: a collective of all ranks. Returns their process ids."""
    cell = notebook.ok(
        magic(
            "here_i_am = os.getpid()\nvalue = torch.ones(1)\ndist.all_reduce(value)\nprint('sum', value.item())", ranks
        )
    )
    assert f"sum {ranks}.0" in cell.stdout, cell.text
    return notebook.value("list(ranks['here_i_am'])")
