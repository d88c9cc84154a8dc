"""What the environment leaves visible, and what nvidia-smi tells. There is no GPU here: counts and the program are
stand-ins.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nbdist.config import gpus

A, B = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-11111111-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("environment", "count", "ids", "says"),
    [
        ({}, 2, ("0", "1"), "this machine has 2 GPUs"),
        ({}, 0, (), "this machine has no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "1, 0"}, 2, ("1", "0"), "CUDA_VISIBLE_DEVICES=1, 0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, (), "is empty"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, (), "'-1' is no device"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1, ("0",), "only what stands before '-1' counts"),
        ({"CUDA_VISIBLE_DEVICES": "junk"}, 0, (), "'junk' is no device"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, 0, (), "has 0 twice"),
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, 1, ("0",), "there is no device 9"),
        ({"CUDA_VISIBLE_DEVICES": f"{A},{B}"}, 2, (A, B), A),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, 1, ("MIG-1234",), "MIG-1234"),
    ],
)
def test_visible_of_a_mocked_count(environment: dict[str, str], count: int, ids: tuple[str, ...], says: str) -> None:
    devices = gpus.combine(environment, count)
    assert devices.ids == ids and says in devices.why
    assert devices.kind == ("cuda" if ids else "")


def test_amd_mocked_takes_its_own_variable_first() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2"}
    assert gpus.combine(both, 1, hip=True) == gpus.Devices(
        "cuda", ("2",), "HIP_VISIBLE_DEVICES=2", "HIP_VISIBLE_DEVICES"
    )
    only_cudas = gpus.combine({"CUDA_VISIBLE_DEVICES": "1"}, 1, hip=True)
    assert (only_cudas.ids, only_cudas.variable) == (("1",), "CUDA_VISIBLE_DEVICES")
    assert gpus.combine({}, 2, hip=True).variable == "HIP_VISIBLE_DEVICES"
    assert gpus.combine(both, 2).variable == "CUDA_VISIBLE_DEVICES"


def test_looking_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with gpus._as_in({"HIP_VISIBLE_DEVICES": "1"}):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ and os.environ["HIP_VISIBLE_DEVICES"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5" and "HIP_VISIBLE_DEVICES" not in os.environ


def nvidia_smi(folder: Path, gpu_rows: str, app_rows: str) -> str:
    """A program of that name which answers with these rows; returns the PATH to find it by."""
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\n--query-gpu*) cat <<X\n{gpu_rows}\nX\n;;\n*) cat <<X\n{app_rows}\nX\n;;\nesac\n'
    )
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


ROWS = f"0, {A}, NVIDIA H100, 81559, 70000, Default, 9.0\n1, {B}, NVIDIA H100, 81559, 4, Exclusive_Process, 9.0"


def test_a_mocked_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, ROWS, f"{A}, 4242, 69000\n{B}, 4243, [N/A]"))
    first, second = gpus.gpus()
    assert (first.uuid, first.memory, first.used) == (A, 81559 << 20, 70000 << 20)
    assert (second.name, second.mode, second.capability) == ("NVIDIA H100", "Exclusive_Process", "9.0")
    assert gpus.holders() == [gpus.Holder(A, 4242, 69000 << 20), gpus.Holder(B, 4243, None)]
    assert gpus.match(["1", A[:12], "MIG-1"], [first, second], {}) == {"1": second, A[:12]: first}


def test_a_number_is_not_matched_where_mocked_models_differ() -> None:
    """CUDA counts the fastest first, nvidia-smi by the bus."""
    one = gpus.Gpu("0", A, "NVIDIA T4", 1, 0, "Default", "7.5")
    two = gpus.Gpu("1", B, "NVIDIA H100", 1, 0, "Default", "9.0")
    assert gpus.match(["0"], [one, two], {}) == {}
    assert gpus.match(["0"], [one, two], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == {"0": one}


def test_an_nvidia_smi_that_hangs_or_fails_is_given_up_mocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus.gpus(limit=0.2) == []
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert gpus.gpus() == []


def test_without_torchs_own_count_a_child_counts() -> None:
    """The child is real, and counts what there is: this torch has taken its function away."""
    import torch

    without = SimpleNamespace(cuda=SimpleNamespace(), version=SimpleNamespace(hip=None))
    assert gpus._count(without, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert gpus._count(without, {}) == torch.cuda.device_count()
