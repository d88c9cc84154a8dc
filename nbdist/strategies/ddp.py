"""Replicas: the whole model on every rank, gradients averaged by torch's DistributedDataParallel.

Five things are added to DDP. What the user's module has besides forward is there on the wrapper too
(strategies/replica.py). Its reducer is *armed* at each backward and not by forward alone, so that several
backward calls after one forward, and a forward that went through the bare module, are averaged too instead of
silently staying each rank's own. A loss that leaves parameters out is an error at once. A wrapper is made good again
after an interrupt (strategies/repair.py). And a model that was edited, by freezing a part or by adding one, is averaged
as it is now (strategies/watch.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.distributed.utils as dist_utils
from torch.nn.parallel import DistributedDataParallel

from nbdist import alone, engine, reach, views
from nbdist.state import DistributedType, Process
from nbdist.strategies import compression, likeness, replica
from nbdist.strategies.base import Strategy, Through, as_it_is
from nbdist.strategies.repair import ARMED, can, can_repair, forget, reduced, repair, track, trainable, wrappers
from nbdist.strategies.watch import WATCH, be_told, doubt, trained, watch

# Those that a strategy made or took over, oldest first, with the options they were made with (None: not made here).
_known: WeakKeyDictionary[Any, dict[str, Any] | None] = WeakKeyDictionary()


class DDP(Strategy):
    """DistributedDataParallel.

    Args:
        process: the facts about this process.
        **options: what DistributedDataParallel takes besides the module (find_unused_parameters, bucket_cap_mb ...),
            and comm_hook, comm_wrapper and comm_state_option (strategies/compression.py).

    Raises:
        ValueError: communication hooks that do not go together.
    """

    name: ClassVar[str] = "ddp"
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    shares_gradients: ClassVar[bool] = True

    def __init__(self, process: Process, **options: Any) -> None:
        super().__init__(process)
        self._hook = compression.checked(options)
        self._options = options
        self._models: list[weakref.ref[Any]] = []
        self._local: WeakSet[Any] = WeakSet()  # those that share no gradients now
        self._arms = can(_ARMING)
        self._started = False

    def setup(self) -> None:
        self._started = alone.start(self.process)  # one process that asked for DDP by name

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
        return self.process.distributed_type

    def wrap(self, model: torch.nn.Module, through: Through = as_it_is) -> torch.nn.Module:
        """The model inside DDP, equal to rank 0's on all ranks; one with nothing to train comes back bare, equal
        too.

        A module has one wrapper, whoever made it: one that is wrapped already, or whose wrapper is still alive, keeps
        it. Only where the wrapper came from a strategy with other options, or for ranks that are gone, it gets a new
        one.

        Raises:
            DistributedOperationException: the ranks' models differ, see `nbdist.strategies.likeness`.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            likeness.agree(model, False)
            if self.process.world_size > 1:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), src=0)
            return through(model)
        inner = getattr(model, "_orig_mod", model)  # torch.compile of a wrapper is the wrapper
        if isinstance(inner, DistributedDataParallel):
            if self._fits(inner) and (_is_current(inner) or _known.get(inner) is None):
                self._take_over(inner, through(views.bare(inner.module)))
                return model
            model = views.bare(inner.module)
        alive = [one for one in _wrappers(model) if self._fits(one) and _is_current(one)]
        # A wrapper that nobody holds may be gone on one rank and not yet on another.
        if all(likeness.agree(model, bool(alive))):
            self._take_over(alive[0], through(model))
            return alive[0]
        for old in _wrappers(model):
            if _known.get(old) is not None:
                _retire(old)
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        seen = through(model)
        wrapped = replica.class_for(seen)(seen, device_ids=device_ids, **self._options)
        replica.open_up(wrapped, seen)
        if self._hook:
            compression.register(wrapped, self._hook)
        self._keep(wrapped, self._asked())
        return wrapped

    def _asked(self) -> dict[str, Any]:
        return {**self._options, **self._hook}

    def _fits(self, wrapped: DistributedDataParallel) -> bool:
        options = _known.get(wrapped)
        return options is None or options == self._asked()  # what the user made has the user's options

    def _take_over(self, wrapped: DistributedDataParallel, module: torch.nn.Module) -> None:
        """Serve a wrapper that is there already; the module is made equal to rank 0's, as by a new wrapper.

        `module` is the user's, or the view of it through which it is to be called from now on.
        """
        if wrapped.module is not module or not isinstance(wrapped, replica.Replica):
            replica.open_up(wrapped, module)
        if any(ref() is wrapped for ref in self._models):
            doubt()
            self._look_at(wrapped)  # layers put into it since are made equal now
            return
        if self.process.world_size > 1 and _is_current(wrapped):
            _make_equal(wrapped)
        self._keep(wrapped, _known.get(wrapped))

    def _keep(self, wrapped: DistributedDataParallel, options: dict[str, Any] | None) -> None:
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(wrapped))
        _known[wrapped] = options
        vars(wrapped)[ARMED] = 1
        reduced.setdefault(wrapped, trainable(wrapped))
        track(wrapped)
        be_told()
        doubt()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return views.bare(model.module) if isinstance(model, DistributedDataParallel) else model

    def look_again(self) -> None:
        for ref in self._models:
            model = ref()
            if model is not None:
                self._look_at(model)

    def _look_at(self, model: DistributedDataParallel) -> None:
        """A model that was edited gets a new reducer; all ranks have edited it alike."""
        now, before = trainable(model), reduced.get(model, [])
        if now and now != before and model in _known and _is_current(model) and can_repair():
            self._make_anew(model, set(now) - set(before))
        watch(model)

    def _make_anew(self, model: DistributedDataParallel, new: set[int]) -> None:
        if model.static_graph:
            raise RuntimeError(
                f"what is trained of {type(views.bare(model.module)).__name__} was changed, and static_graph=True says "
                "that this never happens: prepare it with an Accelerator without static_graph"
            )
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        sync = model.require_backward_grad_sync
        repair(model)
        model.require_backward_grad_sync = sync
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
        if not self._arms:
            torch.autograd.backward(loss, seed, **options)  # averaged after forward through the wrapper, and once
            return
        models = []
        for ref in self._models:
            model = ref()
            if model is None:
                continue
            own = model.__dict__
            if not own["require_backward_grad_sync"]:
                continue
            parameters, were = own[WATCH]
            if [*map(trained, parameters)] != were:
                self._look_at(model)
            models.append(model)
            # A static graph keeps its own count of iterations.
            if (own[ARMED] is not True or own["find_unused_parameters"]) and not own["static_graph"]:
                reducer = model.reducer
                # The first backward notes the order for new buckets, which forward makes of it: there may be none
                # between.
                reducer._rebuild_buckets()
                # With find_unused_parameters the reducer looks from this very loss which parameters will have no
                # gradient.
                reducer.prepare_for_backward([loss] if own["find_unused_parameters"] else [])
            own[ARMED] = 1
        if options:
            torch.autograd.backward(loss, seed, **options)
        else:
            engine.backward(loss, seed)
        for model in models:
            try:
                model.reducer._check_reducer_finalized()
            except RuntimeError:
                message = _left_out(model)
                repair(model)
                raise RuntimeError(message) from None

    def shares(self, loss: torch.Tensor) -> bool:
        models = [model for ref in self._models if (model := ref()) is not None and model.require_backward_grad_sync]
        return bool(models) and reach.reaches(loss, [one for model in models for one in model.parameters()])

    def set_sync(self, model: torch.nn.Module, sync: bool) -> None:
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            local = inner in self._local
            # torch learns a static graph in its first backward, and asserts that this one shares gradients. Shared
            # once more they are right too: their mean stays what it is.
            learns = inner.static_graph and not getattr(inner, "_static_graph_delay_allreduce_enqueued", True)
            inner.require_backward_grad_sync = (sync or learns) and not local

    def averaged(self) -> Iterator[torch.Tensor]:
        for model in wrappers():
            yield from model.module.parameters()

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
    for wrapped in (*known, *(one for one in wrappers() if one not in known)):
        if views.bare(wrapped.module) is views.bare(module):
            yield wrapped


def _is_current(wrapped: DistributedDataParallel) -> bool:
    """Whether its ranks are all the ranks that there are now."""
    return wrapped.process_group is dist.group.WORLD


def _retire(wrapped: DistributedDataParallel) -> None:
    """Another wrapper takes this one's place: it can still be called, and averages no gradients any more."""
    _known.pop(wrapped, None)
    forget(wrapped)
    if can(("_remove_autograd_hooks",)):
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


def _left_out(wrapped: DistributedDataParallel) -> str:
    module = wrapped.module
    if set(reduced.get(wrapped, [])) - set(trainable(wrapped)):
        return (
            f"parameters of {type(module).__name__} were taken out of it since the last backward: call "
            "accelerator.prepare(model) after such an edit"
        )
    names = [name for name, one in module.named_parameters() if one.requires_grad and one.grad is None]
    told = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return (
        f"this loss leaves out parameters of {type(module).__name__}: {told or 'some'}. Add the losses and call "
        "backward once, or let DDP look for them: "
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"
    )


# Methods of DDP's reducer that are no public interface, see nbdist/private.py.
_ARMING = ("_rebuild_buckets", "_check_reducer_finalized", "prepare_for_backward")
