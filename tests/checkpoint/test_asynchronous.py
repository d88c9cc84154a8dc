"""Copies for a save in the background, and the thread that does one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from nbdist import state
from nbdist.checkpoint.asynchronous import Background
from nbdist.checkpoint.staging import Staging


def test_copies_are_what_was_there_and_memory_is_used_again() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "half": weight[::2].half(),
        "0-dim": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
        "expanded": torch.ones(1).expand(5),
    }
    staging = Staging()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    copies, waits = staging.copy(tensors)
    weight.zero_()
    assert not waits
    assert all(torch.equal(copies[name], expected[name]) for name in tensors)
    assert all(copy.is_contiguous() and not copy.is_conj() for copy in copies.values())
    assert copies["weight"].data_ptr() == copies["tied"].data_ptr() != copies["transposed"].data_ptr()
    place, held = copies["weight"].data_ptr(), staging.nbytes
    again, _ = staging.copy(tensors)
    assert again["weight"].data_ptr() == place and staging.nbytes == held
    smaller, _ = staging.copy({"one": torch.ones(1)})
    assert smaller["one"].item() == 1 and staging.nbytes < held, "what is far too much is given back"
    staging.forget()
    assert staging.nbytes == 0


def test_one_at_a_time_its_failure_once_and_a_line_when_it_is_done(capfd: pytest.CaptureFixture[str]) -> None:
    background, go = Background(), threading.Event()
    assert background.join() is None and not background.busy
    copies, _ = background.stage({"a": torch.ones(2)})
    seen = []

    def work() -> None:
        go.wait()
        seen.append(copies["a"].tolist())

    background.start("one", work)
    assert background.busy and [one.finish(0.01) for one in state.unfinished] == [False]
    with pytest.raises(TimeoutError, match=r"one is still being saved after 0\.01 s"):
        background.join(0.01)
    threading.Timer(0.05, go.set).start()
    background.stage({"a": torch.zeros(2)})  # over the copies that the save still writes: it waits for that
    assert seen == [[1, 1]] and not background.busy and not state.unfinished and background.join() is None

    background.start("two", lambda: os.unlink("/nowhere/at all"))
    error = background.join()
    assert isinstance(error, FileNotFoundError) and background.join() is None
    out, err = capfd.readouterr()
    assert out.startswith("saved one in 0.") and out.count("\n") == 1
    assert "two could not be saved: FileNotFoundError" in err


def test_a_script_that_ends_finishes_its_save_and_says_what_failed() -> None:
    script = """
import sys, time
from nbdist.checkpoint.asynchronous import Background
def fails():
    raise OSError("the disk is full")
one, two = Background(), Background()
one.start("one", lambda: time.sleep(0.3))
two.start("two", fails)
print("the end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "saved one in 0.3 s"
    assert done.stderr.splitlines()[-1] == "nbdist: the last save, two, failed: the disk is full"
