"""Cores by affinity and control group, not by the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist import cgroups
from nbdist.config.cores import cores, threads_for


def test_affinity_counts_not_the_host() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from nbdist.config.cores import cores; print(cores().usable, cores().why)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("1 "), told
    if (os.cpu_count() or 1) > 1:
        assert "by affinity" in told


@pytest.mark.parametrize(("quota", "usable"), [(0.5, 1), (1.5, 1), (1.0, 1)])
def test_a_quota_is_a_limit(quota: float, usable: int) -> None:
    have = cores(quota)
    assert have.usable == usable
    if cores(1000.0).usable > 1:
        assert f"{quota:g} processors' worth" in have.why


def test_the_control_groups_files_are_read(tmp_path: Path) -> None:
    """Both versions, whichever this machine has: the folder stands for /sys/fs/cgroup."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    assert cgroups.processors(str(tmp_path)) == 1.5
    assert (1000, 400, 100) in cgroups.memory(str(tmp_path))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroups.processors(str(tmp_path)) is None
    assert cgroups.memory(str(tmp_path)) == []


def test_threads_of_a_rank() -> None:
    assert threads_for(1, {})[0] == cores().usable
    assert threads_for(1000, {})[0] == 1
    assert threads_for(4, {"OMP_NUM_THREADS": "3"}) == (3, "OMP_NUM_THREADS=3")
    assert threads_for(1000, {"OMP_NUM_THREADS": "many"})[0] == 1
