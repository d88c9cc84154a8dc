"""Pools on GPUs: which are in the way of which, and who holds a GPU. There is none here: nvidia-smi is a stand-in, and
the pools are never started.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.config.detect import NotEnoughDevices, choose_ranks
from nbdist.config.gpus import combine
from nbdist.launchers.devices import DevicesHeld, PoolOptions, check_free, in_the_way, who_is_there
from nbdist.launchers.turn import Turn
from nbdist.worker.environment import rank_variables
from tests.config.test_gpus import A, B, nvidia_smi


def on(*devices: str, **environment: str) -> PoolOptions:
    return PoolOptions(len(devices), "cuda", devices=devices)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def rows(first: str, second: str, apps: str = "") -> None:
        gpus = f"0, {A}, NVIDIA H100, 81920, {first}, 9.0\n1, {B}, NVIDIA H100, 81920, {second}, 9.0"
        monkeypatch.setenv("PATH", nvidia_smi(tmp_path, gpus, apps))

    return rows


def test_names_of_pools_on_mocked_gpus() -> None:
    assert str(on("0", "2")) == "2 ranks on GPUs 0, 2"
    assert str(on(A)) == "1 rank on GPU GPU-8932f937"
    assert str(PoolOptions(1, "mps", devices=("0",))) == "1 rank on the Apple GPU"
    # However it was asked for, the same GPUs are the same pool.
    both = [choose_ranks(**asked, devices=lambda: combine({}, 2)) for asked in ({}, {"ranks": 2}, {"gpus": (0, 1)})]
    assert len({PoolOptions.of(choice) for choice in both}) == 1


def test_ranks_see_their_pools_gpus_only_mocked() -> None:
    spec = {"rank": 1, "world_size": 2, "pool": "p", "port": 1, "threads": 1, "device": "cuda"}
    given = rank_variables({**spec, "devices": ("2", "0"), "variable": "CUDA_VISIBLE_DEVICES"})
    assert given["CUDA_VISIBLE_DEVICES"] == "2,0" and given["LOCAL_RANK"] == "1" and "ACCELERATE_USE_CPU" not in given
    amd = rank_variables({**spec, "devices": ("1",), "variable": "HIP_VISIBLE_DEVICES"})
    assert amd["HIP_VISIBLE_DEVICES"] == "1" and "CUDA_VISIBLE_DEVICES" not in amd
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables({**spec, "device": "cpu", "devices": ()})


def test_only_pools_on_the_same_mocked_gpu_are_in_the_way(smi: Any) -> None:
    smi("0, Default", "0, Default")
    assert in_the_way(on("0", "1"), on("1", "2")) and in_the_way(on("0"), on("0"))
    assert not in_the_way(on("0", "1"), on("2", "3"))
    assert not in_the_way(on("0"), PoolOptions(2)) and not in_the_way(PoolOptions(2), on("0"))
    assert in_the_way(on(B), on("1")), "by number and by name"
    assert not in_the_way(on(B), on("0"))


def test_a_mocked_gpu_that_a_process_has_alone_is_refused_by_its_name(smi: Any) -> None:
    holder = subprocess.Popen(["sleep", "100"])
    try:
        smi("9, Default", "7000, Exclusive_Process", f"{B}, {holder.pid}, 6900")
        check_free(on("0"))
        with pytest.raises(DevicesHeld) as told:
            check_free(on("0", "1"))
        text = str(told.value)
        assert text.startswith(f"GPU 1 (NVIDIA H100) is held by process {holder.pid} (sleep of ")
        for part in ("6.7 GiB)", "exclusive-process mode", "--cpus 2", "Nothing was started or ended"):
            assert part in text
        check_free(on("0", "1"), ours={holder.pid})  # an idle pool of this notebook: it will have ended
        assert who_is_there(on("1")).startswith(f". On these GPUs: process {holder.pid} (sleep of ")
    finally:
        holder.kill()
        holder.wait()


def test_a_mocked_gpu_without_room_is_refused(smi: Any) -> None:
    smi("81900, Default", "4, Default", f"{A}, {os.getpid()}, 81800")
    with pytest.raises(NotEnoughDevices, match=r"GPU 0 .* held by this notebook's own process, 79.9 GiB \(`del` what"):
        check_free(on("0"))
    smi("81900, Default", "4, Default")
    with pytest.raises(DevicesHeld, match=r"a process that cannot be seen from here .*: 0.0 GiB of 80.0 GiB are free"):
        check_free(on("0"))
    smi("81900, Default", "4, Default", f"{A}, 1, 81800")
    check_free(on("0"), ours={1})
    check_free(on("1"))
    smi("4, Prohibited", "4, Default")
    with pytest.raises(DevicesHeld, match="Prohibited"):
        check_free(on("0"))


class FakePool:
    """A pool that was never started says that it was."""

    def __init__(self, options: PoolOptions, pids: list[int]) -> None:
        self.options, self.pids, self.ended, self.namespace, self.home = options, pids, False, {}, None
        self.unsettled, self.turn = None, Turn(self)  # type: ignore[arg-type]

    @property
    def started(self) -> bool:
        return bool(self.pids)

    def end(self) -> None:
        self.pids = []


def test_only_idle_pools_on_the_wanted_mocked_gpus_end_and_none_when_they_are_held(smi: Any) -> None:
    from nbdist.magics.session import Session

    smi("9, Default", "9, Default")
    said: list[str] = []
    screen: Any = SimpleNamespace(notice=said.append)
    here = SimpleNamespace(user_ns={})
    session = Session.__new__(Session)
    session.shell = here
    pools = [FakePool(on("0"), [11]), FakePool(on("1", "2"), [12, 13]), FakePool(PoolOptions(2), [14, 15])]
    wanted: Any = FakePool(on("2", "3"), [])
    session.pools = {pool.options: pool for pool in [*pools, wanted]}  # type: ignore[misc]
    session._free_devices(wanted, screen)
    assert [pool.started for pool in pools] == [True, False, True]
    [line] = said
    assert line.startswith("the 2 ranks on GPUs 1, 2 were ended: their devices are needed")
    smi("81900, Default", "9, Default", f"{A}, 1, 81800")
    with pytest.raises(DevicesHeld):
        session._free_devices(FakePool(on("0", "9"), []), screen)  # type: ignore[arg-type]
    assert pools[0].started and len(said) == 1
