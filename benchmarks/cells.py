"""The figures of `%%distributed` in a real kernel: times from execute request to reply, medians of interleaved runs.

    python benchmarks/cells.py [row ...]        rows: load first warm names big one stop kill

Each is measured beside what it is compared with (an ordinary cell, one copy of the memory) in the same run: these
are ratios and differences on a machine that others may use too; the last column says how much. The other tools:
`make bench-peers`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kernel.notebook import Notebook, wait_gone

REDUCE = "%%distributed -n 2\nt = torch.ones(1)\ndist.all_reduce(t)"


def row(what: str, wanted: str, measured: str) -> None:
    """One line of the table, with the load average of the minute in which it was measured."""
    print(f"| {what} | {wanted} | {measured} | {os.getloadavg()[0]:.1f} |", flush=True)


def interleaved(notebook: Notebook, ordinary: str, distributed: str, times: int) -> tuple[float, float]:
    """Medians in seconds of an ordinary and a distributed cell, run in turns."""
    a, b = [], []
    for _ in range(times):
        a.append(notebook.ok(ordinary).seconds)
        b.append(notebook.ok(distributed).seconds)
    return statistics.median(a), statistics.median(b)


def more(notebook: Notebook, what: str, wanted: str, ordinary: str, distributed: str, times: int = 30) -> None:
    plain, here = interleaved(notebook, ordinary, distributed, times)
    row(what, wanted, f"{(here - plain) * 1e3:.1f} ms more ({here * 1e3:.1f} against {plain * 1e3:.1f})")


def warm(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbdist")
    notebook.ok("import torch")
    notebook.ok("from nbdist.launchers import client\nclient.supervisor().up()")


def load() -> None:
    seconds, torch = [], set()
    for _ in range(5):
        with Notebook() as notebook:
            seconds.append(notebook.ok("%load_ext nbdist").seconds)
            torch.add(notebook.value("'torch' in __import__('sys').modules"))
    row(
        "`%load_ext nbdist`",
        "<= 0.15 s, no torch import",
        f"{statistics.median(seconds):.3f} s, torch imported: {torch}",
    )


def first() -> None:
    seconds = []
    for _ in range(5):
        with Notebook() as notebook:
            warm(notebook)
            notebook.ok("import time; time.sleep(3)")  # the fork server finishes what it preloads
            code = "%%distributed -n 2\nimport torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)"
            seconds.append(notebook.ok(code).seconds)
    row("first cell, 2 fresh ranks, server warm", "<= 0.30 s", f"{statistics.median(seconds):.3f} s")


def warm_cell() -> None:
    with Notebook() as notebook:
        warm(notebook)
        notebook.ok("import torch.distributed as dist")
        notebook.ok(REDUCE)
        more(
            notebook, "warm cell with an all_reduce, 2 ranks", "<= 6 ms more", "t = torch.ones(1)\nt.sum()", REDUCE, 100
        )


def names() -> None:
    with Notebook() as notebook:
        warm(notebook)
        notebook.ok("for i in range(10_000): globals()[f'name{i}'] = [i]")
        read = "name1, name2, name3, name4, name5"
        more(notebook, "10,000 names, 5 read", "<= 4 ms more", f"x = ({read})", f"%%distributed -n 2\nx = ({read})")
        for what, value in (
            ("1,000,000 ints", "list(range(1_000_000))"),
            ("100,000 dicts", "[{'a': i} for i in range(100_000)]"),
        ):
            notebook.ok(f"big = {value}")
            notebook.ok("%%distributed -n 2\nn = len(big)")
            more(
                notebook,
                f"a list of {what}, unchanged",
                "<= 50 ms more",
                "n = len(big)",
                "%%distributed -n 2\nn = len(big)",
                15,
            )


COPY = """
import mmap, os, time, torch
def fresh_copy():
    fd = os.memfd_create("copy"); n = big.numel() * 4; os.ftruncate(fd, n)
    start = time.perf_counter()
    view = memoryview(big.numpy()).cast("B"); at = 0
    while at < n: at += os.pwrite(fd, view[at:at + (1 << 30)], at)
    took = time.perf_counter() - start
    os.close(fd)
    return took
