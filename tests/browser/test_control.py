"""Errors, Stop, Restart, and cells that wait for each other, by the front-end's own buttons."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.kernel.notebook import wait_gone


def test_an_error_shows_the_cells_own_line_and_nothing_of_ours(notebook: Any) -> None:
    index, output = notebook.run(
        """
%%distributed -n 2
def half(values):
    return values[len(values) // 2 + 5]

half([1, 2, 3])
"""
    )
    notebook.shot("error", index)
    assert output.error is not None
    assert output.error["ename"] == "IndexError"
    shown = notebook.shown(index).inner_text()
    number = notebook.cell(index).locator(".jp-InputArea-prompt").inner_text().strip("[]:")
    assert f"Cell In[{number}], line 5" in shown
    assert "----> 3     return values[len(values) // 2 + 5]" in shown
    assert "IndexError: list index out of range" in shown
    assert not re.search(r"nbdist|site-packages|run_cell", shown), shown


def test_the_stop_button_stops_the_ranks_and_the_next_cell_goes_on(notebook: Any) -> None:
    notebook.ok("done = 0")
    index = notebook.start(
        """
%%distributed -n 2
import time
import torch
import torch.distributed as dist
while True:
    dist.all_reduce(torch.ones(1))
    done += 1
    if done == 3:
        print("under way")
    time.sleep(0.05)
"""
    )
    notebook.until(index, "under way")
    pressed = time.monotonic()
    notebook.press("interrupt-kernel")
    output = notebook.wait(index, 20)
    assert time.monotonic() - pressed < 10
    assert output.error is not None and output.error["ename"] == "KeyboardInterrupt"
    notebook.shown(index).get_by_text("KeyboardInterrupt").first.wait_for()
    notebook.shot("stopped", index)
    assert int(notebook.value("done")) >= 3
    _, after = notebook.ok("%%distributed -n 2\ntotal = torch.ones(1)\ndist.all_reduce(total)\ntotal")
    assert "tensor([2.])" in after.data[0]["text/plain"]


def test_stop_with_cells_waiting_stops_those_too(notebook: Any) -> None:
    """As an ordinary cell does: what was queued behind is not run."""
    first = notebook.start("%%distributed -n 2\nimport time\nprint('under way')\ntime.sleep(100)")
    second = notebook.start("%%distributed -n 2\nprint('this should not run')")
    notebook.until(first, "under way")
    notebook.press("interrupt-kernel")
    notebook.wait(first, 20)
    assert notebook.wait(second, 20).outputs == []


def test_a_cell_that_waits_shows_nothing_and_then_its_own_progress(notebook: Any) -> None:
    first = notebook.start("%%distributed -n 2\nimport time\nprint('first')\ntime.sleep(1.5)\nprint('first ends')")
    second = notebook.start(
        """
%%distributed -n 2
from tqdm.auto import tqdm
for step in tqdm(range(20), desc="second"):
    time.sleep(0.05)
"""
    )
    notebook.until(first, "first")
    assert notebook.output(second).outputs == []
    assert notebook.cell(second).locator(".jp-InputArea-prompt").inner_text() == "[*]:"
    notebook.until(second, "second:")
    assert "first ends" in notebook.output(first).stream()
    output = notebook.wait(second)
    assert "100%" in output.stream("stderr")
    assert "first" not in output.stream("stderr") + output.stream()


def test_late_output_stands_under_its_own_cell(notebook: Any) -> None:
    early, _ = notebook.ok(
        """
%%distributed -n 2
import threading
threading.Timer(1.0, print, ["late word"]).start()
print("early")
"""
    )
    later = notebook.start("import time\nfor step in range(20):\n    print('step', step)\n    time.sleep(0.1)")
    notebook.until(early, "late word")
    assert "late" not in notebook.wait(later).stream()
    notebook.shot("late", early)


def test_restart_kernel_leaves_no_rank(open_notebook: Callable[..., Any]) -> None:
    notebook = open_notebook("lab", "restart.ipynb", ["%load_ext nbdist"])
    notebook.ok(0)
    _, output = notebook.ok("%%distributed -n 2\nimport os\nprint(os.getpid(), flush=True)")
    ranks = [psutil.Process(int(pid)) for pid in re.findall(r"\d{3,}", output.stream())]
    assert len(ranks) == 2
    notebook.press("restart-kernel")
    notebook.answer("Restart")
    left = wait_gone(ranks, 10)
    assert not left
    notebook.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
    )
    notebook.ok(0)
    assert "2" in notebook.ok("%%distributed -n 2\nprint(world_size)")[1].stream()
