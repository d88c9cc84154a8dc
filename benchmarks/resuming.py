"""Going on deep in an epoch: the time to the first batch of a shuffled loader of 1,000,000 samples, batch 8.

    python benchmarks/resuming.py [--rounds 5]

From its start, and behind 100,000 batches; Accelerate's `skip_first_batches` in the same run, where `make bench` has
installed it (benchmarks/beside.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import beside
import torch
from torch.utils.data import DataLoader

from nbdist import Accelerator, skip_first_batches

SAMPLES, BATCH, BEHIND = 1_000_000, 8, 100_000


def loader() -> DataLoader:
    return DataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


def from_start() -> Any:
    return Accelerator(cpu=True).prepare(loader())


def from_state() -> Any:
    prepared = Accelerator(cpu=True).prepare(loader())
    prepared.load_state_dict(prepared.state_dict() | {"delivered": BEHIND})
    return prepared


def skipping() -> Any:
    return skip_first_batches(Accelerator(cpu=True).prepare(loader()), BEHIND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], Any]] = {
        "plain, from the start": loader,
        "nbdist, from the start": from_start,
        "nbdist, load_state_dict": from_state,
        "nbdist, skip_first_batches": skipping,
    }
    peer = beside.accelerate()
    if peer is None:
        print(beside.HOW)
    else:
        kinds["Accelerate, skip_first_batches"] = lambda: peer.skip_first_batches(
            peer.Accelerator(cpu=True).prepare(loader()), BEHIND
        )
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, make in kinds.items():
            made = make()
            start = time.perf_counter()
            next(iter(made))
            times[name].append(time.perf_counter() - start)
    for name, figures in times.items():
        print(f"{name:32s} median {statistics.median(figures) * 1e3:8.1f} ms  min {min(figures) * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
