"""Tensor parallel plans: which layers a group of ranks shares, and how. They are read, and looked through, before
anything is changed.

A plan names modules, also by patterns with `*`, and gives each a style of torch.distributed.tensor.parallel: by object,
or by the names that models of Hugging Face's transformers use in the plan that they bring.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from nbdist import checks, state

# How a layer is split, by name. None: it stays as it is, the same on all ranks.
STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # A norm of each head behind a layer that is split by heads, (batch, sequence, heads, size): a rank has some heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "ColwiseParallel": ColwiseParallel,
    "RowwiseParallel": RowwiseParallel,
    "SequenceParallel": SequenceParallel,
    "replicate": lambda: None,
}
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_LEARN = (
    "give the model an attribute tp_plan, such as {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or "
    "ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={...}))"
)


def read(model: nn.Module, given: Any, ranks: int) -> dict[str, ParallelStyle]:
    """The style of each module that is split, by name.

    Args:
        model: the user's own.
        given: the plan: from module names, or patterns with `*`, to styles. None or "auto": the one that the model
            brings (`tp_plan`, `_tp_plan`).
        ranks: over how many its layers are split.

    Raises:
        ValueError: there is no plan; or an entry matches no module; or a layer cannot be split as it says: one error
            for all of them, and nothing was changed. TypeError: a plan or style of another kind.
    """
    brought = given is None or given == "auto"
    plan = _brought(model) if brought else given
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise checks.wrong("the tensor parallel plan", plan, "a dict from names of modules to their styles")
    modules = dict(model.named_modules())
    problems: list[str] = []
    styles: dict[str, ParallelStyle] = {}
    absent = []
    for pattern in sorted(plan, key=lambda one: one in modules):  # a name counts more than a pattern
        style = _style(plan[pattern])
        matched = [name for name in modules if _matches(name, pattern)]
        if not matched:
            absent.append(str(pattern))
        for name in matched:
            styles.pop(name, None)
            if isinstance(style, ParallelStyle):
                styles[name] = copy.copy(style)
            elif style is not None:
                problems.append(f"{name or 'the model'}: {style}")
    if absent and brought and styles:  # written for all models of its kind
        state.note_once(
            f"the tensor parallel plan of {type(model).__name__} names what it has not: {', '.join(absent)}"
        )
    else:
        problems += [_absent(pattern, model, modules) for pattern in absent]
    _with_ties(model, modules, styles, problems)
    for name, style in styles.items():
        problems += (f"{name or 'the model'}: {one}" for one in _obstacles(name, modules, style, ranks))
    if not problems and not styles:
        problems.append("it splits nothing")
    if problems:
        listed = "; ".join(dict.fromkeys(problems))
        whose = "that the model brings" if brought else "that was given"
        raise ValueError(
            f"{type(model).__name__} cannot be split over {ranks} tensor parallel ranks by the plan {whose}: {listed}"
        )
    return styles


def _brought(model: nn.Module) -> Any:
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if plan:
            return plan
    raise ValueError(
        f"{type(model).__name__} says nowhere how its layers are to be split over tensor parallel ranks, and that is "
        f"not guessed: {_LEARN}"
    )


def _style(given: Any) -> Any:
    """The style; None for what stays whole; a text for what cannot be."""
    if given is None or isinstance(given, ParallelStyle):
        return given
    if isinstance(given, type) and issubclass(given, ParallelStyle):
        return given()
    if isinstance(given, str):
        if given in STYLES:
            return STYLES[given]()
        known = ", ".join(map(repr, STYLES))
        return f"the style {given!r} is none of torch.distributed.tensor.parallel's; known by name are {known}"
    raise checks.wrong("a style of the tensor parallel plan", given, "'colwise', or ColwiseParallel(), or another one")


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), str(pattern).split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _absent(pattern: str, model: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    parameters = dict(model.named_parameters())
    if any(_matches(name, pattern) for name in parameters):
        return f"{pattern!r} names a parameter, and a plan names modules"
    names = list(
        dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in modules)
    )
    near = difflib.get_close_matches(pattern, names[1:], 3, 0.5)
    return f"{pattern!r} matches no module" + (f"; there is {', '.join(map(repr, near))}" if near else "")


# ---------------------------------------------------------------------- parameters with two names
def ties(model: nn.Module) -> Iterator[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield from (one for one in names.values() if len(one) > 1)


def _with_ties(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: dict[str, ParallelStyle], problems: list[str]
) -> None:
    """A weight that two modules share is split in one way, so both need a style that does it."""
    for names in ties(model):
        owners = [name.rpartition(".")[0] for name in names]
        split = [owner for owner in owners if owner in styles]
        if not split:
            continue
        dimension = _splits(modules[split[0]], styles[split[0]])
        for owner, name in zip(owners, names, strict=True):
            module = modules[owner]
            if owner not in styles and isinstance(module, nn.Embedding) and dimension == 0:
                styles[owner] = RowwiseParallel(input_layouts=Replicate())
            if owner not in styles or _splits(module, styles[owner]) != dimension:
                problems.append(
                    f"{name} and {split[0]} share one weight, and the plan splits it in one of them only, or in two "
                    f"ways: give {owner} a style too ('rowwise' of an embedding goes with 'colwise' of a linear layer)"
                )


def _splits(module: nn.Module, style: ParallelStyle) -> int | None:
    """The dimension of the module's weight that the style splits."""
    across = isinstance(style, RowwiseParallel)
    if isinstance(module, nn.Linear):
        return int(across) if isinstance(style, ColwiseParallel | RowwiseParallel) else None
    if isinstance(module, nn.Embedding):
        return int(not across) if isinstance(style, ColwiseParallel | RowwiseParallel) else None
    return None


