"""`nbdist.launch`: one function on N ranks, from a script, from a module, from a thread; nothing is left afterwards."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbdist
from nbdist.launchers.errors import CannotComeBack, CellTimeout, RankExited, RankLost
from nbdist.shipping import CannotShip

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert ranks_alive() == []


def ranks_alive(seconds: float = 5.0) -> list[int]:
    """Processes below this one that are ranks still, after so long; the supervisor and its fork server stay."""
    end = time.monotonic() + seconds
    while True:
        alive = [p.pid for p in psutil.Process().children(recursive=True) if _is_rank(p)]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)


def _is_rank(process: psutil.Process) -> bool:
    """A rank is a child of the fork server, which is one of the supervisor, which is ours."""
    try:
        above = [parent.pid for parent in process.parents()]
        return process.status() != psutil.STATUS_ZOMBIE and above.index(os.getpid()) >= 2
    except (psutil.Error, ValueError):
        return False


# ------------------------------------------------------------------ functions of this module


def who(scale: int = 1) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank() * scale, dist.get_world_size()


def summed(tensor: Any) -> Any:
    import torch.distributed as dist

    tensor = tensor + dist.get_rank()
    dist.all_reduce(tensor)
    return tensor


def grow(items: list[int], table: dict[str, Any], tensor: Any) -> str:
    import torch.distributed as dist

    items.append(dist.get_rank())
    table["rank"] = dist.get_rank()
    tensor += 1 + dist.get_rank()
    return "done"


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self, by: int) -> int:
        self.calls += by
        return self.calls

    def __call__(self) -> int:
        return self.count(10)


def fail(rank: int, error: BaseException) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise error
    dist.all_reduce(torch.ones(1))


def leave(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(5)
    dist.all_reduce(torch.ones(1))


def test_values_of_every_rank() -> None:
    values = nbdist.launch(who, 10, ranks=2)
    assert values == [(0, 2), (10, 2)] and values[1] == (10, 2) and len(values) == 2
    assert repr(values) == "[0: (0, 2), 1: (10, 2)]"
    assert nbdist.launch(who, ranks=3, scale=2) == [(0, 3), (2, 3), (4, 3)]
    assert nbdist.launch(who, ranks=1) == [(0, 1)]


def test_tensors() -> None:
    import torch

    values = nbdist.launch(summed, torch.zeros(100_000), ranks=2)
    assert [value.shape for value in values] == [(100_000,)] * 2
    assert all(bool((value == 1).all()) for value in values)


def test_arguments_that_rank_0_changes_are_changed_here() -> None:
    import torch

    items, table, tensor = [1], {"a": 1}, torch.zeros(2)
    ptr = tensor.data_ptr()
    assert list(nbdist.launch(grow, items, table, tensor=tensor, ranks=2)) == ["done"] * 2
    assert (items, table, tensor.tolist(), tensor.data_ptr()) == ([1, 0], {"a": 1, "rank": 0}, [1.0, 1.0], ptr)


@pytest.mark.parametrize("kind", ["partial", "bound method", "callable object", "builtin"])
def test_every_kind_of_callable(kind: str) -> None:
    counter = Counter()
    if kind == "partial":
        assert nbdist.launch(functools.partial(who, scale=3), ranks=2) == [(0, 2), (3, 2)]
    elif kind == "bound method":
        assert nbdist.launch(counter.count, 2, ranks=2) == [2, 2]
        assert counter.calls == 2
    elif kind == "callable object":
        assert nbdist.launch(counter, ranks=2) == [10, 10]
        assert counter.calls == 10
    else:
        assert nbdist.launch(max, 3, 5, ranks=2) == [5, 5]


def test_lambdas_and_local_functions() -> None:
    base = [1, 2]

    def local(x: int) -> int:
        return sum(base) + x

    assert nbdist.launch(local, 3, ranks=2) == [6, 6]
    assert nbdist.launch(lambda: len(base), ranks=2) == [2, 2]


def test_a_ranks_exception_is_raised_here() -> None:
    with pytest.raises(KeyError, match="user bug") as caught:
        nbdist.launch(fail, 1, KeyError("user bug"), ranks=2)
    assert caught.value.__notes__ == ["rank 1 failed first; cut off by that: rank 0"]
    frames = [entry for entry in caught.traceback if str(entry.path) == __file__]
    assert frames[-1].name == "fail" and "raise error" in str(frames[-1].statement)
    with pytest.raises(RankExited, match="exited with code 3"):
        nbdist.launch(fail, 0, SystemExit(3), ranks=2)


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankLost, match="rank 1 exited with code 5"):
        nbdist.launch(leave, 1, ranks=2)
    assert nbdist.launch(who, ranks=2)[1] == (1, 2)


def test_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(CellTimeout, match=r"rank 0 is in .*rank 1 is in"):
        nbdist.launch(time.sleep, 60, ranks=2, timeout=0.5)
    assert time.monotonic() - start < 30


def test_what_cannot_travel_is_refused_before_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotShip, match="lock"):
        nbdist.launch(print, {"a": [threading.Lock()]}, ranks=2)
    with pytest.raises(CannotComeBack, match="rank 0 cannot come back"):
        nbdist.launch(threading.Lock, ranks=2)
    with pytest.raises(CannotComeBack, match="cannot come back"):
        nbdist.launch(bytes, 100_000, ranks=2, limit=1000)
    assert capfd.readouterr().out == ""


def talk() -> None:
    import torch.distributed as dist

    print("hello", dist.get_rank())
    print("problem on rank", dist.get_rank(), file=sys.stderr)


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [
        ("merged", ["[1] the same 2 lines but for the rank", "hello 0"], ["problem on rank 0"]),
        ("rank0", ["hello 0"], ["problem on rank 0"]),
        ("none", [], []),
    ],
)
def test_output(capsys: pytest.CaptureFixture[str], mode: str, out: list[str], err: list[str]) -> None:
    nbdist.launch(talk, ranks=2, output=mode)
    told = capsys.readouterr()
    assert (sorted(told.out.splitlines()), sorted(told.err.splitlines())) == (out, err)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="merged, all, rank0, none"):
        nbdist.launch(who, ranks=2, output="some")
    with pytest.raises(ValueError, match=r"^ranks=0: .*1 or more"):
        nbdist.launch(who, ranks=0)
    with pytest.raises(ValueError, match=r"^gpus=8: this machine has no GPU. Use ranks=8 to run 8 ranks on the CPU"):
        nbdist.launch(who, gpus=8)
    with pytest.raises(ValueError, match=r"^ranks and gpus exclude each other"):
        nbdist.launch(who, ranks=2, gpus=2)
    with pytest.raises(TypeError, match="takes a function"):
        nbdist.launch(3, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="skale") as caught:
        nbdist.launch(who, ranks=2, skale=2)
    assert "worker" not in "".join(str(entry.path) for entry in caught.traceback)


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    monkeypatch.chdir(tmp_path)
    values = nbdist.launch(
        lambda: [os.environ.get("FROM_HERE"), os.environ.get("GIVEN"), os.environ["RANK"], os.getcwd()],
        ranks=2,
        env={"GIVEN": "x"},
    )
    assert values == [["here", "x", str(rank), str(tmp_path)] for rank in range(2)]
    assert "GIVEN" not in os.environ and "RANK" not in os.environ


def test_from_a_thread() -> None:
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(nbdist.launch(who, ranks=2)))
    thread.start()
    thread.join(60)
    assert told == [[(0, 2), (1, 2)]]


def test_two_at_the_same_time() -> None:
    told: dict[int, Any] = {}

    def go(scale: int) -> None:
        told[scale] = nbdist.launch(who, scale, ranks=2)

    threads = [threading.Thread(target=go, args=(scale,)) for scale in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == {3: [(0, 2), (3, 2)], 7: [(0, 2), (7, 2)]}


# ------------------------------------------------------------------ scripts


def script(tmp_path: Path, text: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script; nothing of it is alive afterwards."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    mark = f"NBDIST_TEST_{os.getpid()}_{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1", mark: "1"},
    )
    assert done.returncode == expect, done.stdout + done.stderr
    end = time.monotonic() + 5
    while (left := _with_mark(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    return done


def _with_mark(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def test_a_script(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import dataclasses
        import nbdist

        @dataclasses.dataclass
        class Told:
            rank: int
            text: str

        factor = 3
        calls = []

        def helper(x):
            return x * factor

        def main(x, items):
            import torch.distributed as dist
            calls.append(x)
            items.append("there")
            print("on rank", dist.get_rank())
            return Told(dist.get_rank(), f"{helper(x)}")

        items = []
        values = nbdist.launch(main, 2, items, ranks=2)
        print([isinstance(value, Told) for value in values], values[1], items, calls)
        factor = 4
        print(nbdist.launch(main, 2, items, ranks=2, output="none")[0].text, items, calls)
        print(nbdist.launch(lambda: helper(5), ranks=2))
        """,
    )
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["[1] the same 1 line but for the rank", "on rank 0"]
    assert lines[2] == "[True, True] Told(rank=1, text='6') ['there'] [2]"
    assert lines[3] == "8 ['there', 'there'] [2, 2]"
    assert lines[4] == "[0: 20, 1: 20]"


