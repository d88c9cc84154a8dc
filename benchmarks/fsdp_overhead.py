"""What a prepared loop costs a step over hand-written FSDP2 (torch's `fully_shard`).

    python benchmarks/fsdp_overhead.py [--ranks 2] [--units 20] [--steps 60] [--rounds 12]

Both loops run interleaved in the same ranks, over gloo, with the same units. As in ddp_overhead.py the figure is the
processor time of the training thread, and wall time is told beside it. By hand, windows of 4 call
`set_requires_gradient_sync` where it changes, twice a window, as one who knows what it costs.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from nbdist import Accelerator

BATCH, WIDTH = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(rows))


def by_hand(model: Any, optimizer: Any, loader: Any, window: int) -> Callable[[], None]:
    """One epoch."""

    def run() -> None:
        for number, batch in enumerate(loader, start=1):
            first, last = number % window == 1 and window > 1, number % window == 0 or number == len(loader)
            if first and not last:
                model.set_requires_gradient_sync(False)
            elif last and window > 1:
                model.set_requires_gradient_sync(True)
            (model(batch).pow(2).mean() / window).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

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


def variants(steps: int, units: int, ranks: int, rank: int) -> dict[str, Callable[[], None]]:
    loops = {}
    mesh = init_device_mesh("cpu", (ranks,))
    for window in (1, 4):
        rows = Rows(steps * BATCH * ranks, WIDTH)
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(units)])
        for block in list(model)[1:]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sampler: DistributedSampler[Any] = DistributedSampler(rows, ranks, rank, shuffle=False)
        loader = DataLoader(rows, batch_size=BATCH, sampler=sampler, collate_fn=as_it_is)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loops[f"by hand, windows of {window}"] = by_hand(model, optimizer, loader, window)
        accelerator = Accelerator(cpu=True, strategy="fsdp", gradient_accumulation_steps=window)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(units)])
        ours, prepared_optimizer, loader = accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            DataLoader(rows, batch_size=BATCH, collate_fn=as_it_is),
        )
        loops[f"nbdist, windows of {window}"] = prepared(accelerator, ours, prepared_optimizer, loader)
    return loops


def _rank(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    steps = options.steps
    loops = variants(steps, options.units, ranks, rank)
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    for run in loops.values():
        run()
    for _ in range(options.rounds):
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
        print(f"torch {torch.__version__}, {ranks} ranks, {options.units} blocks, {steps} steps, us a step")
        for name in loops:
            base = name.replace("nbdist", "by hand")
            line = f"{name:24s} cpu median {statistics.median(cpu[name]):8.1f} min {min(cpu[name]):8.1f}"
            line += f"  wall median {statistics.median(wall[name]):8.1f}"
            if base != name:
                pairs = [ours - theirs for ours, theirs in zip(cpu[name], cpu[base], strict=True)]
                line += f"  over by hand: median of pairs {statistics.median(pairs):+.1f}"
                line += f" min {min(cpu[name]) - min(cpu[base]):+.1f}"
            print(line)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (options.ranks, f"{folder}/store", options), options.ranks)


if __name__ == "__main__":
    main()
