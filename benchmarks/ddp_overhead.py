"""What a prepared loop costs a step over hand-written DistributedDataParallel, and how often gradients are shared.

    python benchmarks/ddp_overhead.py [--ranks 2] [--steps 200] [--rounds 20]

Both loops run interleaved in the same ranks, over gloo. Most of a step's time is the ranks' waiting for each other,
which varies by more than what is asked for here; so the figure is the processor time of the training thread: our Python
is in it, the waiting and gloo's own threads are not. Wall time is told beside it. "shared" counts the all-reduces of
gradients, by a communication hook; the model has one bucket.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rows import Rows, as_it_is
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from nbdist import Accelerator

BATCH, WIDTH = 8, 8


def by_hand(model: Any, optimizer: Any, loader: Any, window: int) -> Callable[[], None]:
    """One epoch, as PyTorch's documentation teaches it."""

    def run() -> None:
        for number, batch in enumerate(loader, start=1):
            if number % window == 0 or number == len(loader):
                (model(batch).pow(2).mean() / window).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with model.no_sync():
                    (model(batch).pow(2).mean() / window).backward()

    def every_step() -> None:
        for batch in loader:
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return every_step if window == 1 else run


def prepared(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> Callable[[], None]:
    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()

    return run


def variants(steps: int, ranks: int, rank: int, hook: Any = None) -> dict[str, Callable[[], None]]:
    loops = {}
    for window in (1, 4):
        parts = []
        for _ in range(2):
            model = torch.nn.Linear(WIDTH, WIDTH)
            parts.append((model, torch.optim.SGD(model.parameters(), lr=0.01), Rows(steps * BATCH * ranks, WIDTH)))
        model, optimizer, rows = parts[0]
        wrapped: Any = DistributedDataParallel(model)
        sampler: DistributedSampler[Any] = DistributedSampler(rows, ranks, rank, shuffle=False)
        loader = DataLoader(rows, batch_size=BATCH, sampler=sampler, collate_fn=as_it_is)
        loops[f"by hand, windows of {window}"] = by_hand(wrapped, optimizer, loader, window)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model, optimizer, rows = parts[1]
        ours, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(rows, batch_size=BATCH, collate_fn=as_it_is)
        )
        loops[f"nbdist, windows of {window}"] = prepared(accelerator, ours, optimizer, loader)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
            ours.register_comm_hook(None, hook)
    return loops


def shared(steps: int, ranks: int, rank: int) -> dict[str, int]:
    """How often each loop has shared a bucket in one epoch."""
    counted = [0]

    def hook(state: Any, bucket: Any) -> Any:
        counted[0] += 1
        work = dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # as text they are not what DDP compares them with
    found = {}
    for name, run in variants(steps, ranks, rank, hook).items():
        run()  # the first backward has the buckets in another order
        counted[0] = 0
        run()
        found[name] = counted[0]
    return found


def _rank(rank: int, ranks: int, store: str, steps: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    counts = shared(40, ranks, rank)
    loops = variants(steps, ranks, rank)
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    for run in loops.values():
        run()
    for _ in range(rounds):
        for name, run in loops.items():
            dist.barrier()
            gc.collect()
            gc.disable()
            start, start_wall = time.thread_time(), time.perf_counter()
            run()
            cpu[name].append((time.thread_time() - start) / steps * 1e6)
            wall[name].append((time.perf_counter() - start_wall) / steps * 1e6)
            gc.enable()
    if rank == 0:
        print(f"torch {torch.__version__}, {ranks} ranks, {steps} steps, {rounds} rounds; us a step")
        for name in loops:
            base = name.replace("nbdist", "by hand")
            line = f"{name:24s} cpu median {statistics.median(cpu[name]):7.1f} min {min(cpu[name]):7.1f}"
            line += f"  wall median {statistics.median(wall[name]):7.1f}  shared {counts[name]} times in 40 steps"
            if base != name:
                over = statistics.median(cpu[name]) - statistics.median(cpu[base])
                line += f"  over by hand: median {over:+.1f} min {min(cpu[name]) - min(cpu[base]):+.1f}"
            print(line)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank,
            args=(options.ranks, os.path.join(folder, "store"), options.steps, options.rounds),
            nprocs=options.ranks,
        )


if __name__ == "__main__":
    main()
