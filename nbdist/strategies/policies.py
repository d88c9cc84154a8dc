"""In what precision the units of a sharded model are gathered and their gradients added up, and where shards are kept.

Mixed precision means under sharding what it means elsewhere: parameters stay float32, operations run under autocast
(nbdist/views.py). Besides, a unit is gathered in half precision, which halves what is sent and what a whole unit takes;
gradients are added up in float32. Where torch's kernels want float32 weights under autocast, the unit is gathered as it
is. A policy that the user gives is taken as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from nbdist import state
from nbdist.precision import Precision

# Their kernels take half-precision weights nowhere ...
_WHOLE = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
# ... and these not on a CPU, when what comes in is float32.
_WHOLE_ON_CPU = (nn.LayerNorm, nn.GroupNorm)
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def policies(
    module: nn.Module, plugin: Any, precision: Precision | None, device: torch.device, called: bool
) -> dict[str, Any]:
    """`fully_shard`'s arguments about precision and offloading, for one unit.

    Args:
        module: the unit; units within it are sharded already.
        plugin: a FullyShardedDataParallelPlugin or None.
        precision: the Accelerator's.
        device: where it computes.
        called: the user calls it: it is the model itself.
    """
    return {"mp_policy": _mixed(module, plugin, precision, device, called), "offload_policy": _offload(plugin, device)}


def _mixed(
    module: nn.Module, plugin: Any, precision: Precision | None, device: torch.device, called: bool
) -> MixedPrecisionPolicy:
    given = getattr(plugin, "mixed_precision_policy", None)
    if given is not None:
        return given
    if precision is None or not precision.mixed or not precision.enabled:
        return MixedPrecisionPolicy()
    inside = list(own_modules(module))
    whole = (*_WHOLE, *_WHOLE_ON_CPU) if device.type == "cpu" and called else _WHOLE
    if any(isinstance(one, whole) and any(True for _ in one.parameters(recurse=False)) for one in inside):
        return MixedPrecisionPolicy()
    if any(one.dtype not in _FLOATS for part in inside for one in part.parameters(recurse=False)):
        return MixedPrecisionPolicy()
    # What the user puts into the model stays as it is: a time of 999 would become 1000.
    return MixedPrecisionPolicy(precision.dtype, torch.float32, cast_forward_inputs=not called)


def own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Those whose parameters are gathered with a unit: not those of the units within it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_modules(child)


def _offload(plugin: Any, device: torch.device) -> OffloadPolicy:
    given = getattr(plugin, "cpu_offload", None) or OffloadPolicy()
    if isinstance(given, CPUOffloadPolicy) and device.type == "cpu":
        state.note_once("cpu_offload has no effect: the device is the CPU, where the shards are already")
        return OffloadPolicy()
    return given
