"""save_state and load_state on several ranks: one error on all, in time, and nothing changed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Holding:
    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def told_by(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def filled(model: nn.Module, value: float) -> nn.Module:
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def bad_saves(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    from nbdist import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(filled(nn.Linear(2, 2), 1.0))
    path = f"{folder}/ck"
    accelerator.save_state(path)
    filled(accelerator.unwrap_model(model), 2.0)
    told = {"places": told_by(lambda: accelerator.save_state(f"{folder}/of-{rank}"))}
    os.mkdir(f"{folder}/foreign-{rank}")
    Path(f"{folder}/foreign-{rank}/thesis.txt").write_text("years of work")
    accelerator.wait_for_everyone()
    told["foreign"] = told_by(lambda: accelerator.save_state(f"{folder}/foreign-0"))
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    told["full"] = told_by(lambda: accelerator.save_state(path))
    told["full, behind"] = told_by(
        lambda: (accelerator.save_state(path, async_save=True), accelerator.wait_for_checkpoint())
    )
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    meter = Holding(odd=object() if rank == 1 else 0)
    accelerator.register_for_checkpointing(meter)
    told["odd"] = told_by(lambda: accelerator.save_state(path))
    meter.held = {"odd": rank}
    only_here = nn.Linear(1, 1)
    if rank == 1:
        accelerator._named.note("models", only_here, only_here)
    told["others"] = told_by(lambda: accelerator.save_state(path))
    accelerator._named._entries["models"] = accelerator._named._entries["models"][:1]
    told["there"] = sorted(os.listdir(folder))
    accelerator._named._entries["objects"].clear()
    accelerator.load_state(path)
    told["value"] = accelerator.unwrap_model(model).weight[0, 0].item()
    return told


@pytest.mark.ranks
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    first, second = run_ranks(bad_saves, 2, str(tmp_path))
    for told in (first, second):
        assert "save to different places: rank 0 to " in told["places"]
        assert "of-0; rank 1 to " in told["places"] and "of-1." in told["places"]
        assert "prepared other things" in told["others"]
        assert told["there"] == ["ck", "foreign-0", "foreign-1"]
        assert told["value"] == 1.0
    assert "NotACheckpoint" in first["foreign"] and "thesis.txt" in first["foreign"]
    assert "rank 0 failed" in second["foreign"] and "thesis.txt" in second["foreign"]
    for case in ("full", "full, behind"):
        assert second[case].startswith("OSError: [Errno 27] File too large"), second[case]
        assert "rank 1" in first[case] and "File too large" in first[case], first[case]
    assert "object 'meter'" in second["odd"] and "rank 1 failed" in first["odd"]
    assert (tmp_path / "foreign-0" / "thesis.txt").read_text() == "years of work"


def on_own_disk(folder: str) -> bool:
    """From now on this process is on another machine, as far as its disk is concerned. False: that is not allowed."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    private, new_namespace = 1 << 18 | 1 << 14, 0x20000
    if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private, None):
        return False
    return not libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None)


def two_machines(rank: int, ranks: int, folder: str) -> dict[str, str]:
    from nbdist import Accelerator
    from nbdist.utils import ProjectConfiguration

    if rank == 1:
        os.environ["LOCAL_RANK"] = "0"
        if not on_own_disk(folder):
            return {"skip": "it is not allowed to have a mount namespace"}
    accelerator = Accelerator()
    model = filled(nn.Linear(2, 2), 1.0)
    model = accelerator.prepare(model)
    told = {"shared": told_by(lambda: accelerator.save_state(f"{folder}/ck"))}
    told["left"] = " ".join(os.listdir(folder))
    configuration = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, save_on_each_node=True)
    accelerator = Accelerator(project_config=configuration)
    model = accelerator.prepare(model)
    accelerator.save_state()
    told["each"] = " ".join(sorted(os.listdir(f"{folder}/checkpoints/checkpoint_0")))
    filled(accelerator.unwrap_model(model), 2.0)
    accelerator.load_state()
    told["value"] = str(accelerator.unwrap_model(model).weight[0, 0].item())
    return told


@pytest.mark.ranks
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace of its own")
def test_machines_without_a_common_disk(tmp_path: Path) -> None:
    """A rank that does not see the folder is named; or each machine saves all of it."""
    first, second = run_ranks(two_machines, 2, str(tmp_path))
    if "skip" in second:
        pytest.skip(second["skip"])
    assert second["shared"].startswith("OSError: rank 1 does not see ") and "which rank 0 has made" in second["shared"]
    assert "rank 1 failed" in first["shared"] and "save_on_each_node" in first["shared"]
    assert first["left"] == second["left"] == ""
    assert first["each"] == "manifest.json rank-00000.safetensors"
    assert second["each"] == "manifest.json rank-00001.safetensors"
    assert first["value"] == second["value"] == "1.0"


# ---------------------------------------------------------------- damage


def bad_loads(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    from nbdist import Accelerator

    accelerator = Accelerator(strategy="fsdp")
    model = filled(nn.Linear(8, 8), 1.0)
    model, _optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    whole = f"{folder}/whole"
    accelerator.save_state(whole)
    told: dict[str, Any] = {}
    filled(accelerator.unwrap_model(model), 2.0)

    def damaged(name: str, damage: Callable[[str], Any]) -> None:
        path = f"{folder}/{name}"
        if rank == 0:
            shutil.copytree(whole, path)
            damage(path)
        accelerator.wait_for_everyone()
        told[name] = told_by(lambda: accelerator.load_state(path))

    def flip(path: str) -> None:
        with open(f"{path}/rank-00001.safetensors", "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))

    damaged("flipped", flip)
    damaged("short", lambda path: os.truncate(f"{path}/rank-00001.safetensors", 100))
    damaged("gone", lambda path: os.unlink(f"{path}/rank-00001.safetensors"))
    damaged("bare", lambda path: os.unlink(f"{path}/manifest.json"))
    damaged("half", lambda path: os.truncate(f"{path}/manifest.json", 400))
    told["nowhere"] = told_by(lambda: accelerator.load_state(f"{folder}/nowhere"))
    told["places"] = told_by(lambda: accelerator.load_state(f"{folder}/{'whole' if rank else 'flipped'}"))
    told["values"] = set(accelerator.unwrap_model(model).weight.full_tensor().flatten().tolist())
    accelerator.load_state(whole)
    told["at last"] = set(accelerator.unwrap_model(model).weight.full_tensor().flatten().tolist())
    return told


@pytest.mark.ranks
def test_a_damaged_checkpoint_is_one_error_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(bad_loads, 2, str(tmp_path))
    for told in (first, second):
        assert "rank-00001.safetensors" in told["flipped"] and "damaged: its checksum" in told["flipped"]
        assert "has 100 bytes, and was written with" in told["short"]
        assert "rank-00001.safetensors" in told["gone"] and "No such file" in told["gone"]
        assert "is no checkpoint: it has no manifest.json" in told["bare"]
        assert "it cannot be read" in told["half"]
        assert "does not exist" in told["nowhere"]
        assert "load from different places" in told["places"]
        assert told["values"] == {2.0} and told["at last"] == {1.0}
