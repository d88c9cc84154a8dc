"""Norms of gradients of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def gradients_of(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    each = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [one.grad for one in each if one.grad is not None]


def local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part, the very memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def joint(gradients: list[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """The norm of all of these together, over all ranks that have parts of them. A 0-dim tensor, the same on all. A
    collective for each way in which they are spread.
    """
    norm_type = float(norm_type)
    spread: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        key: Any = None
        if isinstance(gradient, DTensor):
            if any(one.is_partial() for one in gradient.placements):
                gradient = gradient.full_tensor()
            else:
                dims = tuple(at for at, one in enumerate(gradient.placements) if not one.is_replicate())
                key = (gradient.device_mesh, dims) if dims else None
        spread.setdefault(key, []).append(local(gradient))
    totals = []
    for key, parts in spread.items():
        filled = [part for part in parts if part.numel()] or [parts[0].new_full((1,), _nothing(norm_type))]
        total = torch.nn.utils.get_total_norm(filled, norm_type)
        if key is not None:
            mesh, dims = key
            for dim in dims:
                total = _over(total, mesh.get_group(dim), norm_type)
        totals.append(total)
    if not totals:
        return torch.tensor(0.0)
    result = totals[0]
    if len(totals) > 1:
        result = torch.linalg.vector_norm(torch.stack([one.to(result.device) for one in totals]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(result)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {result.item()}, so they cannot be clipped. "
            "Leave error_if_nonfinite out to clip all the same"
        )
    return result


def _nothing(norm_type: float) -> float:
    """What a rank without a part brings."""
    return float("inf") if norm_type == float("-inf") else 0.0


def _over(total: torch.Tensor, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    """The norm over the ranks' parts."""
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    elif norm_type == float("-inf"):
        dist.all_reduce(total, dist.ReduceOp.MIN, group=group)
    else:
        total = total.pow(norm_type)
        dist.all_reduce(total, group=group)
        total = total.pow(1.0 / norm_type)
    return total


@torch.no_grad()
def clip(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for gradients that are spread over ranks, each in its own way."""
    gradients = gradients_of(parameters)
    total = joint(gradients, norm_type, error_if_nonfinite)
    if gradients:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        scale([local(gradient) for gradient in gradients], factor, foreach)
    return total


@torch.no_grad()
def scale(gradients: list[torch.Tensor], factor: float | torch.Tensor, foreach: bool | None = None) -> None:
    """Multiply in place, in one launch for each dtype and device."""
    multiply = getattr(torch, "_foreach_mul_", None)
    if multiply is None or foreach is False:
        for gradient in gradients:
            gradient.mul_(factor)
        return
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), alike in kinds.items():
        multiply(alike, factor.to(device) if isinstance(factor, torch.Tensor) else factor)
