"""Whether a wrapped model may have been edited since its reducer was made: asked before each backward, so cheaply.

Freezing and thawing leave no trace but `requires_grad`, which is compared, about 50 ns a parameter. When something is
put into any module or given to a prepared optimizer, or anything is prepared, every wrapper is in doubt, and is looked
at whole once.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import torch

from nbdist.strategies.repair import wrappers

# A wrapper's `_nbdist_watch` is (its parameters, for each whether it is trained) as it was last looked at.
WATCH = "_nbdist_watch"
trained = attrgetter("requires_grad")
_DOUBT: tuple[Any, ...] = ((), None)
edits = [0]  # how often anything may have been edited


def watch(wrapped: torch.nn.Module) -> None:
    """It was looked at now."""
    parameters = list(wrapped.parameters())
    vars(wrapped)[WATCH] = (parameters, [*map(trained, parameters)])


def doubt(*_: Any) -> None:
    """Any model may have been edited: look at all of them before their next backward."""
    edits[0] += 1
    for wrapped in wrappers():
        vars(wrapped)[WATCH] = _DOUBT


@functools.cache
def be_told() -> None:
    """From now on torch tells what is put into any module. (Of what is taken out it does not; that DDP notices.)"""
    for name in ("register_module_module_registration_hook", "register_module_parameter_registration_hook"):
        register = getattr(torch.nn.modules.module, name, None)
        if register is not None:
            register(doubt)
