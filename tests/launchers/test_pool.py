"""Starting and ending the ranks of a pool, without a kernel."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

import psutil
import pytest

from nbdist.launchers import client
from nbdist.launchers.descriptors import MOST_RANKS
from nbdist.launchers.devices import PoolOptions
from nbdist.launchers.errors import NotOnTheRanks, StartFailed
from nbdist.launchers.pool import Pool
from tests.kernel.notebook import wait_gone

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", autouse=True)
def supervised() -> Iterator[None]:
    yield
    supervisor = psutil.Process(
        client.supervisor().process.pid
    )  # other tests of this process have children of their own
    below = [supervisor, *supervisor.children(recursive=True)]
    client.end_supervisor()
    assert not wait_gone(below, 5.0)


def ranks_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_ranks_start_and_end() -> None:
    pool = Pool(PoolOptions(2), {}, client.supervisor)
    pool.start()
    try:
        processes = [psutil.Process(pid) for pid in pool.pids]
        assert pool.alive == {0, 1}
        assert all(process.is_running() for process in processes)
    finally:
        pool.end()
    assert not wait_gone(processes, 5.0)
    assert not pool.started


def test_a_second_start_is_quick() -> None:
    """The figure (hundredths of a second a rank) is in benchmarks/; here a generous limit."""
    pool = Pool(PoolOptions(2), {}, client.supervisor)
    pool.start()
    start = time.monotonic()
    pool.start()
    assert time.monotonic() - start < 5
    pool.end()


def test_a_rank_that_cannot_start_is_named_and_nothing_is_left() -> None:
    """A pool on GPUs where there is none: what every rank says is what torch says there."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: this start would work")
    owner = client.supervisor()
    owner.up()
    before = len(ranks_of(owner.process.pid))
    pool = Pool(PoolOptions(2, "cuda"), {}, client.supervisor)
    with pytest.raises(StartFailed, match=r"rank \d could not start: .*sees 0 GPUs here"):
        pool.start()
    end = time.monotonic() + 5
    while len(ranks_of(owner.process.pid)) > before and time.monotonic() < end:
        time.sleep(0.05)
    assert len(ranks_of(owner.process.pid)) <= before
    assert not pool.started


def test_a_runner_that_does_not_exist_is_named() -> None:
    pool = Pool(PoolOptions(2, runner="nbdist.no_such_runner"), {}, client.supervisor)
    with pytest.raises(StartFailed, match="no_such_runner"):
        pool.start()


def test_descriptors_do_not_pile_up() -> None:
    pool = Pool(PoolOptions(2), {}, client.supervisor)
    pool.start()
    pool.end()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pool.start()
        pool.end()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("checked", [True, False])
def test_too_many_ranks_for_the_limit_of_open_files(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is made; where the count was wrong, all that was made is closed."""
    client.supervisor().up()
    if not checked:
        monkeypatch.setattr("nbdist.launchers.pool.check_descriptors", lambda options: None)
    pool = Pool(PoolOptions(30), {}, client.supervisor)
    before = len(os.listdir("/proc/self/fd"))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, usual[1]))
    try:
        with pytest.raises(StartFailed, match="cannot start 30 ranks on the CPU: ") as caught:
            pool.start()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert not pool.started
    if checked:
        text = str(caught.value)
        assert f"its limit is {before + 40}" in text and "Take at most 2 ranks, or" in text and "`ulimit -n " in text


def test_no_pool_has_thousands_of_ranks() -> None:
    with pytest.raises(StartFailed, match=f"6000 ranks on the CPU: {MOST_RANKS} are the most of one pool"):
        Pool(PoolOptions(6000), {}, client.supervisor).start()


def test_what_is_gone_says_so() -> None:
    pool = Pool(PoolOptions(2), {}, client.supervisor)
    with pytest.raises(NotOnTheRanks, match="they have ended"):
        pool.peek("x", [0])


def test_a_pool_on_a_mocked_apple_gpu_has_its_device_and_a_group() -> None:
    """There is no MPS here: the rank is told so all the same, and puts nothing on it."""
    pool = Pool(PoolOptions(1, "mps", devices=("0",)), {}, client.supervisor)
    pool.start()
    try:
        told = pool.ask_aside("status", 10.0)
        assert (told[0]["device"], told[0]["memory"], told[0]["cell"]) == ("mps", None, None)
    finally:
        pool.end()
