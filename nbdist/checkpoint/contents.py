"""What a training run consists of, as a checkpoint holds it: trees of plain values, and tensors by key.

A model's tensors have its own names. Of an optimizer the state is by the names of its parameters, and so are its
groups: neither the order of models nor that of groups counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.checkpoint import naming, tree

Get = Callable[[str], torch.Tensor]


class Tensors:
    """The tensors of what is captured, by key; one that is there already (a tied weight) is kept once."""

    def __init__(self) -> None:
        self.by_key: dict[str, torch.Tensor] = {}
        self._known: dict[Any, str] = {}

    def put(self, tensor: torch.Tensor, key: str, once: bool = False) -> str:
        """Take a tensor; returns the key that it is kept under.

        Args:
            once: where the same memory is there already, it is that one.

        Raises:
            Unsaveable: its values cannot be written.
        """
        tensor = tensor.detach()
        _refuse(tensor, key)
        place = _place(tensor) if once else None
        if place is not None and place in self._known:
            return self._known[place]
        unique, number = key, 1
        while unique in self.by_key:
            unique, number = f"{key}#{number}", number + 1
        self.by_key[unique] = tensor
        if place is not None:
            self._known[place] = unique
        return unique

    def under(self, prefix: str) -> Callable[[torch.Tensor, str], str]:
        """`put` for `tree.encode`."""
        return lambda tensor, path: self.put(tensor, f"{prefix}/{path}" if path else prefix)

    def tree(self, value: Any, prefix: str, of: str) -> Any:
        """A value as a tree.

        Args:
            of: what it is, for the error.
        """
        try:
            return tree.encode(value, self.under(prefix))
        except tree.Unsaveable as error:
            raise tree.Unsaveable(f"{of} cannot be saved: {error}") from None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse(tensor: torch.Tensor, key: str) -> None:
    held = local(tensor)
    why = None
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        why = "has no shape yet: call its lazy module once"
    elif held.is_meta:
        why = "is on the device meta and has no values"
    elif held.layout is not torch.strided:
        why = f"is {str(held.layout).removeprefix('torch.')}; only dense tensors are written"
    elif held.is_quantized:
        why = "is quantized"
    elif hasattr(held, "__tensor_flatten__"):
        why = f"is a {type(held).__name__}, whose parts only its library knows"
    if why is not None:
        raise tree.Unsaveable(f"{key} {why}")


def _place(tensor: torch.Tensor) -> Any:
    held = local(tensor)
    if not held.numel():
        return None
    layout = (tensor.placements, tuple(tensor.shape)) if isinstance(tensor, DTensor) else None
    memory = held.untyped_storage().data_ptr(), held.device
    return *memory, held.storage_offset(), tuple(held.shape), held.stride(), held.dtype, layout


# ------------------------------------------------------------------ models


def model_state(model: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """By the model's own name of each entry of its state: the name that its `state_dict` has, and the value.

    Raises:
        Unsaveable: two entries have one name without what wraps them.
    """
    wrappers = naming.wrappers_of(model)
    found: dict[str, tuple[str, Any]] = {}
    for key, value in model.state_dict().items():
        name = naming.plain(key, wrappers)
        if name in found:
            raise tree.Unsaveable(f"{key} and {found[name][0]} of {type(model).__name__} have one name, {name}")
        found[name] = key, value
    return found


def model(name: str, model: torch.nn.Module, tensors: Tensors) -> dict[str, Any]:
    """A model's part of the contents."""
    keys, extra = {}, {}
    for own, (_, value) in model_state(model).items():
        if isinstance(value, torch.Tensor):
            keys[own] = tensors.put(value, f"model/{name}/{own}", once=True)
        else:
            extra[own] = tensors.tree(value, f"model/{name}/{own}", f"{own} of the model {name!r}")
    return {"class": type(model).__name__, "keys": keys, "extra": extra}


# ------------------------------------------------------------------ optimizers


def parameter_names(optimizer: torch.optim.Optimizer, named: Mapping[int, list[str]]) -> list[list[list[str]]]:
    """For each group, for each of its parameters, the names that it has: by the prepared models; else by the group's
    own `param_names`; else by its place.
    """
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        own = group.get("param_names")
        names = []
        for place, parameter in enumerate(group["params"]):
            known = named.get(id(parameter))
            if known is None:
                known = [f"/{own[place]}" if own is not None and place < len(own) else f"/group {at}, {place}"]
            names.append(known)
        groups.append(names)
    return groups


def optimizer(
    name: str, optimizer: torch.optim.Optimizer, named: Mapping[int, list[str]], tensors: Tensors
) -> dict[str, Any]:
    """An optimizer's part of the contents.

    Args:
        named: the prepared models' parameters, by identity.
    """
    names = parameter_names(optimizer, named)
    of, prefix = f"the optimizer {name!r}", f"optimizer/{name}"
    whole = optimizer.state_dict()
    by_index: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    for group, own in zip(whole["param_groups"], names, strict=True):
        by_index.update(zip(group["params"], (known[0] for known in own), strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "params": [known[0] for known in own],
                "options": tensors.tree(options, f"{prefix}/groups/{len(groups)}", of),
            }
        )
    state, rest = {}, {}
    for key, value in whole["state"].items():
        if key in by_index:
            own_name = by_index[key]
            state[own_name] = tensors.tree(value, f"{prefix}/{own_name.lstrip('/')}", of)
        else:
            rest[key] = value
    extra = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "rest": tensors.tree(rest, f"{prefix}/rest", of),
        "extra": tensors.tree(extra, f"{prefix}/extra", of),
    }


# ------------------------------------------------------------------ the rest


def plain(kind: str, name: str, value: Any, tensors: Tensors) -> dict[str, Any]:
    """The part of what has a `state_dict` of its own: a scheduler, a loader, an object."""
    what = naming.SINGULAR[kind]
    return {
        "class": type(value).__name__,
        "state": tensors.tree(value.state_dict(), f"{what}/{name}", f"the {what} {name!r} ({type(value).__name__})"),
    }


def everything(
    named: dict[str, dict[str, Any]], tensors: Tensors, left_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The contents of a checkpoint.

    Args:
        named: what was prepared, by kind and name.
        left_out: models that a hook of the user's saves.

    Raises:
        Unsaveable: something cannot be saved; says what and why.
    """
    parameters = naming.parameters_of(named["models"])
    found: dict[str, Any] = {
        "models": {name: model(name, one, tensors) for name, one in named["models"].items() if name not in left_out},
        "optimizers": {name: optimizer(name, one, parameters, tensors) for name, one in named["optimizers"].items()},
        "hooked": sorted(left_out),
    }
    for kind in ("schedulers", "loaders", "objects"):
        found[kind] = {name: plain(kind, name, one, tensors) for name, one in named[kind].items()}
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks have other parts of it."""
    return isinstance(tensor, DTensor)
