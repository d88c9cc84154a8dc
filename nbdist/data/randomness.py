"""Random order that is a pure function of seed and epoch, on every rank, whatever else draws random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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


class Sandbox:
    """Random state of its own: inside `with sandbox:` random, numpy and torch draw from it, outside nothing has
    changed.

    It goes on where it was when entered again, so a sampler may be pulled a few items at a time.

    Args:
        seed: where its state starts.
        samplers: those that have a `generator` attribute draw from a fresh one with this seed while inside.
    """

    def __init__(self, seed: int, *samplers: Any) -> None:
        self._seed = seed
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "generator")]
        self._generator = torch.Generator().manual_seed(seed)
        self._inner: tuple[Any, ...] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer = _states()
        theirs = [(sampler, sampler.generator) for sampler in self._samplers]
        for sampler, _ in theirs:
            sampler.generator = self._generator
        if self._inner is None:
            random.seed(self._seed)
            numpy.random.seed(self._seed % 2**32)
            torch.random.default_generator.manual_seed(
                self._seed
            )  # the CPU's only: others would have to be restored too
        else:
            _restore(self._inner)
        try:
            yield
        finally:
            self._inner = _states()
            _restore(outer)
            for sampler, generator in theirs:
                sampler.generator = generator


def _states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.random.set_rng_state(states[2])
