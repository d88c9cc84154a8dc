"""The first cell of an impatient user: ranks are still on their way, and so is torch."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]
HAS_TORCH = "'torch' in __import__('sys').modules"


def test_a_first_cell_that_returns_nothing_needs_no_torch_here(fresh: Notebook) -> None:
    fresh.ranks("import torch\nmade = torch.ones(2)", "-n 2 --no-return")
    assert fresh.value(HAS_TORCH) is False


def test_stop_while_torch_is_on_its_way_leaves_a_whole_torch(fresh: Notebook) -> None:
    cell = fresh.run("%%distributed -n 2\nimport torch\nwhile True: pass", stop_after=0.3)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt", cell.text
    assert fresh.value("__import__('torch').ones(2).sum().item()") == 2.0
    fresh.ranks("import torch\nmade = torch.ones(2) * (rank + 1)")
    assert fresh.value("made.tolist()") == [1.0, 1.0]