# ---------------------------------------------------------------------- what cannot be split
def _obstacles(name: str, modules: Mapping[str, nn.Module], style: ParallelStyle, ranks: int) -> Iterator[str]:
    module = modules[name]
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    kind = type(style).__name__
    if not isinstance(module, nn.Linear | nn.Embedding):
        yield f"{kind} splits Linear and Embedding, and this is {type(module).__name__}"
        return
    if set(dict(module.named_parameters())) - {"weight", "bias"}:
        yield f"{kind} splits its weight, which is made of others (a parametrization); remove that first"
        return
    parent = modules[name.rpartition(".")[0]] if name else module
    if isinstance(parent, nn.MultiheadAttention):
        yield "MultiheadAttention computes with its weights without calling it, so it cannot be split"
        return
    dimension = _splits(module, style)
    assert dimension is not None
    size = module.weight.shape[dimension]
    if size % ranks:
        what = ["out_features", "in_features"] if isinstance(module, nn.Linear) else ["num_embeddings", "embedding_dim"]
        yield f"its {what[dimension]} {size} cannot be divided by {ranks}"
    elif isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
        yield from _heads(parent, size, ranks)


def _heads(parent: nn.Module, size: int, ranks: int) -> Iterator[str]:
    """Where a module splits its features into heads, each rank has whole ones."""
    config = getattr(parent, "config", None)
    found = {name: getattr(parent, name, getattr(config, name, None)) for name in _HEADS}
    heads = {name: count for name, count in found.items() if type(count) is int and count > 0}
    if not heads or not any(name in vars(parent) or "attention" in type(parent).__name__.lower() for name in heads):
        return
    each = getattr(parent, "head_dim", None)
    if type(each) is int and each > 0 and size % each == 0:
        if size // each % ranks:
            yield f"its {size // each} heads of {each} cannot be divided by {ranks}"
        return
    for name, count in heads.items():
        if size % count == 0 and count % ranks:
            yield f"the {name} {count} of {type(parent).__name__} cannot be divided by {ranks}"
            return
