"""What belongs to a parameter, carried to the one that takes its place: how it is spread over the ranks, its gradient,
hooks, attributes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from nbdist import messages

_HOOKS = "_backward_hooks"
_AFTER = "_post_accumulate_grad_hooks"
Pairs = list[tuple[str, torch.Tensor, torch.Tensor]]


def is_spread(tensor: torch.Tensor) -> bool:
    """Is it a DTensor?"""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def spread_over(tensor: torch.Tensor) -> Any:
    """The mesh that a tensor is spread over; None for one that is whole."""
    return getattr(tensor, "device_mesh", None)


@torch.no_grad()
def like(whole: torch.Tensor, new: Any) -> torch.Tensor:
    """A tensor, spread as `new` is: each rank keeps its own part of what it has, so nothing is sent.

    Args:
        whole: of `new`'s shape. What is spread already, otherwise, is gathered first: then it is a collective.
        new: a parameter, spread or not.
    """
    if is_spread(whole):
        if not is_spread(new) or (whole.device_mesh, whole.placements) != (new.device_mesh, new.placements):
            whole = whole.full_tensor()
        else:
            return whole
    if not is_spread(new):
        return whole.to(new.device)
    from torch.distributed.tensor import DTensor

    mesh, part = new.device_mesh, whole
    at = mesh.get_coordinate()
    cuts = [(dim, one) for dim, one in enumerate(new.placements) if not one.is_replicate()]
    # A strided shard is cut from what the mesh's later dimensions have left of the tensor: they go first.
    ordered = [cut for cut in cuts if not hasattr(cut[1], "split_factor")]
    ordered += [cut for cut in reversed(cuts) if hasattr(cut[1], "split_factor")]
    for dim, placement in ordered:
        pieces = part.chunk(mesh.size(dim), placement.dim)
        if at[dim] < len(pieces):
            part = pieces[at[dim]]
        else:
            part = part.narrow(placement.dim, 0, 0)
    local = part.to(new.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, new.placements, run_check=False, shape=new.shape, stride=tuple(new.stride()))


def belongings(pairs: Pairs) -> None:
    """Carry over what the user has put on parameters. A collective where any has a gradient.

    Args:
        pairs: (name, old, new) of each.
    """
    lost = []
    for name, old, new in pairs:
        if new.requires_grad is not old.requires_grad:
            new.requires_grad_(old.requires_grad)
        for key, value in vars(old).items():
            if key not in vars(new):
                setattr(new, key, value)
        if getattr(old, _HOOKS, None):
            lost.append(name)
        after = getattr(old, _AFTER, None)
        if after and not getattr(new, _AFTER, None):
            setattr(new, _AFTER, after)  # the very dict: what registered them can still take them off
    if lost:
        warnings.warn(
            f"{_some(lost)}: hooks by register_hook are not called any more, since no rank "
            "has the whole gradient. What register_post_accumulate_grad_hook calls sees this rank's part of it",
            stacklevel=4,
        )
    _gradients(pairs)


def _gradients(pairs: Pairs) -> None:
    """Gradients from before, of each rank's own backward: their mean over the ranks."""
    mine = [old.grad is not None for _, old, _ in pairs]
    everyone = [mine] if messages.ranks() == 1 else messages.agree("prepare", mine)
    for at, (_, old, new) in enumerate(pairs):
        if not any(have[at] for have in everyone):
            continue
        gradient = torch.zeros_like(old) if old.grad is None else old.grad.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if is_spread(gradient) and is_spread(old):
            gradient = gradient.full_tensor()
        elif len(everyone) > 1:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient)
            gradient /= len(everyone)
        new.grad = like(gradient, new)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
