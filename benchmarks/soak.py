"""A thousand mixed cells in one kernel: what they give is checked, and that nothing grows.

    python benchmarks/soak.py [cells]        default 1000; prints a table of samples, exits 1 when something grew

Every 25 cells processes, threads, descriptors, memory and tables are read, after a garbage collection in each process.
*Flat* is said of the samples after the first 100 cells: from the median of their first quarter to that of their last
nothing grows by more than a slope a cell and a noise on top, and no sample is above the first quarter's by more than
a peak (see `BOUNDS`: no process, thread, descriptor or table entry a cell at all; 10 kB of memory).
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kernel.notebook import Cell, Notebook
from tests.kernel.trouble import HERE, all_here

EVERY = 25  # cells between samples
WARM = 100  # cells before those that must be flat
MIB = 1 << 20


@dataclass(frozen=True)
class Bound:
    """Growth from the first quarter of the samples to the last: at most `slope` a cell, and `noise` on top; no sample
    is above the largest of the first quarter by more than `peak`.
    """

    slope: float
    noise: float
    peak: float


BOUNDS = {
    "processes": Bound(0.0, 0, 0),
    "threads": Bound(0.0, 2, 6),  # a thread that ends a replaced backend may still be at it
    "descriptors": Bound(0.0, 6, 12),
    "kernel MiB": Bound(0.01, 6, 40),  # In and Out grow in any kernel
    "supervisor MiB": Bound(0.004, 4, 8),
    "fork server MiB": Bound(0.004, 4, 8),
    "ranks MiB": Bound(0.01, 12, 60),
    "segments": Bound(0.0, 3, 6),
    "segments MiB": Bound(0.0, 4, 120),
    "known here": Bound(0.0, 10, 30),
    "known there": Bound(0.0, 10, 30),
    "held for handles": Bound(0.0, 4, 8),
}

PREPARE = """
import gc, os, threading, time, torch
import torch.distributed as dist
from IPython.display import HTML, display
total, log, data = 0, [], {"runs": 0, "kept": [1, 2]}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
big = torch.zeros(25_000_000)
class Thing:
    def __init__(self): self.seen = []
