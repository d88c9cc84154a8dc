"""What a dataset or a sampler has of its own that makes an order, so that ranks that have another one are told.

Random generators that are attributes (a `.shuffle()` without a seed draws one, on each rank another), and the indices
of a `Subset` (`random_split`). What draws from the process's generators needs no look: it is read in a `Sandbox`.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from nbdist import messages

_OBJECTS, _ITEMS = 500, 8  # that are looked at, in all and in one list


def of(loader: DataLoader) -> dict[str, str]:
    """Where there is such a thing, in words, and a digest of it."""
    if isinstance(loader.dataset, IterableDataset):
        return dict(_held(loader.dataset, "dataset"))
    # What the dataset draws for each sample may differ: it is not looked into.
    found = dict(
        _held(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, "sampler", loader.dataset)
    )
    at, path = loader.dataset, "dataset"
    while isinstance(at, Subset):
        found[f"{path}.indices"] = _digest(numpy.asarray(at.indices).tobytes())
        at, path = at.dataset, f"{path}.dataset"
    return found


def compare(ranks: list[dict[str, str]]) -> None:
    """Tell where the ranks' are not the same. All ranks have all of it.

    Raises:
        ValueError: samples surely would be lost and repeated.
    """
    differing = sorted(path for path in set().union(*ranks) if len({one.get(path) for one in ranks}) > 1)
    if not differing:
        return
    what = ", ".join(differing[:3])
    subsets = [path for path in differing if path.endswith(".indices")]
    if subsets:
        raise ValueError(
            f"the ranks' subsets hold other samples ({subsets[0]} differs), and each rank would take its part of "
            "them: some would be lost and some repeated. Draw them alike: random_split(..., "
            "generator=torch.Generator().manual_seed(0)); where each rank is to have its own, tell: "
            "prepare_data_loader(loader, already_sharded=True)"
        )
    if any("._ex_iterable." in path for path in differing):
        raise ValueError(
            f"the ranks' streams come in other orders ({what} differs), and each rank would take its part of them: "
            "some samples would be lost and some repeated. Give them one seed, .shuffle(seed=0); or let rank 0 read: "
            "DataLoaderConfiguration(dispatch_batches=True)"
        )
    warnings.warn(
        f"the ranks hold random generators in other states ({what}). Where the order comes from them, samples are "
        "lost and repeated, as each rank takes its part of one order: seed them alike, or let rank 0 read, by "
        "DataLoaderConfiguration(dispatch_batches=True)",
        stacklevel=messages.depth(),
    )


def _held(value: Any, path: str, but: Any = None) -> Iterator[tuple[str, str]]:
    """The generators among an object's attributes, and those of what it holds `but` one; breadth first, as far as 500
    objects.
    """
    waiting: deque[tuple[Any, str]] = deque([(value, path)])
    seen: set[int] = {id(but)}
    while waiting and len(seen) < _OBJECTS:
        one, path = waiting.popleft()
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        seen.add(id(one))
        state = _state(one)
        if state is not None:
            yield path, _digest(state)
            continue
        if isinstance(one, Mapping):
            parts = [(f"{path}[{key!r}]", item) for key, item in list(one.items())[:_ITEMS]]
        elif isinstance(one, list | tuple):
            parts = [(f"{path}[{at}]", item) for at, item in enumerate(one[:_ITEMS])]
        else:
            parts = [(f"{path}.{name}", item) for name, item in getattr(one, "__dict__", {}).items()]
        torchs = type(one).__module__.startswith(("torch.", "torchdata."))  # they seed theirs as they are read
        waiting.extend((item, name) for name, item in parts if not (torchs and _state(item) is not None))


def _state(value: Any) -> bytes | None:
    """The state of a random generator; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value.device.type == "cpu" else None
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state()).encode()
    return None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


_LEAVES = (
    *(str, bytes, int, float, type, type(None), FunctionType, ModuleType),
    *(torch.Tensor, torch.nn.Module, numpy.ndarray),
)