"""


def big() -> None:
    ratios, firsts, again = [], [], []
    for _ in range(3):
        with Notebook() as notebook:
            warm(notebook)
            notebook.ok("%%distributed -n 4\nimport torch, psutil, os")
            notebook.ok("import torch\nbig = torch.rand(1 << 28)")
            notebook.ok(COPY)
            plain = float(notebook.ok("print(sorted(fresh_copy() for _ in range(3))[1])").stdout)
            before = notebook.value(PRIVATE)
            seconds = notebook.ok("%%distributed -n 4\nx = big[5].item()").seconds
            after = notebook.value(PRIVATE)
            again += [notebook.ok("%%distributed -n 4\nx = big[5].item()").seconds for _ in range(5)]
            firsts.append(seconds)
            ratios.append(seconds / plain)
            private = max(b - a for a, b in zip(before, after, strict=True)) / 1e6
    row(
        "capture of a 1 GiB tensor, 4 ranks: first",
        "<= 2 x one copy into fresh pages",
        f"{statistics.median(firsts):.2f} s, {statistics.median(ratios):.2f} x",
    )
    row("... unchanged again", "<= 0.15 s", f"{statistics.median(again):.3f} s")
    row("... private memory a rank", "<= 20 MB", f"{private:.1f} MB")


def one() -> None:
    """One element of 1 GiB changed, each way; beside an ordinary cell that reads it, and one that changes all of it."""
    with Notebook() as notebook:
        warm(notebook)
        notebook.ok("import torch\nbig = torch.rand(1 << 28)")
        notebook.ok("%%distributed -n 2\nx = big[5].item()")
        notebook.ok("%%distributed -n 2\nbig[7] = 0")
        for what, here, there in (
            ("by a rank", "pass", "big[5] += 1"),
            ("by the notebook", "big[5] += 1", "x = big[5].item()"),
            ("by nobody", "pass", "x = big[5].item()"),
        ):
            seconds, plain = [], []
            for _ in range(7):
                notebook.ok(here)
                plain.append(notebook.ok(there).seconds)
                notebook.ok(f"%%distributed -n 2\n{there}" if here == "pass" else "x = 1")
                notebook.ok(here)
                seconds.append(notebook.ok(f"%%distributed -n 2\n{there}").seconds)
            measured = statistics.median(seconds) - statistics.median(plain)
            row(f"one element of 1 GiB changed {what}, 2 ranks", "<= 0.5 s more", f"{measured:.3f} s more")
        seconds = []
        for _ in range(3):
            notebook.ok("big += 1")
            seconds.append(notebook.ok("%%distributed -n 2\nx = big[5].item()").seconds)
        row("all of 1 GiB changed by the notebook, 2 ranks", "", f"{statistics.median(seconds):.2f} s")
        private = [size / 1e6 for size in notebook.value(PRIVATE)]
        row("... private memory of the ranks", "", ", ".join(f"{size:.0f} MB" for size in private))


# Anonymous memory: pages of the rank's own. Pages of the shared file that only one rank has looked at are not copies.
PRIVATE = (
    "[sum(int(line.split()[1]) * 1024 for line in open(f'/proc/{p}/smaps_rollup') if line.startswith('Anonymous'))"
    " for p in ranks._pool().pids]"
)

STOPS = {
    "a Python loop": "while True: pass",
    "time.sleep": "time.sleep(60)",
    "a loop of all_reduce": "while True: dist.all_reduce(torch.ones(10))",
    "all ranks but one in all_reduce": "dist.all_reduce(torch.ones(4)) if rank else time.sleep(60)",
    "recv against recv": "dist.recv(torch.ones(4), 1 - rank)",
    "store.get": "dist.distributed_c10d._get_default_store().get('nothing')",
    "except BaseException in a loop": "while True:\n    try: time.sleep(.1)\n    except BaseException: pass",
    "sleep in finally": "try: time.sleep(60)\nfinally: time.sleep(60)",
}


def stop() -> None:
    with Notebook() as notebook:
        warm(notebook)
        notebook.ok("%%distributed -n 2\nimport torch")
        for what, code in STOPS.items():
            seconds = []
            for _ in range(3):
                cell = notebook.run(
                    f"%%distributed -n 2\nimport time, torch, torch.distributed as dist\n{code}", stop_after=0.5
                )
                seconds.append(cell.stop_seconds or 0.0)
                notebook.ok(
                    "%%distributed -n 2\nimport torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))"
                )
            row(f"Stop in {what}", "<= 2 s", f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f}")


def kill() -> None:
    seconds = []
    for number in range(20):
        notebook = Notebook()
        notebook.ok("%load_ext nbdist")
        notebook.start("%%distributed -n 2\nimport time\nwhile True: time.sleep(.01)")
        time.sleep(random.uniform(0.0, 3.0))
        below = notebook.processes()
        start = time.perf_counter()
        notebook.kill()
        left = wait_gone(below, 6.0)
        seconds.append(time.perf_counter() - start)
        notebook.client.stop_channels()
        if left:
            row(f"kill -9 of the kernel, run {number}", "nothing alive after 3 s", f"left: {[p.pid for p in left]}")
            for process in left:
                process.kill()
    row("kill -9 of the kernel at random moments, 20 times", "nothing alive after 3 s", f"longest {max(seconds):.2f} s")


SAYS_MUCH = "for i in range(1000):\n    print(f'rank {rank} of {world_size}: step {i}, loss {1 / (i + 1):.4f}')"


def fold() -> None:
    with Notebook() as notebook:
        warm(notebook)
        notebook.ok("%%distributed -n 8\npass")
        seconds, shown = [], ""
        for _ in range(5):
            cell = notebook.ok(f"%%distributed -n 8\n{SAYS_MUCH}")
            seconds.append(cell.seconds)
            shown = cell.stdout
        ordinary = notebook.ok(f"rank, world_size = 0, 8\n{SAYS_MUCH}\ndel rank, world_size")
        lines = shown.splitlines()
        assert lines[:1000] == ordinary.stdout.splitlines() and len(lines) == 1001, lines[1000:]
        told = f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f}"
        row(
            "8 ranks printing 1,000 lines each, equal but for the rank: folded, in order",
            "<= 2 s",
            f"{told} (an ordinary cell: {ordinary.seconds:.2f})",
        )


ROWS: dict[str, Callable[[], None]] = {
    "load": load, "first": first, "warm": warm_cell, "names": names, "big": big, "one": one, "stop": stop, "kill": kill,
    "fold": fold,
}  # fmt: skip


def main() -> None:
    chosen = sys.argv[1:] or list(ROWS)
    print(f"{psutil.cpu_count(logical=False)} cores, Python {sys.version.split()[0]}\n")
    print("| what | wanted | measured | load average |\n|---|---|---|---|")
    for name in chosen:
        ROWS[name]()


if __name__ == "__main__":
    main()
