"""Shards: each rank keeps a part of every parameter, gradient and optimizer state; a unit of the model is gathered just
before it computes (torch's `fully_shard`).

The user's own module is sharded in place: it is what `wrap` returns, or a view of it. What is added to torch: which
units (strategies/units.py); gradients of windows (`set_sync`, strategies/sharded.py); optimizers that were made before
serve the shards (strategies/rebinding.py); methods other than forward (strategies/ways.py); norms over all shards
(strategies/norms.py); and modules that were interrupted train on (strategies/fsdp_repair.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist import alone, reach, views
from nbdist.parallelism import ParallelismConfig
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.state import DistributedType, Process
from nbdist.strategies import (
    activation,
    alike,
    fsdp_repair,
    likeness,
    meta,
    norms,
    plans,
    policies,
    rebinding,
    sharded,
    units,
    ways,
)
from nbdist.strategies import tensor as tensor_parallel
from nbdist.strategies.base import Strategy, Through, as_it_is
from nbdist.strategies.watch import doubt


class FSDP(Strategy):
    """Parameters, gradients and optimizer state are spread over all ranks.

    Args:
        process: the facts about this process.
        plugin: how. Default: what its fields are by themselves.
        parallelism: over what. Default: over all ranks.
    """

    name: ClassVar[str] = "fsdp"
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    shares_gradients: ClassVar[bool] = True
    defers: ClassVar[bool] = True
    spreads: ClassVar[bool] = True
    over: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard")  # these dimensions of the mesh
    places: ClassVar[bool] = True  # unit by unit, so that the whole model is never on the device

    def __init__(
        self,
        process: Process,
        plugin: FullyShardedDataParallelPlugin | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(process)
        self._plugin = plugin or FullyShardedDataParallelPlugin()
        self.parallelism: ParallelismConfig = parallelism or self._sizes()
        self._shards: Any = None  # the part of the mesh that parameters are spread over
        self._layers: Any = None  # the one that layers are split over, None for none
        self._started = False

    def _sizes(self) -> ParallelismConfig:
        return ParallelismConfig().filled(self.process.world_size, "dp_shard")

    def setup(self) -> None:
        self._started = alone.start(self.process)  # one process that asked for it by name
        names = [name for name in self.over if name == "dp_shard" or self.parallelism.sizes[name] > 1]
        self.mesh = grid = self.parallelism.mesh(self.process, *names)
        sizes = self.parallelism.sizes
        if sizes["cp"] > 1:  # ranks that share sequences share the model and its gradients too
            shards = sizes["dp_shard"] * sizes["cp"]
            folded = dataclasses.replace(self.parallelism, dp_shard_size=shards, cp_size=1, cp_handler=None)
            grid = folded.mesh(self.process, *names)
        self._shards = grid[tuple(names)] if len(names) > 1 else grid[names[0]]
        self._layers = grid["tp"] if self.copies > 1 else None

    def teardown(self) -> None:
        if self._started and dist.is_initialized():
            dist.destroy_process_group()
            self._started = False

    @property
    def data_parallel_size(self) -> int:
        return self.parallelism.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.parallelism.data_parallel_rank(self.process.rank)

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.FSDP

    # ------------------------------------------------------------------ wrapping
    def wrap(self, model: nn.Module, through: Through = as_it_is) -> nn.Module:
        """The model, sharded in place, equal to rank 0's on all ranks.

        A model that is sharded already stays as it is: as the user has done it, or as it was when it was prepared
        before. What was put into it since stays whole, and its gradients are shared by `nbdist.loose`.

        Raises:
            DistributedOperationException: the ranks' models differ, see `nbdist.strategies.likeness`.
            ValueError: units that cannot be; DistributedDataParallel inside; a model that is sharded in another way.
        """
        inner = views.bare(getattr(model, "_orig_mod", model))  # torch.compile of a module calls that very module
        if any(isinstance(one, DistributedDataParallel) for one in inner.modules()):
            raise ValueError(
                f"{type(inner).__name__} has DistributedDataParallel in it, which keeps a whole model on each rank. "
                f"Prepare the module that is inside of it under {self.name!r}"
            )
        whole = not sharded.is_sharded(inner)
        known = sharded.record(inner)
        if not all(likeness.agree(inner, whole)) and whole:
            raise ValueError(f"{type(inner).__name__} is sharded on some ranks, and not on this one")
        if whole:
            self._shard(inner)
        elif known is None:
            self._keep(inner)
        elif known.mesh is not self._shards and known.mesh != self._shards:
            raise ValueError(
                f"{type(inner).__name__} is sharded over {known.mesh}, and here it would be over {self._shards}: make "
                "the model again, or prepare it with an Accelerator that has the same sizes"
            )
        ways.open_up(inner)
        fsdp_repair.be_ready()
        doubt()
        return through(model)

    def _shard(self, model: nn.Module) -> None:
        plugin = self._plugin
        chosen = units.choose(model, plugin)
        name, told = type(model).__name__, str(chosen)
        layers = self._layers
        plan = getattr(self.parallelism.tp_handler, "plan", None)
        if layers is not None:
            plans.read(model, plan, layers.size())  # before anything is changed
        before = rebinding.snapshot(model, self._shards.shape[-1])
        init = getattr(plugin, "param_init_fn", None)
        missing = meta.look(model, init, alike=layers is not None)
        had = {} if missing is None else {**before, **dict(model.named_buffers(remove_duplicate=False))}
        self._make_equal(model, missing or ())
        if layers is not None:
            tensor_parallel.apply(model, layers, plan)
            chosen = units.choose(model, plugin)  # among parameters as they are now
        if getattr(plugin, "activation_checkpointing", False):
            activation.apply(chosen.modules, bool(plugin.activation_checkpointing_offload))
        options: dict[str, Any] = {"mesh": self._shards}
        if chosen.ignored:
            options["ignored_params"] = chosen.ignored
        reshard = getattr(plugin, "reshard_after_forward", None)
        reshard = True if reshard is None else reshard
        with torch.no_grad():
            for one in model.parameters():
                if one not in chosen.ignored and not one.is_contiguous():
                    one.data = one.data.contiguous()  # torch shards no others
        for module in chosen.modules.values():
            fully_shard(module, reshard_after_forward=reshard, **options, **self._policies(module))
        for module in chosen.roots.values():
            if not isinstance(module, FSDPModule):
                # Needed again at once when backward begins, so torch keeps it unless it is told not to.
                after = None if reshard is True else reshard
                fully_shard(module, reshard_after_forward=after, **options, **self._policies(module, called=True))
        if missing is not None:
            meta.fill(model, missing, had, self._home, init)
            had.clear()
        for tensor in (*model.parameters(), *model.buffers()):  # what no unit has
            if tensor.device != self.process.device and not isinstance(tensor, DTensor) and not tensor.is_meta:
                tensor.data = tensor.data.to(self.process.device)
        self._prefetch([module for module in model.modules() if isinstance(module, FSDPModule)][1:])
        rebinding.replaced(model, before)
        self._keep(model, told, reshard is True)
        self.reason = f"{self.reason.partition('; units of ')[0]}; units of {name}: {told}"

    def _keep(self, model: nn.Module, chosen: str = "", stays: bool = False) -> None:
        """The model is sharded, by us or by the user."""
        known = sharded.keep(model, sharded.Sharded(model, self._shards, chosen))
        known.look_after(stays)
        for root in known.roots:
            fsdp_repair.after_forward(root)

    def _policies(self, module: nn.Module, called: bool = False) -> dict[str, Any]:
        return policies.policies(module, self._plugin, self.precision, self.process.device, called)

    @property
    def _home(self) -> torch.device:
        """Where shards are between the passes."""
        offloads = isinstance(getattr(self._plugin, "cpu_offload", None), CPUOffloadPolicy)
        return torch.device("cpu") if offloads else self.process.device

    def _prefetch(self, modules: list[Any]) -> None:
        if getattr(self._plugin, "forward_prefetch", None):
            for one, following in pairwise(modules):
                one.set_modules_to_forward_prefetch([following])

    def _make_equal(self, model: nn.Module, missing: Container[str]) -> None:
        """Rank 0's parameters and buffers on every rank, but for those that some rank does not have."""
        if self.process.world_size == 1:
            return
        device = self.process.device
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in missing:
                continue
            there = tensor.detach().to(device).contiguous()
            dist.broadcast(there, src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return views.bare(model)

    # ------------------------------------------------------------------ the gradient
    def backward(self, loss: torch.Tensor, seed: torch.Tensor, **options: Any) -> None:
        for known in sharded.records():
            if known.wanted is not known.applied:
                known.apply()
        try:
            super().backward(loss, seed, **options)
        except Exception:
            fsdp_repair.after_backward()
            raise
        if alike.doubtful:
            alike.look()

    def shares(self, loss: torch.Tensor) -> bool:
        held = [one for known in sharded.records() if known.wanted for one in known.holders()]
        return bool(held) and reach.reaches(loss, held)

    def set_sync(self, model: nn.Module, sync: bool) -> None:
        known = sharded.record(model)
        if known is not None:
            known.wanted = sync
            if known.applied is not sync:
                known.apply()

    def release(self, model: nn.Module) -> None:
        known = sharded.record(model)
        if known is not None:
            known.wanted = True  # applied when it matters: most often the window's next micro-batch takes it back

    def averaged(self) -> Iterator[torch.Tensor]:
        for known in sharded.records():
            yield from known.holders()

    def holders(self, model: nn.Module) -> Iterable[torch.Tensor]:
        known = sharded.record(model)
        own = list(model.parameters())
        if known is None:
            return own
        return {id(one): one for one in (*own, *known.holders())}.values()

    def drop(self, model: nn.Module) -> None:
        known = sharded.record(model)
        for unit in known.units if known is not None else ():
            sharded.drop(unit)

    def set_aside(self, model: nn.Module) -> Callable[[], None] | None:
        known = sharded.record(model)
        apart = known.apart() if known is not None else []
        if not apart:
            return None
        for of, name, _ in apart:
            setattr(of, name, None)

        def back() -> None:
            for of, name, held in apart:
                setattr(of, name, held)

        return back

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        norms.scale([norms.local(one) for one in norms.gradients_of(parameters)], factor)

    def clip(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0, **options: Any
    ) -> Any:
        return norms.clip(parameters, max_norm, norm_type, **options)

    def gradient_norm(self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
        return norms.joint(norms.gradients_of(parameters), norm_type)

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        rebinding.expect(optimizer)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        rebinding.rebind(optimizer)
        super().rebind(optimizer)

    def after_interrupt(self) -> None:
        fsdp_repair.repair_all()


class Hybrid(FSDP):
    """Shards inside of a group of ranks, the same in each group: parameters are gathered over a few ranks near each
    other, and only gradients cross between the groups.
    """

    name: ClassVar[str] = "hybrid"

    def _sizes(self) -> ParallelismConfig:
        return ParallelismConfig(dp_shard_size=1).filled(self.process.world_size, "dp_replicate")
