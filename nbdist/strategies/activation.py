"""Activation checkpointing: what a block computes inside is not kept for backward, but computed again there.

A block becomes an instance of a subclass of its own class, whose `forward` goes through torch's checkpoint: so names,
keys, hooks and isinstance stay, nothing is written into the module or the user's class, and what hooks do to inputs
(fully_shard's cast) is done once. Random numbers and autocast are in backward what they were in forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from nbdist import state

_OF = "_nbdist_checkpointed"  # on such a class: (the user's class, whether inputs are kept on the CPU)


def apply(modules: Mapping[str, nn.Module], offload: bool = False) -> list[str]:
    """From now on these modules compute their inside again in backward. Before they are sharded.

    Args:
        modules: by name. One that is inside of another is left to that.
        offload: what goes into them waits for backward in CPU memory.

    Returns:
        The names of those that do.
    """
    done, left = [], []
    if not modules:
        state.note_once("activation_checkpointing has no effect: the model has no blocks of its own that are units")
    for name, module in modules.items():
        if any(name.startswith(f"{other}.") for other in modules):
            continue
        cls = type(module)
        if _OF in vars(cls):
            done.append(name)
            continue
        if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
            left.append(name)
            continue
        try:
            module.__class__ = _class_for(cls, offload and _device(module) != "cpu")
        except TypeError:  # its layout has no subclass
            left.append(name)
        else:
            done.append(name)
    if left:
        state.note_once(
            f"activation_checkpointing: {', '.join(left[:3])}{' and more' if len(left) > 3 else ''} cannot compute "
            "again what is inside: its forward is no method of its class"
        )
    return done


def _class_for(cls: type, offload: bool) -> type:
    known: Any
    for known in type.__subclasses__(cls):  # which holds them weakly
        if vars(known).get(_OF) == (cls, offload):
            return known
    inner: Any = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        with _kept(offload):
            return checkpoint(inner, self, *args, use_reentrant=False, **kwargs)

    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), body | {"forward": forward, _OF: (cls, offload)})


def own_class(cls: type) -> type:
    """The user's class, from one that `apply` has put in its place; any other as it is."""
    found = vars(cls).get(_OF)
    return cls if found is None else found[0]


def _kept(offload: bool) -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=True) if offload else nullcontext()


def _device(module: nn.Module) -> str:
    return next((one.device.type for one in module.parameters()), "cpu")