thing = Thing()
def double(x): return 2 * x
"""

READ = "_ = big.sum(), data, log, thing, model, optimizer, double"

LOOK_HERE = """
import gc as _gc, json as _json
_gc.collect()
_homes = [o for o in _gc.get_objects() if type(o).__name__ == "Home" and type(o).__module__ == "nbdist.shipping.home"]
print(_json.dumps([sum(len(h._table.objects) for h in _homes), sum(len(h._handles) for h in _homes)]))
del _homes
"""
LOOK_THERE = """%%distributed -n 2 --no-return
import gc, json
gc.collect()
away = next(o for o in gc.get_objects() if type(o).__name__ == "Away" and type(o).__module__ == "nbdist.shipping.away")
print("there" + json.dumps([rank, len(away._table.objects), len(away._pins)]) if rank == 0 else "")
del away
"""


class Soak:
    """Runs the cells and looks at what they leave."""

    def __init__(self, notebook: Notebook, seed: int = 0) -> None:
        self.notebook, self.random = notebook, random.Random(seed)
        self.cells, self.turn = 0, 0
        self.total, self.runs = 0, 0
        self.samples: list[dict[str, float]] = []
        notebook.ok("%load_ext nbdist")
        notebook.ok(PREPARE)

    # ---------------------------------------------------------------- cells

    def here(self, code: str) -> Cell:
        self.cells += 1
        return self.notebook.ok(code)

    def ranks(self, code: str, options: str = "") -> Cell:
        self.cells += 1
        return self.notebook.ok(f"%%distributed -n 2 {options}\n{code}")

    def fails(self, code: str, error: str, options: str = "") -> Cell:
        self.cells += 1
        cell = self.notebook.run(f"%%distributed -n 2 {options}\n{code}")
        assert cell.error is not None, cell.text
        assert cell.error[0] == error, cell.text
        return cell

    def stopped(self, code: str) -> None:
        self.cells += 1
        cell = self.notebook.run(
            f"%%distributed -n 2\n{HERE}{code}",
            stop_after=0.0,
            stop_when=all_here(2),
        )
        assert cell.error is not None, cell.text
        assert cell.error[0] == "KeyboardInterrupt", cell.text

    def holds(self, expression: str) -> None:
        """The notebook has what the cells should have made."""
        assert self.notebook.ok(f"print({expression})").stdout.strip() == "True", expression

    # each a kind of cell, checked

    def values(self) -> None:
        self.ranks("total += 1 + rank\nlog.append(total)\nlog[:] = log[-20:]\ndata['runs'] += 1\nthing.seen = [log]")
        self.total, self.runs = self.total + 1, self.runs + 1
        self.holds(
            f"total == {self.total} and data['runs'] == {self.runs} and thing.seen[0] is log and log[-1] == total"
        )

    def edited_here(self) -> None:
        self.here("data['kept'].append(total); data['kept'] = data['kept'][-5:]; extra = [data]")
        self.ranks("ok = extra[0] is data and data['kept'][-1] == total or rank > 0")
        self.holds("ok")

    def error_on_all(self) -> None:
        self.fails("late_value = [1]\nraise ValueError('all')", "ValueError")
        self.holds("late_value == [1]")

    def error_on_one(self) -> None:
        self.fails("if rank == 1: raise KeyError('one')", "KeyError")

    def error_while_others_wait(self) -> None:
        self.fails("if rank == 1: raise OSError('one')\ndist.barrier()", "OSError")
        self.ranks("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2")

    def stop_in_a_loop(self) -> None:
        self.stopped("count = 0\nwhile True:\n    count += 1\n    time.sleep(0.001)")
        self.holds("count > 0")

    def stop_in_a_collective(self) -> None:
        self.stopped("dist.barrier() if rank else time.sleep(60)")
        self.ranks("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2")

    def large_rebound(self) -> None:
        self.here(f"big = torch.full((25_000_000,), {float(self.turn)})")
        self.ranks("mean = big.mean().item()")
        self.holds(f"abs(mean - {self.turn}) < 1e-3")

    def large_edited(self) -> None:
        self.here("big[7] = 5.0")
        self.ranks("seven = big[7].item(); big[9] = 6.0")
        self.holds("seven == 5.0 and big[9].item() == 6.0")

    def returned(self) -> None:
        self.ranks(f"made = torch.arange(100_000) + {self.turn}\nmade[1].item()")
        self.holds(f"made[1].item() == {self.turn} + 1")

    def shown(self) -> None:
        cell = self.ranks("for i in range(300): print('line', i)\ndisplay(HTML('<b>bold</b>'))")
        assert "line 299" in cell.stdout
        assert any("text/html" in data for data in cell.data)

    def late_thread(self) -> None:
        self.ranks("def later(): time.sleep(0.05); print('late')\nthreading.Thread(target=later).start()")

    def some_ranks(self) -> None:
        self.ranks("only = [rank]; log.append(rank); log.pop()", f"--ranks {self.turn % 2}")
        self.holds(f"only == [{self.turn % 2}]")
        self.ranks("both = only + [len(log)]")

    def redefined(self) -> None:
        self.here(
            f"def double(x): return 2 * x + {self.turn}\n"
            "class Thing:\n    def __init__(self): self.seen = []\nthing = Thing()"
        )
        self.ranks("doubled = double(3); thing.seen.append(doubled); made_there = Thing()")
        self.holds(f"doubled == 6 + {self.turn} and thing.seen == [doubled] and type(made_there) is Thing")

    def deleted(self) -> None:
        self.ranks("temporary = [torch.ones(1000)]; other = 1")
        self.here("del temporary")
        self.ranks("del other")
        self.holds("'other' not in globals()")

    def handles(self) -> None:
        self.ranks("lock = threading.Lock(); numbers = (i for i in range(3))")
        self.ranks("taken = lock.acquire(); lock.release(); first = next(numbers)")
        self.holds("taken and first == 0 and 'RankedValue' in type(lock).__name__")
        self.here("assert list(ranks['first']) == [0, 0]")
        self.here("%distributed pull first")

    def trained(self) -> None:
        self.ranks(
            "from torch.nn.parallel import DistributedDataParallel\nddp = DistributedDataParallel(model)\n"
            "for _ in range(3):\n    optimizer.zero_grad(); ddp(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
            "weight = model.weight.detach().clone()\ndel ddp"
        )
        self.holds("torch.equal(weight, model.weight.detach())")

    def another_group(self) -> None:
        self.ranks(
            "group = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t, group=group)\n"
            "dist.destroy_process_group(group); del group"
        )

    def fresh(self) -> None:
        if self.turn % 8 == 3:
            self.ranks("total += 1", "--fresh")
            self.total += 1
        elif self.turn % 8 == 7:
            self.here("%distributed restart")
        self.holds(f"total == {self.total}")

    def deck(self) -> None:
        """Each kind of cell once, in any order."""
        kinds: list[Callable[[], None]] = [
            self.values, self.values, self.edited_here, self.error_on_all, self.error_on_one,
            self.error_while_others_wait,
            self.stop_in_a_loop, self.stop_in_a_collective, self.large_rebound, self.large_edited, self.returned,
            self.shown, self.late_thread, self.some_ranks, self.redefined, self.deleted, self.handles, self.trained,
            self.another_group, self.fresh,
        ]  # fmt: skip
        self.random.shuffle(kinds)
        for kind in kinds:
            kind()
        self.turn += 1

    # ---------------------------------------------------------------- what they leave

    def run(self, cells: int, told: Callable[[dict[str, float]], None] = lambda sample: None) -> None:
        """So many cells or a few more, with a sample every EVERY."""
        while self.cells < cells:
            before = self.cells
            while self.cells - before < EVERY:
                self.deck()
            self.samples.append(self.look())
            told(self.samples[-1])

    def look(self) -> dict[str, float]:
        self.notebook.ok(f"%%distributed -n 2 --no-return\n{READ}")  # whatever was fresh has everything again
        known_there = self.notebook.ok(LOOK_THERE).stdout
        there = json.loads(re.search(r"there(\[.*?\])", known_there)[1])  # type: ignore[index]
        here = json.loads(self.notebook.ok(LOOK_HERE).stdout)
        time.sleep(0.2)
        kernel = psutil.Process(self.notebook.pid)
        below = kernel.children(recursive=True)
        parents = {process.pid: process.ppid() for process in below}
        rank_of = [p for p in below if parents.get(parents[p.pid]) in parents]
        servers = [p for p in below if parents[p.pid] in parents and p not in rank_of]
        supervisors = [p for p in below if p not in rank_of and p not in servers]
        every = [kernel, *below]
        files, size = 0, 0
        for process in every:
            for low, high in re.findall(r"^(\w+)-(\w+).*memfd:nbdist \(", _read(process.pid, "maps"), re.MULTILINE):
                files, size = files + 1, size + int(high, 16) - int(low, 16)
        return {
            "cells": self.cells,
            "processes": len(every),
            "threads": sum(p.num_threads() for p in every),
            "descriptors": sum(p.num_fds() for p in every),
            "kernel MiB": _pss(kernel),
            "supervisor MiB": sum(map(_pss, supervisors)),
            "fork server MiB": sum(map(_pss, servers)),
            "ranks MiB": sum(map(_pss, rank_of)),
            "segments": files,
            "segments MiB": size / MIB,
            "known here": here[0],
            "known there": there[1],
            "held for handles": here[1] + there[2],
        }

    def grown(self, warm: int = WARM) -> list[str]:
        """What is not flat in the samples after the first `warm` cells, in words; empty when all is well."""
        samples = [sample for sample in self.samples if sample["cells"] >= warm]
        quarter = max(1, len(samples) // 4)
        first, last = samples[:quarter], samples[-quarter:]
        span = statistics.median(s["cells"] for s in last) - statistics.median(s["cells"] for s in first)
        found = []
        for name, bound in BOUNDS.items():
            start, end = (statistics.median(s[name] for s in part) for part in (first, last))
            top = max(s[name] for s in first)
            peak = max(s[name] for s in samples)
            if end - start > bound.slope * span + bound.noise:
                found.append(f"{name}: from {start:g} to {end:g} in {span:g} cells")
            elif peak - top > bound.peak:
                found.append(f"{name}: up to {peak:g}, at first at most {top:g}")
        return found


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _pss(process: psutil.Process) -> float:
    """Its own memory and its share of what it shares with its relatives. Without pages of files: what of libtorch falls
    to one process depends on who else on the machine has torch loaded.
    """
    parts = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", _read(process.pid, "smaps_rollup"), re.MULTILINE)
    return sum(map(int, parts)) / 1024


def main() -> int:
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    start = time.monotonic()
    with Notebook() as notebook:
        soak = Soak(notebook)
        print("| " + " | ".join(["cells", *BOUNDS]) + " |\n" + "|---" * (len(BOUNDS) + 1) + "|")
        soak.run(cells, lambda sample: print("| " + " | ".join(f"{v:.0f}" for v in sample.values()) + " |", flush=True))
        grown = soak.grown()
    print(f"\n{soak.cells} cells in {time.monotonic() - start:.0f} s: " + ("; ".join(grown) or "flat"))
    return bool(grown)


if __name__ == "__main__":
    raise SystemExit(main())
