"""The benchmark of the training step runs, with every part and the peer where it is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def printed_by(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_step_costs_is_told_part_by_part() -> None:
    printed = printed_by("accelerator_overhead.py", "--steps", "9", "--rounds", "1")
    compared = dict(re.findall(r"^(\S.*?) +median .* over (.*?): median", printed, re.MULTILINE))
    assert compared["all"] == compared["loader"] == compared["accumulate"] == "plain"
    assert compared["small, all"] == "small plain"
    assert ("Accelerate, all" in compared) is ("in the same run" in printed) is ("not measured" not in printed)


def test_resuming_deep_in_an_epoch_is_measured_beside_its_start() -> None:
    printed = printed_by("resuming.py", "--rounds", "1")
    assert re.search(r"nbdist, load_state_dict +median +[\d.]+ ms", printed)
