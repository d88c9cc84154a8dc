"""Local SGD: each rank steps by itself, and every few steps the parameters are averaged instead of the gradients.

The method: Stich, "Local SGD Converges Fast and Communicates Little", https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbdist import checks, collectives

if TYPE_CHECKING:
    from nbdist.accelerator import Accelerator


class LocalSGD:
    """A context in which a prepared model's gradients stay each rank's own.

    ::

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()

    Args:
        accelerator: the one that prepared the model.
        model: what `prepare` returned.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False leaves everything as it is without this context. In one process it always is.

    Raises:
        ValueError: less than one step. NotImplementedError: the accelerator's strategy spreads a model over the ranks,
            which then have no parameters of their own to average; on entering.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if not hasattr(type(accelerator), "prepare"):
            raise checks.wrong("LocalSGD: accelerator", accelerator, "the Accelerator that prepared the model")
        checks.kind(model, torch.nn.Module, "LocalSGD: model", "the model that prepare returned")
        wants = "the steps between two averages, at least 1"
        local_sgd_steps = checks.whole(local_sgd_steps, "LocalSGD: local_sgd_steps", wants, 1)
        enabled = checks.flag(enabled, "LocalSGD: enabled", True)
        self.accelerator, self.local_sgd_steps = accelerator, local_sgd_steps
        self.model = accelerator._windows.models.get(id(model), model)  # the user may name what was prepared
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.accelerator._strategy.keep_local(self.model, True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self.enabled:
            return
        self.accelerator._strategy.keep_local(self.model, False)
        if kind is None:  # after an error the other ranks may be anywhere
            self._average()

    def step(self) -> None:
        """After each optimizer step: every `local_sgd_steps`-th averages the parameters. All ranks call it."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """Parameters and floating buffers become the mean over the ranks, other buffers rank 0's."""
        model = self.accelerator.unwrap_model(self.model)
        buffers = list(model.buffers())
        averaged = [one for one in (*model.parameters(), *buffers) if one.is_floating_point() or one.is_complex()]
        for tensor, mean in zip(averaged, collectives.reduce([one.data for one in averaged], "mean"), strict=True):
            tensor.copy_(mean)
        counters = [one for one in buffers if not (one.is_floating_point() or one.is_complex())]
        if counters:
            collectives.broadcast(counters)
