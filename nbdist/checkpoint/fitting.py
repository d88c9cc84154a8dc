"""Does a checkpoint fit what is prepared here? Looked at before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.checkpoint import contents, naming
from nbdist.checkpoint.manifest import Manifest

_SHOWN = 8  # names in one list


@dataclass
class Fit:
    """What is to be loaded into what.

    Attributes:
        pairs: for each kind, by the name here, the name in the checkpoint.
        problems: what does not fit, in words; empty: all fits.
        hint: what could be done about them.
        notes: what is left out, in words, where not all has to fit.
        models: by the name here, for each of the model's names the key of the tensor.
        groups: by the name here, for each group of an optimizer which one of the checkpoint it is.
        parameters: by the name here, for each parameter in the order of the groups its name in the checkpoint, None
            where it has no state there.
        wanted: the tensors to read, and what they are to be like (None: whole).
    """

    pairs: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)
    wanted: dict[str, DTensor | None] = field(default_factory=dict)


def fit(
    held: Manifest,
    named: dict[str, dict[str, Any]],
    strict: bool,
    names: Mapping[str, str],
    hooked: frozenset[str] = frozenset(),
) -> Fit:
    """Compare.

    Args:
        named: what is prepared here, by kind and name.
        strict: all of the checkpoint goes to what is here, and the other way; else only what both have.
        names: for names in the checkpoint those here.
        hooked: models here that a hook of the user's loads.
    """
    found = Fit()
    for kind in naming.KINDS:
        here = {name: one for name, one in named[kind].items() if not (kind == "models" and name in hooked)}
        _pair(found, kind, held.contents[kind], here, held, strict, names)
    for name, other in found.pairs["models"].items():
        _model(found, held, name, other, named["models"][name], strict)
    parameters = naming.parameters_of(named["models"])
    renamed = found.pairs["models"]
    for name, other in found.pairs["optimizers"].items():
        _optimizer(found, held, name, other, named["optimizers"][name], parameters, renamed)
        if not found.problems:
            _schedulers(found, name, named)
    return found


def _schedulers(found: Fit, name: str, named: dict[str, dict[str, Any]]) -> None:
    """A scheduler's state is by the number of the group."""
    order = found.groups.get(name, [])
    if order == list(range(len(order))):
        return
    optimizer = named["optimizers"][name]
    for scheduler in found.pairs["schedulers"]:
        own = getattr(named["schedulers"][scheduler], "optimizer", None)
        if getattr(own, "optimizer", own) is optimizer:
            found.problems.append(
                f"the optimizer {name!r} has its groups in another order than in the checkpoint (there they are "
                f"{', '.join(map(str, order))}), and the scheduler {scheduler!r} keeps learning rates by their number: "
                "make the groups in that order"
            )


def _pair(
    found: Fit, kind: str, there: dict[str, Any], here: dict[str, Any], held: Manifest, strict: bool,
    names: Mapping[str, str],
) -> None:  # fmt: skip
    """Which is which, by name. One that is alone on both sides is that one, whatever it is called."""
    by_here = {names.get(name, name): name for name in there}
    pairs = {name: by_here[name] for name in here if name in by_here}
    left_there = [name for name in there if name not in pairs.values()]
    left_here = [name for name in here if name not in pairs]
    if len(left_there) == len(left_here) == 1 and _alike(kind, there[left_there[0]], here[left_here[0]], held):
        pairs[left_here[0]] = left_there[0]
        left_there, left_here = [], []
    found.pairs[kind] = pairs
    what = naming.SINGULAR[kind]
    if strict and left_there and left_here:
        found.hint = f"; names={{{left_there[0]!r}: {left_here[0]!r}}} says what has another name here"
    for name in left_there:
        told = f"the {what} {name!r} of the checkpoint ({there[name]['class']}) is not here"
        told += f" (here: {', '.join(map(repr, here))})" if here else f": no {what} is prepared"
        if what == "object":
            told = told.replace("prepared", "registered")
        (found.problems if strict else found.notes).append(told)
    for name in left_here:
        told = f"the {what} {name!r} ({type(here[name]).__name__}) is not in the checkpoint"
        told += f" (it holds: {', '.join(map(repr, there))})" if there else f", which holds no {what}"
        (found.problems if strict else found.notes).append(told)


