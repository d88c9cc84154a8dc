"""The magic in an IPython without a kernel, as in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.ranks


def ipython(code: str) -> subprocess.CompletedProcess[str]:
    """Run lines in a shell of a process of its own; what is left of it afterwards is a failure."""
    import time

    import psutil

    mark = f"NBDIST_TEST_{os.getpid()}_{time.monotonic_ns()}"
    text = "from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
    text += "def run(text):\n    return shell.run_cell(text)\nrun('%load_ext nbdist')\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1", mark: "1", "NO_COLOR": "1"},
    )
    end, left = time.monotonic() + 5, [0]
    while left and time.monotonic() < end:
        left = []
        for process in psutil.process_iter():
            try:
                if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process.pid)
            except psutil.Error:
                pass
        time.sleep(0.05)
    assert not left
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_cell_in_a_terminal() -> None:
    done = ipython(
        """
        run("items = [1]")
        result = run("%%distributed -n 2\\nprint('hello', 'ab'[rank])\\nitems.append(rank)\\nr = rank\\nrank + 41")
        assert result.result == 41, result
        assert shell.user_ns["items"] == [1, 0]
        assert list(shell.user_ns["ranks"]["r"]) == [0, 1]
        run("%%distributed -n 2\\n!echo shell\\nfrom IPython.display import display\\ndisplay('shown')")
        result = run("%%distributed -n 2\\nif rank == 1:\\n    1 / 0")
        assert isinstance(result.error_in_exec, ZeroDivisionError)
        result = run("%%distributed -n 2\\nx = = 3")
        assert isinstance(result.error_in_exec or result.error_before_exec, SyntaxError)
        run("%distributed status")
        run("%distributed stop")
        """
    )
    lines = done.stdout.splitlines()
    for line in ("hello a", "[1] hello b", "shell", "'shown'"):
        assert line in lines, done.stdout
    assert "rank 1 failed first" in done.stdout and "1 / 0" in done.stdout, done.stdout
    assert "2 ranks on the CPU" in done.stdout and "ended: 2 ranks on the CPU" in done.stdout


def test_the_end_of_the_shell_ends_the_ranks() -> None:
    ipython("""run("%%distributed -n 2\\nimport subprocess\\nchild = subprocess.Popen(['sleep', '100'])")""")
