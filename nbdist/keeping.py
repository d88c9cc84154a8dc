"""What a backward has to leave alone: the gradients that open windows of other models have gathered.

The loss of a GAN's generator goes through the discriminator, whose own window may be open then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation
    from nbdist.window import Window


def guard(windows: Accumulation, window: Window | None) -> AbstractContextManager[None] | None:
    """What a backward in this window, or outside of all, has to run in; None when no other one holds gradients."""
    own = set()
    around = window
    while around is not None:  # with-blocks around each other are for one loss
        own.add(around)
        around = around.outer
    open_ones = [one for one in list(windows.made.values()) if one.holds and one not in own and not one.is_over()]
    if not open_ones:
        return None
    held = [model for one in open_ones for model in one.alive()]
    mine = [model for one in own for model in one.alive()]
    return left_alone(held, mine, None if own else list(windows.models.values()))


@contextmanager
def left_alone(
    held: Sequence[torch.nn.Module], mine: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module] | None = None
) -> Iterator[None]:
    """A backward in this block leaves the gradients of these models as they were.

    Args:
        held: those whose gradients an open window has gathered.
        mine: those that the backward trains; what they share with the ones held is not left alone.
        others: all prepared models, when it is not known which ones it trains. Should it give a gradient to none but
            the ones held, it is meant for them, and is added.
    """
    trained = {id(parameter) for model in mine for parameter in model.parameters()}
    kept: dict[int, tuple[torch.nn.Parameter, torch.Tensor | None]] = {}
    for model in held:
        # DDP may write the gradients of this backward to the very memory that those before it lie in.
        copies = getattr(getattr(model, "_orig_mod", model), "gradient_as_bucket_view", False)
        for parameter in model.parameters():
            if id(parameter) not in trained and id(parameter) not in kept:
                gradient = parameter.grad
                kept[id(parameter)] = parameter, gradient.clone() if copies and gradient is not None else gradient
    free = [one for model in others or () for one in model.parameters() if id(one) not in kept]
    marks = [_mark(parameter) for parameter in free]
    try:
        for parameter, _ in kept.values():
            parameter.grad = None
        yield
    finally:
        adds = others is not None and marks == [_mark(parameter) for parameter in free]
        for parameter, gradient in kept.values():
            if adds and gradient is not None and parameter.grad is not None:
                gradient = gradient + parameter.grad
            if gradient is not None or not adds:
                parameter.grad = gradient


def _mark(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Another one after a gradient was added."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