def _alike(kind: str, there: dict[str, Any], here: Any, held: Manifest) -> bool:
    """Whether what has another name can be meant all the same."""
    if kind == "models":
        own = {
            name: list(value.shape)
            for name, (_, value) in contents.model_state(here).items()
            if isinstance(value, torch.Tensor)
        }
        return own == {name: held.tensors[key].shape for name, key in there["keys"].items() if key in held.tensors}
    return there["class"] == type(here).__name__ or kind == "loaders"


def _model(found: Fit, held: Manifest, name: str, other: str, model: torch.nn.Module, strict: bool) -> None:
    there = held.contents["models"][other]
    own = contents.model_state(model)
    missing = [key for key in own if key not in there["keys"] and key not in there["extra"]]
    unexpected = [key for key in (*there["keys"], *there["extra"]) if key not in own]
    shapes, dtypes, takes = [], [], {}
    for key, storage in there["keys"].items():
        if key not in own or not isinstance(own[key][1], torch.Tensor):
            continue
        value = own[key][1]
        tensor = held.tensors[storage]
        if list(value.shape) != tensor.shape:
            shapes.append(f"{key} is {tuple(tensor.shape)} there and {tuple(value.shape)} here")
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != tensor.dtype:
            dtypes.append(f"{key} is {tensor.dtype} there and {dtype} here")
        takes[key] = storage
        found.wanted[storage] = value if isinstance(value, DTensor) else None
    parts = []
    if missing:
        parts.append(f"not in the checkpoint: {listed(missing)}")
    if unexpected:
        parts.append(f"only in the checkpoint: {listed(unexpected)}")
    if dtypes:
        parts.append(f"other dtypes: {listed(dtypes)}")
    if parts and not strict:
        found.notes.append(f"the model {name!r}: {'; '.join(parts)}")
        parts = []
    if shapes:
        parts.append(f"other shapes: {listed(shapes)}")
    if parts:
        found.problems.append(f"the model {name!r}: {'; '.join(parts)}")
    found.models[name] = takes


def _optimizer(
    found: Fit, held: Manifest, name: str, other: str, optimizer: torch.optim.Optimizer,
    parameters: Mapping[int, list[str]], renamed: Mapping[str, str],
) -> None:  # fmt: skip
    there = held.contents["optimizers"][other]
    if there["class"] != type(optimizer).__name__:
        found.problems.append(f"the optimizer {name!r} is {there['class']} there and {type(optimizer).__name__} here")
        return
    at = {parameter: index for index, group in enumerate(there["groups"]) for parameter in group["params"]}
    groups, order, unknown = [], [], []
    for index, group in enumerate(contents.parameter_names(optimizer, parameters)):
        into: dict[int, str] = {}
        for known in group:
            as_there = [_renamed(one, renamed) for one in known]
            match = next((one for one in as_there if one in at), None)
            if match is None:
                unknown.append(known[0].lstrip("/"))
                continue
            order.append(match)
            into.setdefault(at[match], match)
        if len(into) > 1:
            told = ", ".join(f"{parameter.lstrip('/')} in group {one}" for one, parameter in into.items())
            found.problems.append(
                f"the optimizer {name!r}: group {index} here has parameters that are in {len(into)} groups there "
                f"({told})"
            )
        elif not into and not group:
            into = {index: ""} if index < len(there["groups"]) else {}
        groups.append(next(iter(into), -1))
    gone = [parameter.lstrip("/") for parameter in at if parameter not in set(order)]
    parts = []
    if unknown:
        parts.append(f"parameters that are not in the checkpoint: {listed(unknown)}")
    if gone:
        parts.append(f"parameters that are only there: {listed(gone)}")
    if parts:
        found.problems.append(f"the optimizer {name!r}: {'; '.join(parts)}")
    found.groups[name], found.parameters[name] = groups, order
    if not parts:
        _state_tensors(found, held, there, optimizer, order)


def _state_tensors(
    found: Fit, held: Manifest, there: dict[str, Any], optimizer: torch.optim.Optimizer, order: list[str]
) -> None:
    """What is as big as a parameter is sharded like it."""
    from nbdist.checkpoint import tree

    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, name in zip(flat, order, strict=True):
        for key in tree.keys(there["state"].get(name)):
            same = key in held.tensors and held.tensors[key].shape == list(parameter.shape)
            found.wanted[key] = parameter if isinstance(parameter, DTensor) and same else None


def _renamed(parameter: str, renamed: Mapping[str, str]) -> str:
    model, _, own = parameter.partition("/")
    return f"{renamed.get(model, model)}/{own}"


def listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