def test_a_script_that_fails_shows_the_ranks_lines(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import nbdist

        class Mine(Exception): pass

        def main():
            raise Mine("from a rank")

        try:
            nbdist.launch(main, ranks=2)
        except Mine as error:
            print("caught", error, error.__notes__)
        nbdist.launch(main, ranks=2)
        """,
        expect=1,
    )
    assert done.stdout == "caught from a rank ['on ranks 0, 1']\n"
    assert re.search(r'script.py", line 7, in main\n    raise Mine\("from a rank"\)', done.stderr), done.stderr
    assert "Mine: from a rank" in done.stderr and "on ranks 0, 1" in done.stderr


def test_a_script_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, signal, threading, time
        import nbdist

        threading.Timer(0.5, lambda: None).start()

        def main(parent):
            time.sleep(0.3)
            os.kill(parent, signal.SIGKILL)
            time.sleep(60)

        nbdist.launch(main, os.getpid(), ranks=2)
        """,
        expect=-9,
    )


def test_with_the_usual_guard(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import nbdist

        def main():
            return __name__

        if __name__ == "__main__":
            print("once", nbdist.launch(main, ranks=2))
        """,
    )
    assert done.stdout == "once [0: '__main__', 1: '__main__']\n"


def test_an_argument_that_cannot_travel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()
    inside = r"a lock, which cannot leave its process\. Create it inside who"
    with pytest.raises(CannotShip, match=r"^cannot ship 'args\[1\]' \(lock\): " + inside + "$"):
        nbdist.launch(who, 1, lock, ranks=2)
    with pytest.raises(CannotShip, match=r"'args\[0\]' \(list\): args\[0\]\[0\] is " + inside + ", or take"):
        nbdist.launch(who, [lock], ranks=2)
    with pytest.raises(CannotShip, match=r"'held' \(lock\): " + inside + "$"):
        nbdist.launch(who, held=lock, ranks=2)
