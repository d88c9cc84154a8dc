"""Checkpoints in a real notebook: Stop in the middle of a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel


def test_stop_in_the_middle_of_a_save_leaves_a_whole_one_and_usable_ranks(nb: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "run"
    nb.ranks(f"""
import os
import torch
from torch import nn
from nbdist import Accelerator
accelerator = Accelerator()
model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(6)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.save_state({str(path)!r})
me = os.getpid()
""")
    loop = f"""%%distributed -n 2
print("begun")
while True:
    accelerator.save_state({str(path)!r})
"""
    for seconds in (0.1, 0.33, 0.57):
        cell = nb.run(loop, stop_after=seconds, stop_when=lambda cell: "begun" in cell.text)
        assert "KeyboardInterrupt" in cell.traceback
        assert cell.stop_seconds is not None and cell.stop_seconds < 2
        cell = nb.ranks(f"""
assert me == os.getpid()
print(accelerator.load_state({str(path)!r}).names["models"])
_ = accelerator.save_state({str(path)!r})
""")
        assert "['model']" in cell.text
        assert os.listdir(tmp_path) == ["run"]
