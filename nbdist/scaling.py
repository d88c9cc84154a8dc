"""The loss scaler of fp16: losses are multiplied before backward, gradients divided after it, and a step whose
gradients have overflowed is left out. torch.amp.GradScaler does it; this says when.

Its factor goes into backward's seed, so that no loss is changed. Its `update` waits for the next backward: all
optimizers that step on one backward have one scale. An accumulation window has one scale too, and so has a window that
is open beside another (a GAN's): while one holds gradients the scale stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbdist import messages
from nbdist.kwargs import GradScalerKwargs


class Scaler:
    """What the Accelerator's step asks, see `nbdist.step` and `nbdist.strategies.optimizer`.

    Args:
        device: where the losses are.
        options: those of GradScaler.
        holding: tells whether an unfinished window holds scaled gradients. Default: none ever does.

    Attributes:
        torch: the GradScaler. Its scale changes at the backward after a step.
    """

    def __init__(
        self,
        device: torch.device,
        options: GradScalerKwargs | None = None,
        holding: Callable[[], bool] = lambda: False,
    ) -> None:
        given = options or GradScalerKwargs()
        self.torch = torch.amp.GradScaler(
            device.type,
            init_scale=given.init_scale,
            growth_factor=given.growth_factor,
            backoff_factor=given.backoff_factor,
            growth_interval=given.growth_interval,
            enabled=given.enabled,
        )
        self._device, self._holding = device, holding
        self._used = False  # has any loss been scaled?
        # What was done since the last update, by optimizer: whether its gradients are bad (a tensor), and whether it
        # has stepped.
        self._bad: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self._stepped: dict[torch.optim.Optimizer, bool] = {}
        self._here: dict[torch.optim.Optimizer, Any] = {}  # of those whose parameters are spread, this rank's part

    def seed(self, factor: float | torch.Tensor) -> torch.Tensor:
        """A backward begins: the factor for its seed, scaled; of float32, which half-precision losses must become too.

        The scale is what it is on the device; nothing waits for it, but where a window beside holds its gradients.
        """
        if self._bad:
            if self._holding():
                self.torch.update(self.torch.get_scale())  # forgets who has stepped, and leaves the scale
            else:
                self.torch.update()
            self._forget()
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, device=self._device)
        self._used = True
        return self.torch.scale(factor.float())

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients, once for each of its steps. Does nothing where there are none.

        Raises:
            ValueError: parameters in half precision, whose gradients cannot be divided without loss.
        """
        if not self._used or not self.torch.is_enabled() or optimizer in self._bad or not _has_gradients(optimizer):
            return
        here: Any = optimizer
        if _is_spread(optimizer):
            here = self._here[optimizer] = _Here(optimizer)
        try:
            self.torch.unscale_(here)
        except ValueError as error:
            raise ValueError(
                f"{error} Mixed precision needs parameters in float32, and computes in float16 where that is right: "
                "load the model in float32, or train it without mixed precision"
            ) from None
        self._bad[optimizer] = self._overflowed(here)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> tuple[Any, bool]:
        """One step, unless the gradients have overflowed.

        Returns:
            What the optimizer returned, and whether the step was left out.

        Raises:
            RuntimeError: a closure: what it computes could overflow at each call.
        """
        if closure is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) cannot go with mixed_precision='fp16': whether gradients "
                "have overflowed is known before a step, and a closure makes new ones inside. Use 'bf16'"
            )
        self.unscale(optimizer)
        if optimizer not in self._bad:
            return optimizer.step(), False  # nothing was scaled
        if optimizer in self._stepped:  # once more, on the same gradients, which are what they are by now
            skipped = self._stepped[optimizer]
            return (None if skipped else optimizer.step()), skipped
        if optimizer in self._here:
            skipped = self._stepped[optimizer] = bool(self._bad[optimizer].item())
            return (None if skipped else optimizer.step()), skipped
        result = self.torch.step(optimizer)
        skipped = self._stepped[optimizer] = bool(self._bad[optimizer].item())
        return result, skipped

    def _forget(self) -> None:
        self._bad.clear()
        self._stepped.clear()
        self._here.clear()

    def state_dict(self) -> dict[str, Any]:
        """Its state, as if the update that waits for the next backward were done."""
        if not self._bad or self._holding():
            return self.torch.state_dict()
        again = copy.copy(self.torch)  # what update changes is given anew or cloned, so this one stays as it is
        for name, value in vars(again).items():
            if isinstance(value, torch.Tensor):
                setattr(again, name, value.clone())
        again.update()
        return again.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Scale as the scaler of this state; what waits for the next backward is forgotten."""
        if self._bad:
            self.torch.update(self.torch.get_scale())
            self._forget()
        self.torch.load_state_dict(state_dict)

    def _overflowed(self, optimizer: Any) -> torch.Tensor:
        """Whether gradients of this optimizer are infinite or no number, as GradScaler has found; of one whose
        parameters are spread, on any rank.
        """
        spread = type(optimizer) is _Here
        found = getattr(self.torch, "_found_inf_per_device", None)
        if found is not None:
            tensors = list(found(optimizer).values())
            if tensors:
                if spread:
                    for one in tensors:  # they are the scaler's own: its update sees what all have found
                        _on_any_rank(one)
                return torch.stack([one.to(tensors[0].device) for one in tensors]).sum()
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        bad = torch.stack([~torch.isfinite(one).all().to(self._device) for one in gradients]).any()
        return _on_any_rank(bad.float()) if spread else bad


class _Here:
    """Stands for an optimizer whose parameters are spread over the ranks: this rank's part of their gradients, which
    torch can look at in one list, however each is spread.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        self.param_groups = [{"params": [_holder(one) for one in gradients]}]


def _holder(gradient: Any) -> torch.Tensor:
    here: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    holder = here.detach()
    holder.grad = here
    return holder


def _is_spread(optimizer: torch.optim.Optimizer) -> bool:
    return any(hasattr(one, "to_local") for group in optimizer.param_groups for one in group["params"])


def _on_any_rank(found: torch.Tensor) -> torch.Tensor:
    if messages.ranks() > 1:
        with messages.waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(one.grad is not None for group in optimizer.param_groups for one in group["params"])
