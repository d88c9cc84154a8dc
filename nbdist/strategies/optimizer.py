"""A prepared optimizer: the user's own, with the step boundary behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbdist.state import step_boundary


class PreparedOptimizer(torch.optim.Optimizer):
    """Steps the user's optimizer, then passes the step boundary, where ranks can agree to stop.

    Groups, state, defaults, hooks and everything else are the inner optimizer's own; `optimizer` is that very object.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # torch's own __init__ is left out: it would build groups and state of its own beside the inner optimizer's.
        self.optimizer = optimizer
        self._passed = step_boundary.passed

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer. Returns what it returns."""
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._passed()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: without this, looking for it would never end
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared {self.optimizer!r}"

    def __reduce__(self) -> Any:
        raise TypeError("a prepared optimizer belongs to its rank; pickle its .optimizer, or its state_dict()")


def _hooks_go_inside() -> None:
    """Hooks registered on the prepared optimizer are the inner one's."""

    def forward(name: str) -> Any:
        def register(self: PreparedOptimizer, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.optimizer, name)(*args, **kwargs)

        register.__name__ = name
        return register

    for name in dir(torch.optim.Optimizer):
        if name.startswith("register_"):
            setattr(PreparedOptimizer, name, forward(name))


_hooks_go_inside()
