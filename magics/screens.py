"""The screen of a cell, and that of what comes after it, for each `--output`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbdist.launchers.request import Screen
from nbdist.launchers.screen import MergedScreen
from nbdist.magics.output import EACH, Beneath, LateOutput, NotebookScreen
from nbdist.magics.tabs import TabsScreen


def screens(shell: Any, mode: str, ranks: Sequence[int]) -> tuple[Screen, LateOutput]:
    """For one cell: where its output goes while it runs, and afterwards."""
    lead = min(ranks)
    if mode == "tabs":
        tabs = TabsScreen(shell, lead, ranks)
        return tabs, LateOutput(tabs, settle=0.2, at_most=1.0)
    beneath = Beneath(shell)
    late = MergedScreen(mode, lead, write=beneath.text, show=beneath.display, ranks=ranks, each=EACH)
    return NotebookScreen(shell, mode, lead, ranks), LateOutput(late, beneath.flush)
