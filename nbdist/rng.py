"""Random generators made equal on all ranks.

Prepared loaders never need it: their order is a function of (seed, number of the loader, epoch). It is for code of your
own that draws and must draw the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from nbdist import checks, collectives, messages, state


class RNGType(StrEnum):
    """The kinds of random generators, by Accelerate's names; `NUMPY` and `PYTHON` are the other libraries' own."""

    TORCH = "torch"
    CUDA = "cuda"
    MPS = "mps"
    XLA = "xla"
    XPU = "xpu"
    GENERATOR = "generator"
    NUMPY = "numpy"
    PYTHON = "python"


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: Any = None) -> None:
    """Give every rank rank 0's state of one generator. A collective: all ranks call it.

    Args:
        rng_type: which one, an `RNGType` or its value. A device's that is not here stays as it is.
        generator: the torch.Generator that "generator" means.

    Raises:
        ValueError: no such kind, or "generator" without one; on every rank that said so.
    """
    kind = kind_of(rng_type)
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError("synchronize_rng_state('generator') needs generator=, the torch.Generator to make equal")
    if generator is not None and not callable(getattr(generator, "get_state", None)):
        raise checks.wrong("synchronize_rng_state: generator", generator, "a torch.Generator")
    mine = _state(kind, generator)
    theirs = [mine]
    collectives.broadcast_object_list(theirs)
    if state.current().rank and mine is not None and theirs[0] is not None:
        _restore(kind, theirs[0], generator)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: Any = None) -> None:
    """`synchronize_rng_state` for several kinds."""
    if isinstance(rng_types, str) or not isinstance(rng_types, Iterable):
        raise checks.wrong("synchronize_rng_states: rng_types", rng_types, "a list of kinds of generators")
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def share(together: int) -> None:
    """Give so many ranks in a row the first one's states of all generators. A collective: all ranks call it."""
    kinds = (RNGType.TORCH, RNGType.CUDA, RNGType.NUMPY, RNGType.PYTHON)
    everyone = messages.exchange([_state(kind, None) for kind in kinds])
    rank = state.current().rank
    if rank % together:
        for kind, kept in zip(kinds, everyone[rank - rank % together], strict=True):
            if kept is not None:
                _restore(kind, kept, None)


def kind_of(rng_type: RNGType | str | None) -> RNGType:
    """The kind of this name.

    Raises:
        ValueError: there is none.
    """
    try:
        return RNGType(rng_type)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(
            f"rng_type is {checks.short(rng_type)}; there are {', '.join(map(repr, map(str, RNGType)))}"
        ) from None


def _device_module(kind: RNGType) -> Any:
    import torch

    module = getattr(torch, kind.value, None)
    return module if module is not None and module.is_available() else None


def _state(kind: RNGType, generator: Any) -> Any:
    import numpy
    import torch

    if kind is RNGType.TORCH:
        return torch.get_rng_state()
    if kind is RNGType.GENERATOR:
        return generator.get_state()
    if kind is RNGType.NUMPY:
        return numpy.random.get_state()
    if kind is RNGType.PYTHON:
        return random.getstate()
    if kind is RNGType.MPS:
        return torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    module = None if kind is RNGType.XLA else _device_module(kind)
    return None if module is None else module.get_rng_state()


def _restore(kind: RNGType, kept: Any, generator: Any) -> None:
    import numpy
    import torch

    if kind is RNGType.TORCH:
        torch.set_rng_state(kept)
    elif kind is RNGType.GENERATOR:
        generator.set_state(kept)
    elif kind is RNGType.NUMPY:
        numpy.random.set_state(kept)
    elif kind is RNGType.PYTHON:
        random.setstate(kept)
    else:
        getattr(torch, kind.value).set_rng_state(kept)
