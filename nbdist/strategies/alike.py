"""What the ranks of a tensor parallel group must have alike: the values that they begin with, what dropout draws, and
the gradients of what is not split.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbdist import messages


def make(model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every rank."""
    if messages.ranks() == 1:
        return
    done = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta or id(tensor) in done:
            continue
        done.add(id(tensor))
        there = tensor.detach().contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(there)


# ---------------------------------------------------------------------- dropout
def draw(model: nn.Module, mesh: DeviceMesh) -> None:
    """From now on a forward of this model that trains draws the same on all ranks of the mesh, if it has dropout."""
    drops = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is float and (name == "p" or "drop" in name.lower())
    ]
    if drops and mesh.size() > 1:
        model.register_forward_pre_hook(_Drawing(drops, mesh))


class _Drawing:
    """Called before a forward: the first rank's state of torch's generators, on all ranks."""

    def __init__(self, drops: list[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self._drops, self._mesh = drops, mesh

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not module.training or not any(getattr(one, name) for one, name in self._drops):
            return
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        group = self._mesh.get_group()
        message = torch.cat(states).to(messages.message_device())
        with messages.waiting():
            dist.broadcast(message, group_src=0, group=group)
        if self._mesh.get_local_rank():
            mine, *device = message.cpu().split([len(one) for one in states])
            torch.set_rng_state(mine)
            for one in device:
                torch.cuda.set_rng_state(one)


# ---------------------------------------------------------------------- gradients
# Models whose first gradients were not looked at yet.
doubtful: dict[int, tuple[weakref.ref[nn.Module], DeviceMesh]] = {}


def doubt(model: nn.Module, mesh: DeviceMesh) -> None:
    """Look at the gradients of its first backward."""
    if mesh.size() > 1:
        doubtful[id(model)] = weakref.ref(model), mesh


@torch.no_grad()
def look() -> None:
    """Behind a backward. A collective of the group where there were doubts.

    Raises:
        RuntimeError: gradients of what is not split differ from rank to rank; on all of the group.
    """
    for key, (ref, mesh) in list(doubtful.items()):
        model = ref()
        if model is None:
            del doubtful[key]
            continue
        found = [(name, one.grad) for name, one in model.named_parameters() if not _is_split(one)]
        there = [(name, grad) for name, grad in found if grad is not None]
        if any(one.grad is not None for one in model.parameters()):
            del doubtful[key]
        if there:
            _compare(type(model).__name__.removeprefix("FSDP"), there, mesh)


def _is_split(one: torch.Tensor) -> bool:
    mesh = getattr(one, "device_mesh", None)
    return mesh is not None and "tp" in (mesh.mesh_dim_names or ())


def _compare(kind: str, gradients: list[tuple[str, torch.Tensor]], mesh: DeviceMesh) -> None:
    parts = [(one.to_local() if isinstance(one, DTensor) else one).double() for _, one in gradients]
    mine = torch.stack([torch.stack([one.sum(), one.abs().sum()]) for one in parts])
    mine = torch.cat([mine, torch.full((1, 2), float(len(parts)), dtype=mine.dtype, device=mine.device)])
    everyone = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(everyone, mine, group=mesh.get_group())
    told = torch.stack(everyone).cpu()
    spans = told.amax(0) - told.amin(0)
    size = told[..., 1].amax(0)[:, None] + 1e-30
    wrong = [
        name for (name, _), bad in zip(gradients, (spans[:-1] > 1e-3 * size[:-1]).any(1).tolist(), strict=True) if bad
    ]
    if wrong:
        named = ", ".join(wrong[:3]) + (" and others" if len(wrong) > 3 else "")
        raise RuntimeError(
            f"the gradient of {named} of {kind} is another one on each rank of the tensor parallel group, so that each "
            "would train a model of its own: the plan leaves the layer out, and it computes on another part of a "
            "sequence, or on other heads, on each rank. Put it into the plan: 'sequence_parallel' for a part of a "
            "sequence, 'replicated_with_grad_allreduce' for a norm of heads"
        )
