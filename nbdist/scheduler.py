"""A prepared learning rate scheduler: the user's own, one step of it for each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbdist.strategies.optimizer import Gate, PreparedOptimizer

_OWN = frozenset({"scheduler", "_gate", "_always", "_prepared"})


def is_scheduler(value: Any) -> bool:
    """Whether it is a scheduler: one of torch's, or what looks like one and drives a torch optimizer."""
    if isinstance(value, PreparedScheduler | torch.optim.lr_scheduler.LRScheduler):
        return True
    if isinstance(value, type | torch.nn.Module | torch.optim.Optimizer) or hasattr(value, "zero_grad"):
        return False
    known = all(callable(getattr(value, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return known and isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer)


class PreparedScheduler:
    """Steps the user's scheduler where its optimizer steps: not inside of an accumulation window, and not when the step
    was skipped (fp16). Everything else, `isinstance` too, is the inner scheduler's own; `scheduler` is that very
    object.

    Args:
        scheduler: the user's, bound to an optimizer or to what it was prepared to.
    """

    __slots__ = ("__weakref__", "_always", "_gate", "_prepared", "scheduler")

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.attend(Gate(), {}, False)

    def attend(self, gate: Any, prepared: Mapping[int, Any], always: bool) -> None:
        """Whose steps count from now on.

        Args:
            gate: an Accelerator's windows.
            prepared: what optimizers were prepared to, by their identity.
            always: step at each call, whatever the optimizer does.
        """
        self._gate, self._prepared, self._always = gate, prepared, always

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of the inner scheduler, or nothing where the optimizer has not stepped."""
        if not self._always:
            if not self._gate.complete():
                return None
            optimizer = getattr(self.scheduler, "optimizer", None)
            if not isinstance(optimizer, PreparedOptimizer):
                optimizer = self._prepared.get(id(optimizer))
            if optimizer is not None and optimizer.step_was_skipped:
                return None
        return self.scheduler.step(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.scheduler)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet: without this, looking for it would never end
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.scheduler, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.scheduler), "scheduler"})

    def __repr__(self) -> str:
        return f"Prepared {self.scheduler!r}"

    def __reduce__(self) -> Any:
        raise TypeError("a prepared scheduler belongs to its rank; pickle its .scheduler, or its state_dict()")
