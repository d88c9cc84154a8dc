"""Seeds: random order is a pure function of them, on every rank, whatever else draws random numbers."""

from __future__ import annotations

from typing import Any

import numpy
import torch


def mixed(seed: int, *parts: int) -> int:
    """One well-mixed 63-bit seed for an epoch (and a rank): neighbouring numbers give unrelated draws."""
    words = numpy.random.SeedSequence([seed % 2**64, *parts]).generate_state(2)
    return (int(words[0]) << 31) ^ int(words[1])


_LOADER = 0x10AD  # told apart from an epoch or a rank


def numbered(seed: int, number: int) -> int:
    """The seed of an Accelerator's loader of this number: that of the first one is the seed itself."""
    return mixed(seed, _LOADER, number) if number else seed


def generator_of(*samplers: Any) -> torch.Generator | None:
    """The generator that the user has given to one of these samplers, if any."""
    for sampler in samplers:
        if type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.startswith("torchdata."):
            continue  # it makes one of its own, with another seed on each rank
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None
