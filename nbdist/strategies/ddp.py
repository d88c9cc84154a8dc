"""Replicas: the whole model on every rank, gradients averaged by torch's DistributedDataParallel.

Four things are added to DDP. Its reducer is *armed* at each backward and not by forward alone, so that several
backward calls after one forward, and a forward that went through the bare module, are averaged too instead of
silently staying each rank's own. A loss that leaves parameters out is an error at once. `repair` makes a wrapper
good again after an interrupt. And a model that was edited between cells, by freezing a part or by adding one, is
averaged as it is now.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.distributed.utils as dist_utils
from torch.nn.parallel import DistributedDataParallel

from nbdist import messages
from nbdist.shipping.exporters import register_exporter
from nbdist.state import DistributedType, Process, interrupt_hooks
from nbdist.strategies.base import Strategy

_wrapped: WeakSet[Any] = WeakSet()  # every DistributedDataParallel known here; repaired after an interrupt
# Those that a strategy made or took over, oldest first, with the options they were made with (None: not made here).
_known: WeakKeyDictionary[Any, dict[str, Any] | None] = WeakKeyDictionary()
# What was to be trained when the wrapper's reducer was made, by identity: the reducer keeps it alive.
_reduced: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


class DDP(Strategy):
    """DistributedDataParallel.

    Args:
        process: the facts about this process.
        **options: what DistributedDataParallel takes besides the module (find_unused_parameters, bucket_cap_mb ...).
    """

    name: ClassVar[str] = "ddp"
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    shares_gradients: ClassVar[bool] = True

    def __init__(self, process: Process, **options: Any) -> None:
        super().__init__(process)
        self._options = options
        self._models: list[weakref.ref[Any]] = []
        self._local: WeakSet[Any] = WeakSet()  # those that share no gradients now
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

        A module has one wrapper, whoever made it: one that is wrapped already, or whose wrapper is still alive, keeps
        it. Only where the wrapper came from a strategy with other options, or for ranks that are gone, it gets a new
        one.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            if self.process.world_size > 1:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), src=0)
            return model
        inner = getattr(model, "_orig_mod", model)  # torch.compile of a wrapper is the wrapper
        if isinstance(inner, DistributedDataParallel):
            if self._fits(inner) and (_is_current(inner) or _known.get(inner) is None):
                self._take_over(inner)
                return model
            model = inner.module
        alive = [one for one in _wrappers(model) if self._fits(one) and _is_current(one)]
        # A wrapper that nobody holds may be gone on one rank and not yet on another.
        if all(messages.agree("prepare", bool(alive))):
            self._take_over(alive[0])
            return alive[0]
        for old in _wrappers(model):
            if _known.get(old) is not None:
                _retire(old)
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._options)
        self._keep(wrapped, self._options)
        return wrapped

    def _fits(self, wrapped: DistributedDataParallel) -> bool:
        options = _known.get(wrapped)
        return options is None or options == self._options  # what the user made has the user's options

    def _take_over(self, wrapped: DistributedDataParallel) -> None:
        """Serve a wrapper that is there already; the module is made equal to rank 0's, as by a new wrapper."""
        if any(ref() is wrapped for ref in self._models):
            return
        if self.process.world_size > 1 and _is_current(wrapped):
            _make_equal(wrapped)
        self._keep(wrapped, _known.get(wrapped))

    def _keep(self, wrapped: DistributedDataParallel, options: dict[str, Any] | None) -> None:
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(wrapped))
        _known[wrapped] = options
        _reduced.setdefault(wrapped, _trainable(wrapped))
        track(wrapped)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def look_again(self) -> None:
        for ref in self._models:
            model = ref()
            if model is None or not _is_current(model):
                continue
            now, before = _trainable(model), _reduced.get(model, [])
            if not now or now == before or not _can(_REPAIRING):
                continue
            new = set(now) - set(before)
            gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
            repair(model)
            for parameter, gradient in gradients:
                parameter.grad = gradient
                # What comes from the notebook is equal. What each rank has made anew has been through this step's
                # forward already, so autograd is not to see that it is made equal now.
                if id(parameter) in new:
                    dist.broadcast(parameter.data, src=0, group=model.process_group)

    def backward(self, loss: torch.Tensor, seed: torch.Tensor, **options: Any) -> None:
        """Backward with gradients averaged over the ranks, whichever way forward went.

        Raises:
            RuntimeError: the loss does not reach all parameters of a model that it reaches.
        """
        models = [model for ref in self._models if (model := ref()) is not None and model.require_backward_grad_sync]
        if not _can(_ARMING):
            torch.autograd.backward(loss, seed, **options)  # averaged after forward through the wrapper, and once
            return
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
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            inner.require_backward_grad_sync = sync and inner not in self._local

    def keep_local(self, model: torch.nn.Module, local: bool) -> None:
        inner = getattr(model, "_orig_mod", model)
        if local:
            self._local.add(inner)
        else:
            self._local.discard(inner)
        self.set_sync(model, not local)

    def after_interrupt(self) -> None:
        for ref in self._models:
            model = ref()
            if model is not None:
                repair(model)


