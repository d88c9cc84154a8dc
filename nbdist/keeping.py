"""What a backward has to leave alone: the gradients that open windows of other models have gathered.

The loss of a GAN's generator goes through the discriminator, whose own window may be open then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from nbdist.held import around, parameters_of
from nbdist.loose import trained_by

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation
    from nbdist.window import Window


def guard(windows: Accumulation, window: Window | None) -> AbstractContextManager[None] | None:
    """What a backward in this window, or outside of all, has to run in; None when no other one holds gradients."""
    own = around(window)
    open_ones = [one for one in list(windows.made.values()) if one.holds and one not in own and not one.is_over()]
    if not open_ones:
        return None
    return left_alone(windows, open_ones, own)


@contextmanager
def left_alone(windows: Accumulation, open_ones: Sequence[Window], own: set[Window]) -> Iterator[None]:
    """A backward in this block leaves the gradients of these windows as they were.

    Args:
        open_ones: those that have gathered some.
        own: those that the backward is in; what they share with the open ones is not left alone. None at all: it is not
            known what it trains. Should it give a gradient to nothing but what is held, it is meant for that, and is
            added.
    """
    trained = {id(one) for one in parameters_of(windows, own)} if own else set()
    # DDP may write the gradients of this backward to the very memory that those before it lie in.
    copied = {
        id(one)
        for window in open_ones
        for model in window.alive()
        if getattr(getattr(model, "_orig_mod", model), "gradient_as_bucket_view", False)
        for one in model.parameters()
    }
    kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for parameter in [one for window in open_ones for one in parameters_of(windows, [window])]:
        if id(parameter) not in trained and id(parameter) not in kept:
            gradient = parameter.grad
            copies = gradient is not None and id(parameter) in copied
            kept[id(parameter)] = parameter, gradient.clone() if copies and gradient is not None else gradient
    back = [windows.strategy.set_aside(model) for window in open_ones for model in window.alive()]
    free = []
    if not own:
        free = [one for model in list(windows.models.values()) for one in windows.strategy.holders(model)]
        free += [one for optimizer in list(windows.optimizers.values()) for one in trained_by(optimizer)]
        free = [one for one in free if id(one) not in kept]
    marks = [_mark(parameter) for parameter in free]
    try:
        for parameter, _ in kept.values():
            parameter.grad = None
        yield
    finally:
        adds = not own and marks == [_mark(parameter) for parameter in free]
        for parameter, gradient in kept.values():
            if adds and gradient is not None and parameter.grad is not None:
                gradient = gradient + parameter.grad
            if gradient is not None or not adds:
                parameter.grad = gradient
        for put_back in back:
            if put_back is not None:
                put_back()
        for window in open_ones:
            window.note()


def _mark(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Another one after a gradient was added."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
