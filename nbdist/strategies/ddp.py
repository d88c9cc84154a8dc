"""Replicas: the whole model on every rank, gradients averaged by torch's DistributedDataParallel.

Three things are added to DDP. Its reducer is *armed* at each backward and not by forward alone, so that several
backward calls after one forward, and a forward that went through the bare module, are averaged too instead of
silently staying each rank's own. A loss that leaves parameters out is an error at once. And `repair` makes a wrapper
good again after an interrupt.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.shipping.exporters import register_exporter
from nbdist.state import DistributedType, Process, interrupt_hooks
from nbdist.strategies.base import Strategy

_wrapped: WeakSet[Any] = WeakSet()  # every DistributedDataParallel known here; repaired after an interrupt


class DDP(Strategy):
    """DistributedDataParallel.

    Args:
        process: the facts about this process.
        **options: what DistributedDataParallel takes besides the module (find_unused_parameters, bucket_cap_mb ...).
    """

    name: ClassVar[str] = "ddp"
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})

    def __init__(self, process: Process, **options: Any) -> None:
        super().__init__(process)
        self._options = options
        self._models: list[weakref.ref[Any]] = []
        self._started = False

    def setup(self) -> None:
        if not dist.is_initialized():  # one process that asked for DDP by name: a group of itself
            backend = "cpu:gloo,cuda:nccl" if self.process.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._started = True

    def teardown(self) -> None:
        if self._started and dist.is_initialized():
            dist.destroy_process_group()
            self._started = False

    @property
    def data_parallel_size(self) -> int:
        return self.process.world_size

    @property
    def data_parallel_rank(self) -> int:
        return self.process.rank

    @property
    def distributed_type(self) -> DistributedType:
        if self.process.world_size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.process.device.type == "cuda" else DistributedType.MULTI_CPU

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model inside DDP, equal to rank 0's on all ranks; one with nothing to train comes back bare, equal
        too.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            if self.process.world_size > 1:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), src=0)
            return model
        for ref in self._models:
            known = ref()
            if known is not None and (known is model or known.module is model):
                return known  # prepared before: a second wrapper would average the gradients twice
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._options)
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(wrapped))
        track(wrapped)
        return wrapped

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def backward(self, loss: torch.Tensor, seed: torch.Tensor, **options: Any) -> None:
        """Backward with gradients averaged over the ranks, whichever way forward went.

        Raises:
            RuntimeError: the loss does not reach all parameters of a model that it reaches.
        """
        models = [model for ref in self._models if (model := ref()) is not None and model.require_backward_grad_sync]
        for model in models:
            if not model.static_graph:  # a static graph keeps its own count of iterations
                # The first backward notes the order for new buckets, which forward makes of it: there may be none
                # between.
                model.reducer._rebuild_buckets()
                # With find_unused_parameters the reducer looks from this very loss which parameters will have no
                # gradient.
                model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
        torch.autograd.backward(loss, seed, **options)
        for model in models:
            try:
                model.reducer._check_reducer_finalized()
            except RuntimeError:
                message = _left_out(model.module)
                repair(model)
                raise RuntimeError(message) from None

    def set_sync(self, model: torch.nn.Module, sync: bool) -> None:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = sync

    def after_interrupt(self) -> None:
        for ref in self._models:
            model = ref()
            if model is not None:
                repair(model)


def _left_out(module: torch.nn.Module) -> str:
    names = [name for name, one in module.named_parameters() if one.requires_grad and one.grad is None]
    told = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return (
        f"this loss leaves out parameters of {type(module).__name__}: {told or 'some'}. Add the losses and call "
        "backward once, or let DDP look for them: "
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"
    )


def repair(model: DistributedDataParallel) -> None:
    """Make a DDP wrapper whose forward or backward was interrupted train on rightly; its gradients are dropped.

    A reducer that was stopped half-way cannot be trusted: buckets may be reduced on one rank and not on the other,
    and one rank may have rebuilt its buckets already. So the wrapper gets a new one, built from its parameters as at
    the start, on every
    rank: call this on all of them. Nothing is communicated here. Hooks, options and the wrapper object itself stay.
    """
    logged = model._get_ddp_logging_data()  # knows a built-in communication hook; nothing else does
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "_fp_param"):  # DDP's own mixed precision: the half copy may be in place
            parameter.data = parameter._fp_param
    model.reducer._remove_autograd_hooks()
    model.reducer = model.logger = None  # the old buckets go before the new ones come
    parameters, sparse = model._build_params_for_reducer()
    model._ddp_init_helper(parameters, sparse, model._build_debug_param_to_name_mapping(parameters), model.static_graph)
    model._has_rebuilt_buckets = False
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    if model.mixed_precision is not None:
        model.reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
    for hook, hook_state in model._comm_hooks:
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


def _repair_all() -> None:
    for model in list(_wrapped):
        repair(model)


interrupt_hooks.add(_repair_all)
register_exporter(DistributedDataParallel, unwrap=lambda model: model.module)
