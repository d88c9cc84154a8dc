"""Whether the ranks prepare the same model: asked before torch exchanges its tensors, which end the process where their
sizes or dtypes differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nbdist import messages


def agree(model: torch.nn.Module, value: Any) -> list[Any]:
    """Every rank's value, by rank: a collective, like `nbdist.messages.agree`.

    Args:
        model: this rank's, the user's own.
        value: what goes along.

    Raises:
        DistributedOperationException: the ranks' models differ in a name, shape or dtype, or in what is trained; on
            every rank, naming the first parameter or buffer that differs, and each rank's.
    """
    if messages.ranks() == 1:
        return [value]
    described = _described(model)
    digest = hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()
    answers = messages.agree("prepare", (digest, value))
    if len({answer[0] for answer in answers}) > 1:
        raise messages.DistributedOperationException(
            f"prepare: the ranks' models differ. {first_difference(messages.exchange(described))}. Make the same model "
            "on each rank; which values it has does not matter, rank 0's count"
        )
    return [answer[1] for answer in answers]


def _described(model: torch.nn.Module) -> list[tuple[str, str]]:
    left_out = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch exchanges nothing of these
    named = [(name, one, ", trained" if one.requires_grad else "") for name, one in model.named_parameters()]
    named += [(name, one, ", a buffer") for name, one in model.named_buffers()]
    return [
        (name, "not initialized" if is_lazy(one) else f"{str(one.dtype)[6:]} {tuple(one.shape)}{what}")
        for name, one, what in named
        if name not in left_out
    ]


def first_difference(ranks: list[list[tuple[str, str]]]) -> str:
    """Where the ranks' descriptions part: lists of (name, what it is), of which not all are equal."""
    at = 0
    while len({tuple(items[at]) if at < len(items) else None for items in ranks}) == 1:
        at += 1
    names = {items[at][0] for items in ranks if at < len(items)}
    for name in sorted(names):
        told = [dict(items).get(name, "nothing of that name") for items in ranks]
        if len(set(told)) > 1:
            return f"{name}: " + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(told))
    return "Their order: " + "; ".join(f"rank {rank} has {items[at][0]}" for rank, items in enumerate(ranks))
