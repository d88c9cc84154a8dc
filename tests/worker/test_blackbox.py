"""Where a process was when it died is read afterwards from the file that it shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.launchers.failures import read_black_box

# A rank in small: a cell in file "cell", whose line is looked for.
RANK = """
import os, sys, threading
from nbdist.worker.blackbox import BlackBox
source, fd = sys.argv[1], int(sys.argv[2])
box = BlackBox(fd, lambda name: name == "cell", threading.main_thread().ident)
if "--old" in sys.argv:
    os.pwrite(fd, b"x" * 300, 0)
box.begin()
exec(compile(source, "cell", "exec"), {"box": box})
"""


def die(tmp_path: Path, source: str, *more: str, kill_after: float | None = None) -> tuple[int, dict[str, Any]]:
    """Run a cell until it dies; its exit code and the black box."""
    fd = os.open(tmp_path / "box", os.O_RDWR | os.O_CREAT)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, source, str(fd), *more],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            if kill_after is not None:
                assert process.stdout is not None
                assert process.stdout.readline() == b"here\n"
                end = time.monotonic() + 10
                while read_black_box(fd)["line"] < 2 and time.monotonic() < end:
                    time.sleep(0.02)
                process.kill()
            code = process.wait(30)
        return code, read_black_box(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("work()", -signal.SIGKILL),
    ],
)
def test_its_own_end_is_noted_at_once(tmp_path: Path, end: str, code: int) -> None:
    source = f"import os\ndef work():\n    os.kill(os.getpid(), 9)\n\n{end}"
    got, box = die(tmp_path, source)
    assert got == code
    assert box["line"] == (3 if end == "work()" else 5)
    assert box["file"] == "cell"
    assert 0 <= box["age"] < 10


def test_a_fault_leaves_its_frames(tmp_path: Path) -> None:
    code, box = die(tmp_path, "import ctypes\n\nctypes.string_at(0)")
    assert code == -signal.SIGSEGV
    assert "Segmentation fault" in box["fault"]
    assert 'File "cell", line 3' in box["fault"]


def test_killed_from_outside(tmp_path: Path) -> None:
    """The thread that looks has noted the line by then, though nobody asked."""
    code, box = die(tmp_path, "import time; print('here', flush=True)\nwhile True: time.sleep(0.01)", kill_after=0.0)
    assert code == -signal.SIGKILL
    assert (box["line"], box["file"]) == (2, "cell")


def test_the_last_cells_place_is_forgotten(tmp_path: Path) -> None:
    """A process that dies before anything was noted has no place, rather than an old one."""
    code, box = die(tmp_path, "import os, signal\nbox.end(1)\nbox.begin()\nbox.end(1)\nsignal.raise_signal(9)", "--old")
    assert code == -signal.SIGKILL
    assert box["line"] == 0
    assert box["age"] is None


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """A DataLoader worker that ends with os._exit is not the rank."""
    source = "import os\npid = os.fork()\nif not pid:\n    os._exit(1)\nos.waitpid(pid, 0)\n\nos._exit(2)"
    code, box = die(tmp_path, source)
    assert code == 2
    assert box["line"] == 7
