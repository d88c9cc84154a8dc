"""Optimizers that cannot train parameters that are spread over the ranks, or cannot take them over: refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def refuse(optimizer: torch.optim.Optimizer, shards: int = 1, moves: bool = True) -> None:
    """Raise if this optimizer cannot be made to train parameters that are spread over the ranks.

    Args:
        optimizer: with the ones that it holds.
        shards: over how many ranks each whole parameter will be split.
        moves: its state will be spread too. False: its parameters were spread when it was made.

    Raises:
        ValueError: it cannot; the message says why, and what to do.
    """
    for one in nested(optimizer):
        why = _obstacle(one, shards) or (_what_stays(one) if moves else None)
        if why is not None:
            raise ValueError(f"{type(one).__name__} cannot train parameters that are spread over the ranks: {why}")


def nested(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those that it holds (lookahead, sharpness-aware and the like), each once."""
    seen: dict[int, torch.optim.Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        for value in vars(one).values():
            items: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
            waiting += [item for item in items if isinstance(item, torch.optim.Optimizer)]
    return iter(seen.values())


# Those that torch has not made for spread parameters: tests/strategies/test_rebinding.py sees whether it still has not.
NEVER = {
    "Adafactor": (
        "it computes with norms of rows and columns, which torch cannot do in place on a matrix that is spread. Use "
        "AdamW, or the strategy 'ddp'"
    ),
    "Rprop": "torch cannot write single elements of a spread tensor. Use another one, or the strategy 'ddp'",
    "SparseAdam": "it wants sparse gradients, and those of spread parameters are dense. Use Adam",
}


def _obstacle(optimizer: torch.optim.Optimizer, shards: int) -> str | None:
    for name, why in NEVER.items():
        kind = getattr(torch.optim, name, None)
        if kind is not None and isinstance(optimizer, kind):
            return why
    if isinstance(optimizer, torch.optim.LBFGS):
        uneven = next(
            (one for group in optimizer.param_groups for one in group["params"] if _splits(one, shards)), None
        )
        if uneven is not None:
            return (
                "it lays all parameters end to end, which torch does only where they are split evenly, and one of "
                f"shape {tuple(uneven.shape)} is not. Use the strategy 'ddp'"
            )
    return None


def _what_stays(optimizer: torch.optim.Optimizer) -> str | None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
            continue
        found = _of_another_shape(parameter, state)
        if found is not None:
            return (
                f"its state {found[0]!r} has the shape {tuple(found[1].shape)}, which is not that of the parameter, "
                f"{tuple(parameter.shape)}, and so cannot be split with it. Prepare it before its first step, or use "
                "the strategy 'ddp'"
            )
    return None


def _splits(parameter: Any, shards: int) -> bool:
    """Whether a parameter is, or will be, split unevenly."""
    if not hasattr(parameter, "placements"):
        return bool(parameter.dim() and parameter.shape[0] % shards)
    mesh, where = parameter.device_mesh, parameter.placements
    return any(parameter.shape[one.dim] % mesh.size(at) for at, one in enumerate(where) if not one.is_replicate())


def _of_another_shape(parameter: torch.Tensor, state: dict[Any, Any]) -> tuple[Any, torch.Tensor] | None:
    for name, value in state.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor) and one.numel() > 1 and one.shape != parameter.shape:
                return name, one
    return None
