"""What an accumulation window has gathered: whose gradients those are, and that they stay.

The user names the models that he trains. His optimizers train more: the temperature of a loss, a criterion. A window
has all of that, but for what is another window's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch

from nbdist import messages
from nbdist.loose import trained_by
from nbdist.strategies.watch import edits

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation
    from nbdist.window import Window


def around(window: Window | None) -> set[Window]:
    """The window and those whose with-blocks are around its own: they are for one loss."""
    found = set()
    while window is not None:
        found.add(window)
        window = window.outer
    return found


def parameters_of(windows: Accumulation, own: Iterable[Window], unclaimed: bool = False) -> list[torch.Tensor]:
    """What these windows gather the gradients of: all of their models, and what else the prepared optimizers of those
    train, but for other windows' models. (A window whose loop is over has nothing.)

    Args:
        windows: all there are.
        own: the ones that are asked about.
        unclaimed: also what belongs to no prepared model, and whose optimizer trains no window's model.
    """
    own = set(own)
    holders = windows.strategy.holders
    found = {id(one): one for window in own for model in window.alive() for one in holders(model)}
    named = set(found)
    taken: set[int] | None = None
    prepared: set[int] = set()
    for optimizer in list(windows.optimizers.values()):
        trained = {id(one): one for one in trained_by(optimizer)}
        if trained.keys() <= found.keys():
            continue
        if taken is None:
            others = [one for one in list(windows.made.values()) if one not in own and not one.is_over()]
            taken = {id(one) for window in others for model in window.alive() for one in holders(model)}
            prepared = {id(one) for model in list(windows.models.values()) for one in holders(model)}
        if trained.keys() & named:
            found.update((key, one) for key, one in trained.items() if key not in taken)
        elif unclaimed and not trained.keys() & taken:
            found.update((key, one) for key, one in trained.items() if key not in prepared)
    return list(found.values())


class Noted:
    """The gradients of an open window after its last backward. A `zero_grad` of a module asks nobody; what it has taken
    away is put back when the window goes on.
    """

    __slots__ = ("_at", "_gradients", "_parameters", "_told", "_version")

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._at = -1, True  # what had been edited when the parameters were looked for, and if no window was around it
        self._version = 0
        self._told = False

    def note(self, window: Window, windows: Accumulation) -> None:
        """They are what they are now."""
        at = edits[0], window.outer is None
        if self._at != at:
            self._parameters, self._at = parameters_of(windows, around(window)), at
        self._gradients = [*map(_gradient, self._parameters)]
        first = self._gradients[0] if self._gradients else None
        self._version = 0 if first is None else first._version

    def clear(self) -> None:
        self._gradients = []

    def put_back(self) -> None:
        """The window goes on."""
        gradients = self._gradients
        if not gradients:
            return
        first = gradients[0]
        if not all(map(is_, map(_gradient, self._parameters), gradients)):
            for one, gradient in zip(self._parameters, gradients, strict=True):
                if one.grad is None:
                    one.grad = gradient
        elif first is not None and first._version != self._version and not self._told:
            self._look()

    def _look(self) -> None:
        """Somebody has written into them: zeros cannot be undone."""
        if not any(bool(one.any()) for one in self._gradients if one is not None):
            self._told = True
            warnings.warn(
                "zero_grad(set_to_none=False) of a model has wiped the gradients of an unfinished accumulation window: "
                "call zero_grad of the prepared optimizer, which waits for the window's end. (Said once.)",
                stacklevel=messages.depth(),
            )


_gradient = attrgetter("grad")
