"""A sharded module that was interrupted trains on.

Stopped in backward, FSDP2 goes on without a word, and computes for ever with the whole parameters that it had gathered
then: they are trained no more. So what it notes about the iteration is taken back, on all ranks. Its own
`reset_iter_state` (since torch 2.13) waits for collectives that a Stop has cut, and leaves the gradients of an
unfinished window.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from nbdist.state import cell_hooks, interrupt_hooks, note_once
from nbdist.strategies import activation, sharded

# Where each is kept, by the class whose __init__ names it.
_NOTED = {
    "_fsdp_state.FSDPState": ("_training_state", "_state_ctx", "_comm_ctx"),
    "_fsdp_state.FSDPStateContext": ("iter_forward_root", "post_backward_final_callback_queued"),
    "_fsdp_param_group.FSDPParamGroup": ("_training_state", "_sharded_state", "_all_gather_result", "fsdp_params"),
}
# What a group holds of one iteration; some releases have more of it than others.
_HELD = ("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event", "_all_reduce_state")


def be_ready() -> None:
    """From now on sharded modules are repaired after an interrupt."""
    interrupt_hooks.add(repair_all)
    cell_hooks.add(let_go)


def let_go() -> None:
    """What a forward has gathered and no backward has let go: who looks at a model sees its shards."""
    for unit in everywhere():
        unit.reshard()


def repair_all() -> None:
    """Every sharded module of this process, whoever has made it. Gradients are dropped. Nothing is communicated.

    Raises:
        NotImplementedError: this torch has other insides; what is sharded must be made again.
    """
    units = everywhere()
    if units and not can_repair():
        raise NotImplementedError(
            f"with torch {torch.__version__} a module that is sharded by fully_shard cannot be put right after an "
            "interrupt: make the model again, and prepare it, before training goes on"
        )
    for unit in units:
        repair(unit)


def everywhere() -> list[Any]:
    """The units of all living modules."""
    from torch.distributed import _composable_state

    known = getattr(_composable_state, "_module_state_mapping", None)
    if known is None:
        return [unit for record in sharded.records() for unit in record.units]
    return [module for module in list(known) if isinstance(module, FSDPModule)]


@functools.cache
def can_repair() -> bool:
    """Has this torch all that is put right?"""
    for path, names in _NOTED.items():
        file, _, cls = path.partition(".")
        try:
            init = getattr(importlib.import_module(f"torch.distributed.fsdp._fully_shard.{file}"), cls).__init__
        except (ImportError, AttributeError):
            return False
        if not set(names) <= set(init.__code__.co_names):
            return False
    return True


def after_forward(root: Any) -> None:
    """Put this module right behind each forward that raises, since the user's code may catch that and go on."""

    def behind(module: Any, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and sharded.in_forward(module):  # torch's own hook has not been reached
            mend(module, drops=False)  # what micro-batches before have given is as it was

    root.register_forward_hook(behind, always_call=True)


def after_backward() -> None:
    """A backward has raised. What is left of it nobody could tell from what micro-batches before have given, so a
    module that was in it has neither, which is said.
    """
    for known in sharded.records():
        for root in known.roots:
            if sharded.in_backward(root):
                mend(root)
                note_once(
                    f"a backward of {_name(root)} was not finished, so its gradients were dropped, with those "
                    "of micro-batches before it in the same window"
                )


def _name(root: Any) -> str:
    classes = type(root).__mro__
    return activation.own_class(classes[classes.index(FSDPModule) + 1]).__name__


def mend(root: Any, drops: bool = True) -> None:
    """The units of one module, as they are between two iterations, where this torch can be put right."""
    if can_repair():
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                repair(unit, drops)


def repair(unit: Any, drops: bool = True) -> None:
    """One unit, as it is between two iterations.

    Args:
        drops: its gradients go.
    """
    state = sharded.state(unit)
    idle = type(state._training_state)["IDLE"]
    state._training_state = idle
    shared, communication = state._state_ctx, state._comm_ctx
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    for place in (state, communication):
        for name in ("all_gather_state", "reduce_scatter_state"):
            if getattr(place, name, None) is not None:
                setattr(place, name, None)
        for name in ("reduce_scatter_states", "post_forward_order", "_modules_to_run_forward"):
            if (several := getattr(place, name, None)) is not None:
                several.clear()
    for group in sharded.groups(unit):
        group._training_state = idle
        for name in _HELD:
            if getattr(group, name, None) is not None:
                setattr(group, name, None)
        if (order := getattr(group, "_post_forward_indices", None)) is not None:
            order.clear()
        for one in group.fsdp_params:  # it may have stopped between two of them
            one.to_sharded()
        group._sharded_state = type(group._sharded_state)["SHARDED"]
    if drops:
        sharded.drop(unit)
