"""What a prepared loop costs a step over plain PyTorch: Linear(8, 8), batch 8, SGD, one thread, one process; and
Linear(4, 4), batch 2. Accelerate's in the same run, where `make bench` has installed it (benchmarks/beside.py).

    python benchmarks/accelerator_overhead.py [--steps 2000] [--rounds 7] [--cpu]

All variants run interleaved in one process, so that a machine that slows down hits all alike. The dataset fetches a
whole batch at once: what a slow dataset costs is not the question here.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import beside
import torch
from rows import Rows, as_it_is
from torch.utils.data import DataLoader, IterableDataset

from nbdist import Accelerator

BATCH, WIDTH = 8, 8
SMALL = (2, 4)


class Stream(IterableDataset):
    def __init__(self, steps: int) -> None:
        self.data = list(torch.randn(steps * BATCH, WIDTH))

    def __iter__(self) -> Any:
        return iter(self.data)


def _rows(steps: int) -> DataLoader:
    return DataLoader(Rows(steps * BATCH, WIDTH), batch_size=BATCH, collate_fn=as_it_is)


def _small(steps: int) -> DataLoader:
    return DataLoader(Rows(steps * SMALL[0], SMALL[1]), batch_size=SMALL[0], collate_fn=as_it_is)


def _stream(steps: int) -> DataLoader:
    return DataLoader(Stream(steps), batch_size=BATCH, collate_fn=torch.stack)


def loop(
    loader: Any, model: Any, optimizer: Any, backward: Callable[[Any], None] | None, accumulate: Any = None
) -> Callable[[], None]:
    """One epoch of training, as a function."""

    def plain() -> None:
        for batch in loader:
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def prepared() -> None:
        assert backward is not None
        for batch in loader:
            loss = model(batch).pow(2).mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def accumulated() -> None:
        for batch in loader:
            with accumulate(model):
                loss = model(batch).pow(2).mean()
                loss.backward() if backward is None else backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    if accumulate is not None:
        return accumulated
    return plain if backward is None else prepared


def variants(steps: int) -> dict[str, tuple[str | None, Callable[[], None]]]:
    """Name -> (what it is compared with, the loop)."""

    def parts(make: Callable[[int], DataLoader]) -> tuple[Any, Any, DataLoader]:
        width = SMALL[1] if make is _small else WIDTH
        model = torch.nn.Linear(width, width)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), make(steps)

    def all_of(make: Callable[[int], DataLoader], accumulate: bool = True, window: int = 1) -> Callable[[], None]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model, optimizer, loader = accelerator.prepare(*parts(make))
        return loop(loader, model, optimizer, accelerator.backward, accelerator.accumulate if accumulate else None)

    def theirs(make: Callable[[int], DataLoader]) -> Callable[[], None]:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*parts(make))
        return loop(loader, model, optimizer, accelerator.backward, accelerator.accumulate)

    def their_loader() -> Callable[[], None]:
        model, optimizer, loader = parts(_rows)
        return loop(accelerate.Accelerator(cpu=True).prepare(loader), model, optimizer, None)

    def only(*which: str) -> Callable[[], None]:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = parts(_rows)
        if "loader" in which:
            loader = accelerator.prepare(loader)
        if "optimizer" in which:
            optimizer = accelerator.prepare(optimizer)
        return loop(
            loader,
            model,
            optimizer,
            accelerator.backward if "backward" in which else None,
            accelerator.accumulate if "accumulate" in which else None,
        )

    def plain(make: Callable[[int], DataLoader], window: int = 1) -> Callable[[], None]:
        model, optimizer, loader = parts(make)
        if window == 1:
            return loop(loader, model, optimizer, None)

        def by_hand() -> None:
            for number, batch in enumerate(loader, start=1):
                loss = model(batch).pow(2).mean() / window
                loss.backward()
                if number % window == 0 or number == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()

        return by_hand

    accelerate = beside.accelerate()
    loops: dict[str, tuple[str | None, Callable[[], None]]] = {
        "plain": (None, plain(_rows)),
        "all": ("plain", all_of(_rows)),
        "all, no accumulate": ("plain", all_of(_rows, accumulate=False)),
        "loader": ("plain", only("loader")),
        "accumulate": ("plain", only("accumulate")),
        "backward": ("plain", only("backward")),
        "optimizer": ("plain", only("optimizer")),
        "accumulate+backward": ("plain", only("accumulate", "backward")),
        "windows by hand": (None, plain(_rows, window=4)),
        "all, windows of 4": ("windows by hand", all_of(_rows, window=4)),
        "plain stream": (None, plain(_stream)),
        "stream, all": ("plain stream", all_of(_stream)),
        "small plain": (None, plain(_small)),
        "small, all": ("small plain", all_of(_small)),
    }
    if accelerate is not None:
        loops["Accelerate, all"] = ("plain", theirs(_rows))
        loops["Accelerate, loader"] = ("plain", their_loader())
        loops["Accelerate, small"] = ("small plain", theirs(_small))
    return loops


def measure(steps: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds a step, one figure a round."""
    loops = variants(steps)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _, run in loops.values():
        run()
    for _ in range(rounds):
        for name, (_, run) in loops.items():
            gc.collect()
            gc.disable()
            start = clock()
            run()
            times[name].append((clock() - start) / steps * 1e6)
            gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="time of the processor, on a machine that is not quiet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(options.steps, options.rounds, time.thread_time if options.cpu else time.perf_counter)
    against = {name: base for name, (base, _) in variants(1).items()}
    peer = beside.accelerate()
    print(f"Accelerate {peer.__version__}, in the same run" if peer is not None else beside.HOW)
    print(f"torch {torch.__version__}, {options.steps} steps, {options.rounds} rounds; us a step")
    for name, figures in times.items():
        line = f"{name:20s} median {statistics.median(figures):7.1f}  min {min(figures):7.1f}"
        if (base := against[name]) is not None:
            over = statistics.median(figures) - statistics.median(times[base])
            least = min(figures) - min(times[base])
            ratio = statistics.median(figures) / statistics.median(times[base])
            line += f"  over {base}: median {over:+5.1f}  min {least:+5.1f}  ratio {ratio:.3f}"
        print(line)


if __name__ == "__main__":
    main()
