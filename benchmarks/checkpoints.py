"""Saving and loading 1 GiB of weights in one process, beside torch.save, torch.distributed.checkpoint and safetensors.

    python benchmarks/checkpoints.py [--rounds 5] [--mib 1024] [--folder /tmp]

Each round measures every way once, so that what the machine does otherwise meets all alike; ratios are of one round,
and their median is told. Files are on the disk when a way counts as done (fsync), also with those that leave it out.

For save_state(async_save=True): for how long the loop stands still, against one copy of the weights into fresh pages
(`clone` of each); and how long a step takes while the thread writes, against one without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from nbdist import Accelerator

SIDE = 2048  # 16 MiB a layer


def model_of(mib: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(mib // 16)))


def synced(path: str) -> None:
    """Bring all files below to the disk."""
    for root, _, names in os.walk(path) if os.path.isdir(path) else [(os.path.dirname(path), [], [path])]:
        for name in names:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Ways:
    """What is measured, on one model."""

    def __init__(self, mib: int, folder: str) -> None:
        self.folder = folder
        self.accelerator = Accelerator(cpu=True)
        self.model = self.accelerator.prepare(model_of(mib))
        self.state = self.model.state_dict()

    def at(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def torch_save(self) -> None:
        torch.save(self.state, self.at("torch"))
        synced(self.at("torch"))

    def dcp_save(self) -> None:
        dcp.save({"model": self.state}, checkpoint_id=self.at("dcp"), no_dist=True)  # it syncs by itself

    def safetensors_save(self) -> None:
        import safetensors.torch

        safetensors.torch.save_file(self.state, self.at("safetensors"))
        synced(self.at("safetensors"))

    def save_state(self) -> None:
        self.accelerator.save_state(self.at("state"))

    def save_model(self) -> None:
        self.accelerator.save_model(self.model, self.at("model"))

    def torch_load(self) -> None:
        self.model.load_state_dict(torch.load(self.at("torch"), weights_only=True))

    def torch_load_mapped(self) -> None:
        self.model.load_state_dict(torch.load(self.at("torch"), weights_only=True, mmap=True))

    def dcp_load(self) -> None:
        dcp.load({"model": self.state}, checkpoint_id=self.at("dcp"), no_dist=True)

    def load_state(self) -> None:
        self.accelerator.load_state(self.at("state"))

    def clones(self) -> None:
        """One copy into fresh pages."""
        copies = [tensor.clone() for tensor in self.state.values()]
        del copies

    def blocked(self) -> float:
        """How long save_state(async_save=True) keeps the loop; the save before it is over."""
        self.accelerator.wait_for_checkpoint()
        return timed(lambda: self.accelerator.save_state(self.at("behind"), async_save=True))


def slow_down(ways: Ways) -> tuple[float, float]:
    """Milliseconds of a training step without a save, and while one is written (medians)."""
    small = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01)
    batch = torch.randn(64, 256)

    def step() -> None:
        small(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    ways.accelerator.wait_for_checkpoint()
    alone = [timed(step) for _ in range(500)]
    ways.accelerator.save_state(ways.at("behind"), async_save=True)
    during = []
    while ways.accelerator._behind.busy:
        during.append(timed(step))
    return statistics.median(alone) * 1e3, statistics.median(during) * 1e3


def ratios(title: str, times: dict[str, list[float]], ours: str) -> None:
    print(f"\n{title}")
    for name, figures in times.items():
        each = [mine / one for mine, one in zip(times[ours], figures, strict=True)]
        told = "" if name == ours else f"   {ours} takes {statistics.median(each):.2f} of that"
        print(f"  {name:44s} {statistics.median(figures):7.3f} s  min {min(figures):7.3f}{told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        measure(Ways(options.mib, folder), options.rounds)
    finally:
        for thread in threading.enumerate():
            if thread.name == "nbdist-save":
                thread.join()
        shutil.rmtree(folder, ignore_errors=True)


def measure(ways: Ways, rounds: int) -> None:
    copy: dict[str, list[float]] = {"one copy into fresh pages": [], "loop blocked": []}
    first = ways.blocked()
    fresh = timed(ways.clones)
    for _ in range(rounds):
        ways.accelerator.wait_for_checkpoint()
        copy["one copy into fresh pages"].append(timed(ways.clones))
        copy["loop blocked"].append(ways.blocked())
    print(
        f"the first save, whose memory is fresh too: {first:.3f} s, {first / fresh:.2f} of a copy then ({fresh:.3f} s)"
    )
    ratios("save_state(async_save=True)", copy, "loop blocked")
    steps = [slow_down(ways) for _ in range(rounds)]
    alone, during = (statistics.median(one) for one in zip(*steps, strict=True))
    print(f"\na step alone {alone:.2f} ms, while it is written {during:.2f} ms: {during / alone:.2f}")

    saves = {
        "torch.save": ways.torch_save,
        "torch.distributed.checkpoint": ways.dcp_save,
        "safetensors.torch.save_file": ways.safetensors_save,
        "Accelerator.save_model": ways.save_model,
        "Accelerator.save_state": ways.save_state,
    }
    loads = {
        "torch.load, load_state_dict": ways.torch_load,
        "torch.load(mmap=True), load_state_dict": ways.torch_load_mapped,
        "torch.distributed.checkpoint": ways.dcp_load,
        "Accelerator.load_state": ways.load_state,
    }
    ways.accelerator.wait_for_checkpoint()
    for title, acts, ours in (
        ("saving", saves, "Accelerator.save_state"),
        ("loading", loads, "Accelerator.load_state"),
    ):
        times: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(rounds):
            for name, act in acts.items():
                times[name].append(timed(act))
        ratios(title, times, ours)


if __name__ == "__main__":
    main()
