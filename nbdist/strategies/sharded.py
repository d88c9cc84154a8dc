"""What this process knows of each sharded module: its units, which of them share gradients, and where those lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbdist import views


class Sharded:
    """One sharded module.

    Args:
        module: it is not kept alive.
        mesh: what its parameters are spread over.
        chosen: which units, and why; "" where the user has made them.

    Attributes:
        wanted: what the windows have said about sharing gradients.
        applied: what the units were told last.
    """

    __slots__ = ("_hybrid", "_roots", "_units", "applied", "chosen", "mesh", "wanted")

    def __init__(self, module: nn.Module, mesh: Any, chosen: str = "") -> None:
        self.mesh, self.chosen = mesh, chosen
        self._units = [weakref.ref(one) for one in module.modules() if isinstance(one, FSDPModule)]
        inside: set[nn.Module] = set()
        self._roots = []
        for unit in self.units:
            if unit not in inside:
                self._roots.append(weakref.ref(unit))
            inside.update(unit.modules())
        self.wanted = self.applied = True
        # An exchange between replicas can wait for the window's end alone: then gradients stay in shards.
        self._hybrid = any(getattr(group, "_is_hsdp", False) for unit in self.units for group in groups(unit))

    @property
    def units(self) -> list[Any]:
        """Its units, whoever made them, the module itself among them, in the order of their names."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def roots(self) -> list[Any]:
        """Those of its units that are in no other one."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def apply(self) -> None:
        """Tell the units what is wanted."""
        sync = self.applied = self.wanted
        for unit in self.units:
            if self._hybrid:
                unit.set_requires_all_reduce(sync, recurse=False)
            else:
                unit.set_requires_gradient_sync(sync, recurse=False)

    def holders(self) -> Iterator[torch.Tensor]:
        """The tensors that may have gradients: the shards, and the whole parameters that autograd knows."""
        for unit in self.units:
            for group in groups(unit):
                for one in group.fsdp_params:
                    yield one.sharded_param
                    whole = getattr(one, "_unsharded_param", None)
                    if whole is not None:
                        yield whole

    def apart(self) -> list[tuple[Any, str, torch.Tensor]]:
        """Gradients of an unfinished window that no tensor has as its `.grad`: the record of torch's that holds each,
        and by which name.
        """
        found = []
        for unit in self.units:
            for group in groups(unit):
                found += [(group, _PARTIAL, getattr(group, _PARTIAL, None))]
                found += [(one, _ACCUMULATED, getattr(one, _ACCUMULATED, None)) for one in group.fsdp_params]
        return [(of, name, held) for of, name, held in found if held is not None]

    def look_after(self, stays: bool) -> None:
        """Before a forward of a unit that is in no other one the units are told what is wanted; and which those are is
        noted now, and not by the first unit that happens to be called.

        Args:
            stays: torch leaves its parameters gathered behind forward, for backward. Behind a forward without gradients
                there is none, and who looks at `parameters()` then would see others than the optimizer's.
        """

        def before(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling() and self.wanted is not self.applied:
                self.apply()

        def behind(module: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                views.bare(module).reshard()

        for root in self.roots:
            root.register_forward_pre_hook(before)
            if stays:
                _stay.add(root)
                root.register_forward_hook(behind)
            note = getattr(state(root), "_lazy_init", None)
            if note is not None and not any(one.is_meta for one in root.parameters()):
                note()


_known: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()
_stay: WeakSet[nn.Module] = WeakSet()  # units that stay gathered behind a forward with gradients


def record(module: nn.Module) -> Sharded | None:
    """What is known of this module, of a view of it or of its compiled form."""
    found = _known.get(views.bare(module))
    if found is None and (inner := getattr(module, "_orig_mod", None)) is not None:
        return _known.get(views.bare(inner))
    return found


def keep(module: nn.Module, known: Sharded) -> Sharded:
    """From now on this is known of the module."""
    _known[module] = known
    return known


def records() -> list[Sharded]:
    """Of all living modules."""
    return list(_known.values())


def is_sharded(module: nn.Module) -> bool:
    """Whether the module or a part of it is sharded, by whomever."""
    return any(isinstance(one, FSDPModule) for one in module.modules())


# ---------------------------------------------------------------------- inside of torch, see nbdist/private.py
_PARTIAL, _ACCUMULATED = "_partial_reduce_output", "unsharded_accumulated_grad"


def state(unit: Any) -> Any:
    """What torch notes of a unit; None where this torch has other insides."""
    get = getattr(views.bare(unit), "_get_fsdp_state", None)
    return None if get is None else get()


def groups(unit: Any) -> list[Any]:
    """torch's own records of what a unit gathers at once; none where this torch has other insides."""
    found = state(unit)
    several = getattr(found, "_fsdp_param_groups", None)  # since torch 2.10 there may be several
    if several is None:
        one = getattr(found, "_fsdp_param_group", None)
        several = [] if one is None else [one]
    return list(several)


def computes(unit: Any) -> bool:
    """Whether the unit is in its forward, or has other insides, so that nothing can begin one."""
    found = state(unit)
    ways = all(hasattr(found, name) for name in ("_pre_forward", "_post_forward", "_training_state"))
    return not ways or in_forward(unit)


def in_forward(unit: Any) -> bool:
    """Whether torch takes the unit to be in its forward: it is, or that has raised."""
    now = getattr(state(unit), "_training_state", None)
    return now is not None and now.name == "FORWARD"


def in_backward(root: Any) -> bool:
    """Whether torch takes a backward through this module to go on: it does, or that has raised."""
    return bool(getattr(getattr(state(root), "_state_ctx", None), "post_backward_final_callback_queued", False))


def begin(unit: Any) -> None:
    """As in front of the unit's forward: its parameters are gathered."""
    state(unit)._pre_forward(unit, (), {})


def end(unit: Any, output: Any) -> Any:
    """As behind the unit's forward, which gave this."""
    output = state(unit)._post_forward(unit, (), output)
    if unit in _stay and not torch.is_grad_enabled():
        unit.reshard()
    return output


def drop(unit: Any) -> None:
    """Forget the gradients of a unit, also those of an unfinished window, which lie apart."""
    for group in groups(unit):
        if getattr(group, _PARTIAL, None) is not None:
            setattr(group, _PARTIAL, None)
        for one in group.fsdp_params:
            one.sharded_param.grad = None
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
            if getattr(one, _ACCUMULATED, None) is not None:
                setattr(one, _ACCUMULATED, None)
