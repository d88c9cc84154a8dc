"""`%distributed resync`: after a Stop that left ranks a step apart, everything trained becomes what rank 0 has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist


def _tensors(value: Any) -> dict[str, torch.Tensor] | None:
    """The tensors of a module, an optimizer or a tensor, by a name that is equal on all ranks; None for anything
    else.
    """
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, torch.optim.Optimizer):
        found = {}
        for number, (_, state) in enumerate(sorted(_by_position(value).items())):
            for key, item in state.items():
                if isinstance(item, torch.Tensor):
                    found[f"{number}.{key}"] = item
        return found
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return {"": value}
    return None


def _by_position(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {i: optimizer.state[parameter] for i, parameter in enumerate(parameters) if parameter in optimizer.state}


def resync(namespace: dict[str, Any], leave: Collection[str] = ()) -> dict[str, list[str]]:
    """Write rank 0's tensors, optimizer states and plain numbers over every other rank's, in place. Collective: all
    ranks must call it.

    Args:
        leave: names that are each rank's own by intent.

    Returns {"done": names, "differ": names whose structure differs between ranks and that were left alone}.
    """
    names = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in leave}
    mine: dict[str, Any] = {}
    for name, value in names.items():
        tensors = _tensors(value)
        if tensors is not None:
            mine[name] = {key: (tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()}
        elif type(value) in (int, float, bool):
            mine[name] = type(value).__name__
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    done, differ = [], []
    seen: set[int] = set()
    for name in sorted(set().union(*everyone)):
        if any(other.get(name) != everyone[0].get(name) for other in everyone):
            differ.append(name)
            continue
        value = namespace[name]
        if isinstance(mine[name], str):
            box = [value]
            dist.broadcast_object_list(box, src=0)
            namespace[name] = box[0]
        else:
            for tensor in (_tensors(value) or {}).values():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    with torch.no_grad():
                        whole = tensor.detach().contiguous()
                        dist.broadcast(whole, src=0)
                        if whole.data_ptr() != tensor.data_ptr():
                            tensor.detach().copy_(whole)
        done.append(name)
    return {"done": done, "differ": differ}
