"""Tensor parallel: the layers of a model are split over ranks that compute each sample together (torch's
`parallelize_module`).

`apply` splits a model in place; the strategy "tp" is that alone, over all ranks, and "fsdp" and "hybrid" call it for
the ranks beside each other before they shard what each of them has. What is added to torch: plans by name, looked
through first (strategies/plans.py); weights that are tied or frozen stay so; dropout draws alike on all ranks of a
group; and a layer that was left out of the plan, and whose gradient would differ from rank to rank, is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from nbdist import alone, views
from nbdist.parallelism import ParallelismConfig
from nbdist.state import DistributedType, Process, interrupt_hooks
from nbdist.strategies import alike, likeness, norms, plans, rebinding
from nbdist.strategies.base import Strategy, Through, as_it_is
from nbdist.strategies.watch import doubt

# The models that were split, by the mesh that they are split over.
_split: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()


def apply(model: nn.Module, mesh: DeviceMesh, plan: Any = None) -> bool:
    """Split a model's layers over the ranks of a mesh with one dimension, in place. Nothing is sent: its parameters
    must be equal on all of these ranks.

    Args:
        model: the user's own. One that is split over this mesh already stays as it is.
        mesh: that of the tensor parallel group.
        plan: see `plans.read`. Default: the one that the model brings.

    Returns:
        Whether anything was done: parameters were replaced then (`nbdist.strategies.rebinding`).

    Raises:
        ValueError: it cannot be split so, see `plans.read`; or it is spread over other ranks already. Nothing was
            changed then.
    """
    known = _split.get(model)
    if known is not None and known == mesh:
        return False
    spread = [name for name, one in model.named_parameters() if isinstance(one, DTensor)]
    if spread:
        over = known if known is not None else "other ranks"
        raise ValueError(
            f"{spread[0]} of {type(model).__name__} is spread over {over} already: make the model again, and prepare "
            "that; or prepare it with the same sizes"
        )
    styles = plans.read(model, plan, mesh.size())
    tied = list(plans.ties(model))
    trained = {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for first, *others in tied:
        for other in others:
            owner, _, own = other.rpartition(".")
            model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
    for name, one in model.named_parameters(remove_duplicate=False):
        one.requires_grad_(trained[name])
    _split[model] = mesh
    alike.draw(model, mesh)
    alike.doubt(model, mesh)
    return True


class TensorParallel(Strategy):
    """Each layer is split over all ranks, which compute every sample together.

    Args:
        process: the facts about this process.
        plugin: no effect.
        parallelism: a ParallelismConfig, whose `tp_handler` may have the plan. Default: over all ranks, with the plan
            that the model brings.
    """

    name: ClassVar[str] = "tp"
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    spreads: ClassVar[bool] = True

    def __init__(self, process: Process, plugin: Any = None, parallelism: Any = None) -> None:
        super().__init__(process)
        self.parallelism = (parallelism or ParallelismConfig()).filled(process.world_size, "tp")
        self._started = False
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._on_interrupt = self.after_interrupt  # kept alive: the hooks are held weakly
        interrupt_hooks.add(self._on_interrupt)

    def setup(self) -> None:
        self._started = alone.start(self.process)
        self.mesh = self.parallelism.mesh(self.process, "tp")

    def teardown(self) -> None:
        if self._started and dist.is_initialized():
            dist.destroy_process_group()
            self._started = False

    @property
    def distributed_type(self) -> DistributedType:
        return self.process.distributed_type

    def wrap(self, model: nn.Module, through: Through = as_it_is) -> nn.Module:
        """The model, split in place, equal to rank 0's on all ranks.

        Raises:
            ValueError: it cannot be split, see `apply`. DistributedOperationException: the ranks' models differ.
        """
        inner = views.bare(getattr(model, "_orig_mod", model))
        mesh = self.mesh
        assert mesh is not None
        if not any(isinstance(one, DTensor) for one in inner.parameters()):
            likeness.agree(inner, False)
            plans.read(inner, self._plan(), mesh.size())  # before anything is sent
            alike.make(inner)
        before = rebinding.snapshot(inner, mesh.size())
        if apply(inner, mesh["tp"], self._plan()):
            rebinding.replaced(inner, before)
            for one in inner.parameters():
                if isinstance(one, DTensor) and one.requires_grad:
                    one.register_hook(_Placed(one.placements))
        self._models.add(inner)
        doubt()
        return through(inner)

    def _plan(self) -> Any:
        return getattr(self.parallelism.tp_handler, "plan", None)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return views.bare(model)

    def backward(self, loss: torch.Tensor, seed: torch.Tensor, **options: Any) -> None:
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        super().backward(loss, seed, **options)
        if alike.doubtful:
            alike.look()

    def averaged(self) -> Iterator[torch.Tensor]:
        for model in list(self._models):
            yield from model.parameters()

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        norms.scale([norms.local(one) for one in norms.gradients_of(parameters)], factor)

    def clip(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0, **options: Any
    ) -> Any:
        return norms.clip(parameters, max_norm, norm_type, **options)

    def gradient_norm(self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
        return norms.joint(norms.gradients_of(parameters), norm_type)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        rebinding.rebind(optimizer)
        super().rebind(optimizer)

    def after_interrupt(self) -> None:
        """Nothing of a model is left open but its gradients, of which a rank may have some and others none."""
        for model in list(self._models):
            for one in model.parameters():
                one.grad = None


class _Placed:
    """Gradients as their parameter is spread. Behind a layer that computes on a part of a sequence they are each rank's
    summand, and behind an embedding whole.
    """

    def __init__(self, placements: Any) -> None:
        self._placements = placements

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(gradient, DTensor) or gradient.placements == self._placements:
            return None
        return gradient.redistribute(placements=self._placements)
