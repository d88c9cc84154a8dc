"""What only Linux has, and the nearest means where it is missing: forced here by NBDIST_WITHOUT."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from nbdist import system


@pytest.fixture(params=["pidfd,proc", "pidfd,prctl,memfd,proc", ""], ids=["few", "none", "all"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NBDIST_WITHOUT", request.param)
    system.have.cache_clear()
    yield request.param
    system.have.cache_clear()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"])


def test_a_process_is_seen_to_end_and_signalled(means: str) -> None:
    child = sleeper()
    handle = system.Handle(child.pid)
    try:
        assert not handle.ended()
        ended = threading.Event()
        threading.Thread(target=lambda: (system.wait_for_one([handle]), ended.set()), daemon=True).start()
        assert not ended.wait(0.3)
        handle.signal(signal.SIGTERM)
        assert ended.wait(5)  # a zombie has ended: its parent may never ask for it
        assert handle.ended()
        child.wait()
        assert handle.ended() and system.Handle(child.pid).ended()
        handle.signal(signal.SIGTERM)
    finally:
        child.kill()
        child.wait()
        handle.close()


def test_processes_and_their_parents(means: str) -> None:
    child = sleeper()
    try:
        table = system.parents()
        assert table[child.pid][0] == os.getpid() and table[child.pid][1] != "Z"
        child.kill()
        end = time.monotonic() + 5
        while system.parents()[child.pid][1] != "Z" and time.monotonic() < end:
            time.sleep(0.01)
        assert system.parents()[child.pid][1] == "Z"
    finally:
        child.kill()
        child.wait()
    assert child.pid not in system.parents()


def test_a_memory_file_has_no_name(means: str) -> None:
    fd = system.memory_file("nbdist-test")
    try:
        os.ftruncate(fd, 4096)
        assert os.pwrite(fd, b"x" * 10, 5) == 10 and os.pread(fd, 3, 5) == b"xxx"
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_the_loopback_interface_is_one_of_this_machine() -> None:
    assert system.loopback() in [name for _, name in socket.if_nameindex()]


def test_kqueue_mocked_waits_for_the_end_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS: there is no kqueue here."""
    asked: list[object] = []

    class Queue:
        def control(self, changes: list[object] | None, most: int) -> list[object]:
            asked.append((changes, most))
            return []

        def close(self) -> None:
            asked.append("closed")

    for name in ("KQ_FILTER_PROC", "KQ_EV_ADD", "KQ_EV_ONESHOT", "KQ_NOTE_EXIT"):
        monkeypatch.setattr(select, name, 1, raising=False)
    monkeypatch.setattr(select, "kqueue", Queue, raising=False)
    monkeypatch.setattr(select, "kevent", lambda *arguments: arguments[0], raising=False)
    system._wait_by_kqueue([4, 5])
    assert asked == [([4], 0), ([5], 0), (None, 1), "closed"]


WINDOWS = """
import importlib, logging, multiprocessing, os, select, signal, socket, subprocess, sys, tempfile, threading
import psutil  # before: its own choice of the system is not what is tried here
for name in ("fcntl", "resource", "termios", "pwd", "grp", "posix_ipc"):
    sys.modules[name] = None
for module, names in ((os, ("fork setsid killpg sched_getaffinity memfd_create pidfd_open getuid getppid pread pwrite "
                           "set_blocking").split()),
                      (signal, "SIGKILL SIGUSR1 SIGUSR2 SIGRTMIN pidfd_send_signal pthread_kill".split()),
                      (select, ("poll", "epoll")), (socket, ("AF_UNIX", "SCM_RIGHTS"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
"""


@pytest.mark.parametrize(
    "code",
    [
        "import nbdist; nbdist.launch(print, ranks=2)",
        "from nbdist import launch; launch(print)",
        "import nbdist; nbdist.load_ipython_extension(None)",
    ],
)
def test_windows_mocked_is_refused_with_what_to_do(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS + code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"OSError: {system.WINDOWS}", done.stderr


def test_windows_mocked_imports_the_package_and_what_needs_no_ranks() -> None:
    code = WINDOWS + "import nbdist, nbdist.system, nbdist.config.detect; print(nbdist.__version__, dir(nbdist)[:1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_was_freed_goes_back_to_the_system() -> None:
    blocks = [bytearray(100_000) for _ in range(600)]
    above = bytearray(100_000)  # the heap does not end with what is freed
    process = psutil.Process()
    del blocks
    before = process.memory_info().rss
    system.give_memory_back()
    assert before - process.memory_info().rss > 30_000_000
    assert len(above) == 100_000
