"""A prepared optimizer: the user's own, which acts on whole accumulation windows, with the step boundary behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from nbdist.state import step_boundary
from nbdist.strategies.watch import doubt


class Window(Protocol):
    """An accumulation window as an optimizer sees it: see `nbdist.window.Window`."""

    boundary: bool
    count: int
    holds: bool

    def settle(self) -> None: ...


class Gate:
    """What an optimizer asks before it acts; `nbdist.accumulation.Accumulation` in an Accelerator, this one elsewhere:
    always open.
    """

    newest: Window | None = None
    scaler: Any = None
    began = False
    loose: Any = None
    models: Mapping[int, torch.nn.Module] = MappingProxyType({})

    def complete(self) -> bool:
        return True

    def doubt(self) -> None:
        pass


class PreparedOptimizer(torch.optim.Optimizer):
    """Steps the user's optimizer at the boundary of an accumulation window, then tells the step boundary, where ranks
    can agree to stop. Inside of a window `step` and `zero_grad` do nothing.

    Groups, state, defaults, hooks and everything else are the inner optimizer's own; `optimizer` is that very object.

    Attributes:
        step_was_skipped: the last step was left out, because gradients had overflowed (fp16).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gate: Any = None) -> None:
        # torch's own __init__ is left out: it would build groups and state of its own beside the inner optimizer's.
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._gate = Gate() if gate is None else gate
        self._trains = False  # looked at, and made for parameters that are trained and that a wrapper averages
        self._wiped = 0  # how many backward calls there had been when its gradients were last wiped
        doubt()

    def attend(self, gate: Any) -> None:
        """Another Accelerator prepares it: from now on that one's windows count."""
        self._gate, self._trains, self._wiped = gate, False, 0
        doubt()

    def look_again(self, backwards: int) -> None:
        """What it trains, or who averages that, may have changed; there have been so many backward calls."""
        self._trains, self._wiped = False, backwards

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer; nothing inside of an accumulation window. Returns what the inner step does.

        Raises:
            RuntimeError: none of its parameters has a gradient or belongs to a prepared model, though there are some;
                or the last micro-batch of the window has called no backward; or gradients that the Accelerator's
                backward has to share come from another one.
        """
        gate = self._gate
        window = gate.newest
        if window is not None:
            if not (window.boundary or gate.complete()):
                window.holds = True
                return None
            if window.holds:
                window.settle()
        if not self._trains and closure is None:
            self._look()
        try:
            if gate.scaler is None:
                result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            else:
                result, self.step_was_skipped = gate.scaler.step(self.optimizer, closure)
        except BaseException:
            step_boundary.stepping = True
            raise
        if window is not None:
            window.count = 0  # nothing is left that could be dropped
        if not self.step_was_skipped:
            step_boundary.made += 1
        return result

    def _look(self) -> None:
        """Once: an optimizer over parameters that nobody trains would go unnoticed. With loose ones: at each step."""
        loose = self._gate.loose
        if loose is not None:
            loose.check(self, self._wiped)
        if not self._gate.began:
            return
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        trained = {id(parameter) for model in list(self._gate.models.values()) for parameter in model.parameters()}
        if trained and parameters and not any(one.grad is not None or id(one) in trained for one in parameters):
            raise RuntimeError(
                f"this {type(self.optimizer).__name__} would train nothing: none of its {len(parameters)} parameters "
                "has a gradient, and none belongs to a prepared model. Make it from the parameters of the model that "
                "is trained"
            )
        self._trains = loose is None or not loose.trains(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; but the gradients of an unfinished accumulation window stay."""
        gate = self._gate
        window = gate.newest
        if window is None or not window.holds or (not window.boundary and gate.complete()):
            self.optimizer.zero_grad(set_to_none=set_to_none)
            if not self._trains and set_to_none and gate.loose is not None:
                self._wiped = gate.loose.backwards

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
        self._trains = False
        self._gate.doubt()
        doubt()

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