def _wrappers(module: torch.nn.Module) -> Iterator[DistributedDataParallel]:
    """The living wrappers of this module, first those that a strategy knows."""
    known = list(_known)
    for wrapped in (*known, *(one for one in list(_wrapped) if one not in known)):
        if wrapped.module is module:
            yield wrapped


def _trainable(wrapped: DistributedDataParallel) -> list[int]:
    return [id(parameter) for parameter in wrapped.module.parameters() if parameter.requires_grad]


def _is_current(wrapped: DistributedDataParallel) -> bool:
    """Whether its ranks are all the ranks that there are now."""
    return wrapped.process_group is dist.group.WORLD


def _retire(wrapped: DistributedDataParallel) -> None:
    """Another wrapper takes this one's place: it can still be called, and averages no gradients any more."""
    _known.pop(wrapped, None)
    _wrapped.discard(wrapped)
    if _can(("_remove_autograd_hooks",)):
        wrapped.reducer._remove_autograd_hooks()
    else:
        wrapped.require_backward_grad_sync = False


def _make_equal(wrapped: DistributedDataParallel) -> None:
    """Rank 0's parameters and buffers on every rank."""
    sync = getattr(dist_utils, "_sync_module_states", None)
    ignored = wrapped.parameters_to_ignore
    if sync is not None:
        sync(
            module=wrapped.module,
            process_group=wrapped.process_group,
            broadcast_bucket_size=250 * 2**20,
            src=0,
            params_and_buffers_to_ignore=ignored,
        )
        return
    named = [*wrapped.module.named_parameters(), *wrapped.module.named_buffers()]
    for name, tensor in named:  # one by one: more messages, the same values
        if name not in ignored:
            dist.broadcast(tensor.detach(), src=0, group=wrapped.process_group)


# Methods of DDP and of its reducer that are no public interface, see nbdist/private.py.
_ARMING = ("_rebuild_buckets", "_check_reducer_finalized", "prepare_for_backward")
_REPAIRING = (
    "_get_ddp_logging_data", "_remove_autograd_hooks", "_build_params_for_reducer", "_ddp_init_helper",
    "_build_debug_param_to_name_mapping", "_register_comm_hook", "_register_builtin_comm_hook",
)  # fmt: skip


@functools.cache
def _can(names: tuple[str, ...]) -> bool:
    """Has this torch all of these?"""
    return all(any(hasattr(place, name) for place in (DistributedDataParallel, dist.Reducer, dist)) for name in names)


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

    Raises:
        NotImplementedError: this torch has other insides; the wrapper must be made again.
    """
    if not _can(_REPAIRING):
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
    _reduced[model] = _trainable(model)
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
