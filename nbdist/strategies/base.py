"""What a strategy is: the few things that depend on how a model is spread over the ranks.

The gradient rule every strategy keeps: the loss of each rank enters with the factor that the Accelerator gives as
`seed`, and after `backward` each gradient is the *mean over the data-parallel ranks* of those contributions, equal
wherever it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist import engine
from nbdist.precision import Precision
from nbdist.state import DistributedType, Process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Through = Callable[[torch.nn.Module], torch.nn.Module]


def as_it_is(model: torch.nn.Module) -> torch.nn.Module:
    return model


class Strategy:
    """A model that is whole in one process; the base of the others.

    Args:
        process: the facts about this process.

    Class data: `name` as users write it; `needs`, modules that must be importable; `supports`, the device types it
        runs on; `shares_gradients`, whether `set_sync` has an effect; `defers`, whether `release` has not that of
        `set_sync`; `spreads`, whether it is made with `plugin` and `parallelism`, its options of sharding and its
        sizes; `places`, whether `wrap` brings a model to the device.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("torch",)
    supports: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda", "mps"})
    shares_gradients: ClassVar[bool] = False
    defers: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    places: ClassVar[bool] = False
    mesh: DeviceMesh | None = None  # the ranks' grid, where it has one
    reason = ""  # why this strategy was chosen
    precision: Precision | None = None  # in what an Accelerator's models compute
    parallelism: Any = None  # the ParallelismConfig, of a strategy that takes one

    def __init__(self, process: Process) -> None:
        self.process = process

    def obstacle(self) -> str | None:
        """Why this strategy cannot run in this process; None when it can."""
        if self.process.device.type not in self.supports:
            return f"it runs on {', '.join(sorted(self.supports))}, and the device is {self.process.device.type}"
        return None

    def setup(self) -> None:
        """Before anything is prepared: start what the strategy needs."""

    def teardown(self) -> None:
        """Undo what `setup` started."""

    @property
    def data_parallel_size(self) -> int:
        """How many ways a batch is split."""
        return 1

    @property
    def data_parallel_rank(self) -> int:
        """Which part of a split batch is this rank's."""
        return 0

    @property
    def together(self) -> int:
        """How many ranks in a row take the same part of a batch: those of a tensor parallel and of a context parallel
        group.
        """
        sizes = self.parallelism
        return 1 if sizes is None else sizes.tp_size * sizes.cp_size

    @property
    def copies(self) -> int:
        """How many of those compute the very same, each with a part of the weights: a tensor parallel group. What they
        have counts once.
        """
        return 1 if self.parallelism is None else self.parallelism.tp_size

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    def wrap(self, model: torch.nn.Module, through: Through = as_it_is) -> torch.nn.Module:
        """What the user calls instead of `model`, whose own object stays inside.

        Args:
            model: the user's, or what was wrapped before, also by the user.
            through: gives for the user's module the one that is to be called in its place: the same, or a view of it.
        """
        return through(model)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own object back, from what `wrap` returned."""
        return model

    def look_again(self) -> None:
        """Before the first backward of a cell: the user may have edited wrapped models since the last one."""

    def backward(self, loss: torch.Tensor, seed: torch.Tensor, **options: Any) -> None:
        """Run backward from `loss` with `seed` as its gradient; `options` are those of torch.autograd.backward."""
        if options:
            torch.autograd.backward(loss, seed, **options)
        else:
            engine.backward(loss, seed)

    def shares(self, loss: torch.Tensor) -> bool:
        """Whether backward from this loss exchanges gradients with the other ranks."""
        return False

    def set_sync(self, model: torch.nn.Module, sync: bool) -> None:
        """Whether the next forward and backward of this wrapped model share gradients with the other ranks."""

    def release(self, model: torch.nn.Module) -> None:
        """A micro-batch in the middle of a window is over: what this wrapped model does next shares gradients, unless
        `set_sync` says otherwise before.
        """
        self.set_sync(model, True)

    def holders(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The tensors whose `.grad` a backward of this wrapped model may write to."""
        return model.parameters()

    def drop(self, model: torch.nn.Module) -> None:
        """Forget what an unfinished window of this wrapped model has gathered beside its `holders`."""

    def set_aside(self, model: torch.nn.Module) -> Callable[[], None] | None:
        """The same, to be put back by what is returned; None: there is nothing."""
        return None

    def keep_local(self, model: torch.nn.Module, local: bool) -> None:
        """From now on no step of this wrapped model shares gradients, whatever `set_sync` says; or again as before.

        Raises:
            NotImplementedError: the ranks have no whole model each.
        """
        raise NotImplementedError(
            f"LocalSGD averages whole replicas, and under the strategy {self.name!r} a rank has none. "
            "It works with 'ddp' and 'single'"
        )

    def averaged(self) -> Iterable[torch.Tensor]:
        """The parameters of living models whose gradients `backward` shares; those of the optimizers that are not
        among them are shared by `nbdist.loose`.
        """
        return ()

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply these parameters' gradients, in place, by a factor that is the same on all ranks."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            multiply = getattr(torch, "_foreach_mul_", None)  # one launch for all of them
            if multiply is not None:
                multiply(gradients, factor)
            else:
                for gradient in gradients:
                    gradient.mul_(factor)

    def clip(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0, **options: Any
    ) -> Any:
        """Clip gradients in place by their joint norm over all ranks; returns the norm before, a 0-dim tensor."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type, **options)

    def gradient_norm(self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
        """The joint norm of gradients over all ranks, a 0-dim tensor; nothing is changed."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer that was built for the user's parameters serve the wrapped ones, in place.

        Here the parameters stay the same objects, so only state that is on another device moves with them.
        """
        devices = {parameter: parameter.device for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, kept in optimizer.state.items():
            device = devices.get(parameter)
            if device is not None and any(_is_elsewhere(item, device) for item in kept.values()):
                optimizer.load_state_dict(optimizer.state_dict())  # torch's own rule for what moves and what stays
                return

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Before models are wrapped: this one will be prepared with them. One that cannot be rebound is refused then,
        while nothing is changed yet.
        """

    def after_interrupt(self) -> None:
        """A cell was interrupted at any moment: make wrapped models train on rightly. Called on all ranks."""


def _is_elsewhere(item: Any, device: torch.device) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() > 0 and item.device != device
