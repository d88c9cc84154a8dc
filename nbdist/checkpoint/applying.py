"""What was read goes into what is prepared. It was all compared and checked before, so nothing fails half way."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nbdist.checkpoint import contents, generators, tree
from nbdist.checkpoint.fitting import Fit
from nbdist.checkpoint.manifest import Manifest


def apply(
    held: Manifest, fit: Fit, named: dict[str, dict[str, Any]], read: dict[str, torch.Tensor], rank: int,
    skipped: frozenset[str] = frozenset(),
) -> None:  # fmt: skip
    """Load everything but the scaler and the random generators.

    Small things come first: their own code may still refuse a state, and then they are put back.

    Args:
        skipped: models that a hook of the user's has loaded.
    """
    undo: list[tuple[Any, Any]] = []
    try:
        for kind in ("schedulers", "loaders", "objects"):
            for name, other in fit.pairs[kind].items():
                one = named[kind][name]
                undo.append((one, copy.deepcopy(one.state_dict())))
                one.load_state_dict(small(held, kind, other, read, rank))
    except BaseException:
        for one, before in reversed(undo):
            one.load_state_dict(before)
        raise
    for name in fit.pairs["models"]:
        if name not in skipped:
            _model(held, fit, name, named["models"][name], read)
    for name in fit.pairs["optimizers"]:
        _optimizer(held, fit, name, named["optimizers"][name], read)


def small(held: Manifest, kind: str, name: str, read: dict[str, torch.Tensor], rank: int) -> Any:
    """The state of a scheduler, a loader or an object."""
    return tree.decode(_small_tree(held, kind, name, rank), read.__getitem__)


def _small_tree(held: Manifest, kind: str, name: str, rank: int) -> Any:
    return (of_rank(held, rank) or {}).get(kind, {}).get(name, held.contents[kind][name]["state"])


def keys_of_small(held: Manifest, fit: Fit, rank: int) -> list[str]:
    """The tensors of what `small` gives."""
    kinds = ("schedulers", "loaders", "objects")
    trees = [_small_tree(held, kind, other, rank) for kind in kinds for other in fit.pairs[kind].values()]
    trees += [held.contents["models"][other]["extra"] for other in fit.pairs["models"].values()]
    for other in fit.pairs["optimizers"].values():
        there = held.contents["optimizers"][other]
        trees += [there["rest"], there["extra"], *(group["options"] for group in there["groups"])]
    return tree.keys(trees)


def generators_of(held: Manifest, read: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """The random states that this rank gets."""
    own = of_rank(held, rank)
    if own is not None:
        return tree.decode(own["rng"], read.__getitem__)
    return generators.for_new_rank(rank, [tree.decode(one["rng"], read.__getitem__) for one in held.ranks if one])


def of_rank(held: Manifest, rank: int) -> dict[str, Any] | None:
    """What is this rank's own; None: it was not there, or has saved on another machine's disk."""
    return held.ranks[rank] if rank < len(held.ranks) else None


def _model(held: Manifest, fit: Fit, name: str, model: torch.nn.Module, read: dict[str, torch.Tensor]) -> None:
    there = held.contents["models"][fit.pairs["models"][name]]
    own = contents.model_state(model)
    state: dict[str, Any] = {own[key][0]: read[storage] for key, storage in fit.models[name].items()}
    for key, extra in there["extra"].items():
        if key in own:
            state[own[key][0]] = tree.decode(extra, read.__getitem__)
    model.load_state_dict(state, strict=False)


def _optimizer(
    held: Manifest, fit: Fit, name: str, optimizer: torch.optim.Optimizer, read: dict[str, torch.Tensor]
) -> None:
    there = held.contents["optimizers"][fit.pairs["optimizers"][name]]
    order = fit.parameters[name]
    state = {
        index: tree.decode(there["state"][parameter], read.__getitem__)
        for index, parameter in enumerate(order)
        if parameter in there["state"]
    }
    groups, at = [], 0
    for group, of in zip(optimizer.param_groups, fit.groups[name], strict=True):
        count = len(group["params"])
        options = tree.decode(there["groups"][of]["options"], read.__getitem__) if of >= 0 else {}
        groups.append({**options, "params": list(range(at, at + count))})
        at += count
    rest = tree.decode(there["rest"], read.__getitem__)
    extra = tree.decode(there["extra"], read.__getitem__)
    optimizer.load_state_dict({**extra, "state": {**rest, **state}, "param_groups": groups})
    _as_saved(optimizer, state)


def _as_saved(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """torch gives a state its parameter's dtype: what was kept in another one has it again."""
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in state.items():
        own = optimizer.state.get(flat[index])
        if not isinstance(own, dict) or not isinstance(saved, dict):
            continue
        for key, value in saved.items():
            now = own.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                own[key] = value.to(now.device)
