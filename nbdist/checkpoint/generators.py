"""The random generators of a rank: Python's, numpy's, torch's, and those of its devices."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import numpy
import torch


def state() -> dict[str, Any]:
    """Their states, as plain values and tensors."""
    kind, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [kind, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    name, keys, at, has, cached = numpy.random.get_state(legacy=True)
    found["numpy"] = [str(name), numpy.asarray(keys), int(at), int(has), float(cached)]
    for device, module in _devices():
        found[device] = module.get_rng_state()
    return found


def restore(held: dict[str, Any]) -> None:
    """Put them back; a device's that is not here is left out."""
    kind, words, gauss = held["python"]
    random.setstate((kind, tuple(words.tolist()), gauss))
    numpy.random.set_state(tuple(held["numpy"]))
    torch.set_rng_state(held["torch"])
    for device, module in _devices():
        if device in held:
            module.set_rng_state(held[device])


def for_new_rank(rank: int, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The states of a rank that was not there when they were saved: what all had, where all had the same; else new
    ones, made from rank 0's and its number, so that no two ranks draw alike.

    Args:
        saved: those of each rank that saved.
    """
    if all(torch.equal(one["torch"], saved[0]["torch"]) for one in saved):
        return saved[0]
    seed = zlib.crc32(saved[0]["torch"].numpy().tobytes()) * 2**20 + rank
    kind, words, gauss = random.Random(seed).getstate()
    drawn: Any = numpy.random.RandomState(seed % 2**32).get_state(legacy=True)
    made: dict[str, Any] = {
        "python": [kind, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": [str(drawn[0]), numpy.asarray(drawn[1]), int(drawn[2]), int(drawn[3]), float(drawn[4])],
    }
    for device, _ in _devices():
        made[device] = torch.Generator(device=device).manual_seed(seed).get_state()
    return made


def _devices() -> list[tuple[str, Any]]:
    """The kinds of devices that this process uses, each with its module."""
    found = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(("cuda", torch.cuda))
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        found.append(("mps", torch.mps))
    return found
