"""A DistributedDataParallel that was interrupted, or whose module was edited, gets a new reducer, and trains on."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist import views
from nbdist.shipping.exporters import register_exporter
from nbdist.state import interrupt_hooks
from nbdist.strategies import compression

_wrapped: WeakSet[Any] = WeakSet()  # every DistributedDataParallel known here; repaired after an interrupt
# What was to be trained when the wrapper's reducer was made, by identity: the reducer keeps it alive.
reduced: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

# Methods of DDP and of its reducer that are no public interface, see nbdist/private.py.
_REPAIRING = (
    "_get_ddp_logging_data", "_remove_autograd_hooks", "_build_params_for_reducer", "_ddp_init_helper",
    "_build_debug_param_to_name_mapping", "_register_comm_hook", "_register_builtin_comm_hook",
)  # fmt: skip


@functools.cache
def can(names: tuple[str, ...]) -> bool:
    """Has this torch all of these?"""
    return all(any(hasattr(place, name) for place in (DistributedDataParallel, dist.Reducer, dist)) for name in names)


def can_repair() -> bool:
    return can(_REPAIRING)


def trainable(wrapped: DistributedDataParallel) -> list[int]:
    return [id(parameter) for parameter in wrapped.module.parameters() if parameter.requires_grad]


def wrappers() -> list[DistributedDataParallel]:
    """The living wrappers, whoever made them."""
    return list(_wrapped)


# DDP sets it to True in a forward, which arms the reducer for one backward. Where DDP reads it 1 is as good: not armed.
ARMED = "require_forward_param_sync"


def repair(model: DistributedDataParallel) -> None:
    """Make a DDP wrapper whose forward or backward was interrupted train on rightly; its gradients are dropped.

    A reducer that was stopped half-way cannot be trusted: buckets may be reduced on one rank and not on the other,
    and one rank may have rebuilt its buckets already. So the wrapper gets a new one, built from its parameters as at
    the start, on every rank: call this on all of them. Nothing is communicated here. Hooks, options and the wrapper
    object itself stay.

    Raises:
        NotImplementedError: this torch has other insides; the wrapper must be made again.
    """
    if not can_repair():
        raise NotImplementedError(
            f"with torch {torch.__version__} a DistributedDataParallel that was interrupted cannot be put right: "
            "make it again (prepare() the module anew) before training goes on"
        )
    logged = model._get_ddp_logging_data()  # knows a built-in communication hook; nothing else does
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "_fp_param"):  # DDP's own mixed precision: the half copy may be in place
            parameter.data = parameter._fp_param
    model.reducer._remove_autograd_hooks()
    model.reducer = model.logger = None  # the old buckets go before the new ones come
    parameters, sparse = model._build_params_for_reducer()
    reduced[model] = trainable(model)
    model._ddp_init_helper(parameters, sparse, model._build_debug_param_to_name_mapping(parameters), model.static_graph)
    model._has_rebuilt_buckets = False
    model.require_backward_grad_sync = True
    vars(model)[ARMED] = 1
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    if model.mixed_precision is not None:
        model.reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
    for hook, hook_state in model._comm_hooks:
        compression.start_again(hook_state)  # what it remembers is of the old buckets, and may differ by rank
        dist._register_comm_hook(model.reducer, hook_state, hook)
    if not model._comm_hooks and (kind := _BUILT_IN_HOOKS.get(logged.get("comm_hook", ""))) is not None:
        dist._register_builtin_comm_hook(model.reducer, kind)


_BUILT_IN_HOOKS = {
    "ALLREDUCE": dist.BuiltinCommHookType.ALLREDUCE,
    "FP16_COMPRESS": dist.BuiltinCommHookType.FP16_COMPRESS,
}


def track(model: DistributedDataParallel) -> None:
    """Repair this wrapper too after an interrupt, whoever made it."""
    _wrapped.add(model)


def forget(model: DistributedDataParallel) -> None:
    """Another wrapper has taken this one's place."""
    _wrapped.discard(model)


def _repair_all() -> None:
    for model in list(_wrapped):
        repair(model)


interrupt_hooks.add(_repair_all)
register_exporter(DistributedDataParallel, unwrap=lambda model: views.bare(model.module))
