"""A save that is killed, at each of its operations on files: the last whole one loads, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist import Accelerator
from nbdist.utils import ProjectConfiguration

_OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "close")


def _die_at(number: int) -> None:
    """In this process: SIGKILL before the operation of this number; a write gets half of its bytes out first."""
    left = number

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return operation

    for name in _OPERATIONS:
        setattr(os, name, counted(name, getattr(os, name)))


def in_a_child(act: Callable[[], Any]) -> int:
    """Run it in a fork of this process; returns its exit status: 0, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            act()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def made(folder: Path, **naming: Any) -> tuple[Accelerator, nn.Module]:
    configuration = ProjectConfiguration(project_dir=str(folder), **naming)
    accelerator = Accelerator(project_config=configuration)
    model = nn.Linear(40, 30)
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    return accelerator, model


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)


def value_in(model: nn.Module) -> float:
    (value,) = {one for parameter in model.parameters() for one in parameter.flatten().tolist()}
    return value


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_save_over_another_one_killed_at_each_operation(tmp_path: Path) -> None:
    """Every point: either the old one or the new one, whole; and a later save cleans up, unless it is killed too."""
    accelerator, model = made(tmp_path)
    path, number, seen = tmp_path / "ck", 0, set()
    while True:
        number += 1
        fill(model, 1.0)
        accelerator.save_state(path)
        assert os.listdir(tmp_path) == ["ck"]

        def save(at: int = number) -> None:
            fill(model, 2.0)
            _die_at(at)
            accelerator.save_state(path)

        status = in_a_child(save)
        assert status in (0, -signal.SIGKILL)
        accelerator.load_state(path)
        assert value_in(model) in (1.0, 2.0)
        seen.add(value_in(model))
        before = value_in(model)
        in_a_child(lambda at=number: save(max(at - 3, 1)))  # and the save that would clean up is killed as well
        accelerator.load_state(path)
        assert value_in(model) in (before, 2.0)
        if status == 0:
            break
    assert number > 15 and seen == {1.0, 2.0}


def test_a_first_save_killed_at_each_operation(tmp_path: Path) -> None:
    accelerator, model = made(tmp_path)
    path, number = tmp_path / "deep" / "ck", 0
    while True:
        number += 1
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)

        def save(at: int = number) -> None:
            fill(model, 2.0)
            _die_at(at)
            accelerator.save_state(path)

        status = in_a_child(save)
        fill(model, 0.0)
        try:
            accelerator.load_state(path)
        except ValueError as error:
            assert status and ("does not exist" in str(error) or "no checkpoint" in str(error))
        else:
            assert value_in(model) == 2.0
        fill(model, 3.0)
        accelerator.save_state(path)
        assert os.listdir(path.parent) == ["ck"]
        accelerator.load_state(path)
        assert value_in(model) == 3.0
        if status == 0:
            break
    assert number > 10


def test_automatic_names_with_a_limit_killed_at_each_operation(tmp_path: Path) -> None:
    """The newest good one is never deleted, and what is deleted is never half there."""
    accelerator, model = made(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    number, value = 0, 0.0
    while True:
        number += 1
        value += 1.0
        fill(model, value)
        accelerator.save_state()

        def save(at: int = number, value: float = value) -> None:
            fill(model, value + 0.5)
            _die_at(at)
            accelerator.save_state()

        status = in_a_child(save)
        loaded = accelerator.load_state()
        assert value_in(model) in (value, value + 0.5)
        for name in os.listdir(tmp_path / "checkpoints"):
            if ".partial-" not in name and ".deleted-" not in name:
                accelerator.load_state(tmp_path / "checkpoints" / name)  # each that is there is whole
        accelerator.load_state(loaded.path)
        if status == 0:
            break
    accelerator.save_state()
    assert len(os.listdir(tmp_path / "checkpoints")) == 2
    assert number > 15
