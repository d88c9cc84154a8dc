"""save_state(async_save=True): what is in it, who waits for whom, what fails, and a kill in between."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist import Accelerator
from nbdist.checkpoint import behind, place, writing
from nbdist.utils import ProjectConfiguration
from tests.ranks import run_ranks


def _slow(monkeypatch: Any, go: threading.Event) -> None:
    """From now on writing begins when `go` is set."""
    write = writing.write

    def waits(*args: Any) -> None:
        go.wait()
        write(*args)

    monkeypatch.setattr(writing, "write", waits)


def test_the_values_of_that_moment_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    go = threading.Event()
    _slow(monkeypatch, go)
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    expected = [one.clone() for one in model.parameters()]
    assert accelerator.save_state("first", async_save=True) == str(tmp_path / "first")
    step()
    assert not (tmp_path / "first").exists() and not torch.equal(model.weight, expected[0])
    threading.Timer(0.1, go.set).start()
    accelerator.save_state("second", async_save=True)  # over the same memory: when the first is written
    assert (tmp_path / "first").exists()
    accelerator.load_state("first")  # waits for the second
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]
    assert all(map(torch.equal, model.parameters(), expected))
    step()
    again = model.weight.clone()
    accelerator.load_state("second")
    assert torch.equal(model.weight, again), "the optimizer's state was that of the moment too"
    assert capfd.readouterr().out.startswith("saved first in 0.")
    accelerator.wait_for_checkpoint()  # nothing is under way

    go.clear()
    accelerator.save_state("third", async_save=True)
    threading.Timer(0.1, go.set).start()
    anew = Accelerator(cpu=True)  # as where a cell runs again: it waits for the other one's save
    model = anew.prepare(nn.Linear(3, 3))
    anew.load_state("third", strict=False)
    assert torch.equal(model.weight, again)
    assert accelerator._behind._staging.nbytes > 0
    accelerator.free_memory()
    assert accelerator._behind._staging.nbytes == 0


def test_what_fails_is_said_at_once_and_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = accelerator.prepare(nn.Linear(3, 3))
    accelerator.save_state(async_save=True)
    accelerator.wait_for_checkpoint()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.blocks, "write", full)
        accelerator.save_state(async_save=True)
        with pytest.raises(OSError, match="No space left"):
            accelerator.save_state(async_save=True)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"], "and nothing of it is left"
    assert "checkpoint_1 could not be saved: OSError: [Errno 28] No space left" in capfd.readouterr().err
    accelerator.save_state(async_save=True)
    accelerator.wait_for_checkpoint()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"], "the limit counts behind the loop too"
    with torch.no_grad():
        expected = model.weight.clone()
        model.weight.zero_()
    accelerator.load_state()
    assert torch.equal(model.weight, expected)


def test_stopped_while_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(nn.Linear(2, 2))

    def stopped(value: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(accelerator._behind._staging, "copy", stopped)
        with pytest.raises(KeyboardInterrupt):
            accelerator.save_state(tmp_path / "it", async_save=True)
    assert os.listdir(tmp_path) == []
    accelerator.save_state(tmp_path / "it", async_save=True)
    accelerator.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["it"]


def _on_ranks(rank: int, ranks: int, folder: str) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(nn.Linear(2, 2))
    path = os.path.join(folder, "it")
    accelerator.save_state(path, async_save=True)
    total = accelerator.reduce(torch.ones(1))  # collectives of the loop go on meanwhile
    accelerator.wait_for_checkpoint()
    found: list[Any] = [total.item(), place.found(path) is not None]
    write = writing.blocks.write
    if rank == 1:

        def fails(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        writing.blocks.write = fails
    accelerator.save_state(path, async_save=True)
    try:
        accelerator.wait_for_checkpoint()
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    writing.blocks.write = write
    found.append(sorted(os.listdir(folder)))
    accelerator.load_state(path)

    # One that has ended is not waited for; one that is only slow finds that there is nothing to write to any more.
    go, watched = threading.Event(), behind._watched
    if rank == 0:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        behind._watched = lambda ranks: watched([ranks[0], (ranks[0][0], dead.pid, 0.0)])
    else:
        writing.blocks.write = lambda *args: go.wait() and write(*args)
    accelerator.save_state(path, async_save=True)
    behind._watched = watched
    if rank == 0:
        accelerator._behind._last.done.wait(20)
    accelerator.wait_for_everyone()
    go.set()
    found.append(str(accelerator._behind.join(20)))
    return [*found, sorted(os.listdir(folder))]


@pytest.mark.ranks
def test_two_ranks_one_of_which_fails_and_then_ends(tmp_path: Path) -> None:
    first, second = run_ranks(_on_ranks, 2, str(tmp_path), limit=100)
    assert first[:2] == second[:2] == [2, True]
    assert second[2] == "OSError: [Errno 28] No space left on device"
    assert first[2].startswith("RuntimeError: rank 1 could not write its part of ") and "No space left" in first[2]
    assert first[3] == second[3] == ["it"], "the one before is there"
    assert first[4].startswith("rank 1 has ended, and has not written its part of ")
    assert second[4] == "rank 0 has given it up"
    assert first[5] == ["it"]
