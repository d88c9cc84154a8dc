"""Which parts of a model are sharded as one: gathered together just before they compute, and let go behind it.

A few big units wait for each other less; many small ones need less memory. By default they are the model's repeated
blocks, and what is in none of them is gathered with the whole model.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# A module without parts is a block of its own only when it is this big, in numbers.
_BIG = 2**20
_LARGE = 10**8  # what torch's own policy by size takes for large
_PLACES = (nn.ModuleList, nn.Sequential)


@dataclass
class Units:
    """What `choose` has chosen.

    Attributes:
        modules: by name, those inside of others first; the model itself is not among them.
        roots: by name, what is called from outside: the model, or what is in it where it has no forward itself; those
            inside of others first.
        reason: why these, for the user.
        left: names of modules that were to be units and are not, each with why.
        ignored: parameters that are not sharded.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    roots: dict[str, nn.Module] = field(default_factory=dict)
    reason: str = ""
    left: dict[str, str] = field(default_factory=dict)
    ignored: set[nn.Parameter] = field(default_factory=set)

    def __str__(self) -> str:
        kinds = Counter(type(module).__name__ for module in self.modules.values())
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        left = "".join(f"; {name} is none: {why}" for name, why in self.left.items())
        return f"{told + ' and the rest' if told else 'the whole model'} ({self.reason}{left})"


def choose(model: nn.Module, plugin: Any = None) -> Units:
    """The units of a model.

    Args:
        model: the user's own.
        plugin: a FullyShardedDataParallelPlugin: auto_wrap_policy, transformer_cls_names_to_wrap, min_num_params and
            ignored_modules of it.

    Raises:
        ValueError: a class that none of its modules has; a pattern that is no name's.
    """
    units = Units(roots=dict(sorted(_roots(model), key=lambda root: sum(1 for _ in root[1].modules()))))
    units.ignored = _ignored(model, getattr(plugin, "ignored_modules", None))
    found, units.reason = _candidates(model, plugin)
    owners = _owners(model)
    for name, one in _between(model, units.roots, owners):
        units.ignored.add(one)
        units.left[name] = f"{type(model).__name__} has no forward, and shares it between parts: it stays whole"
    for name, root in list(units.roots.items()):  # one is a part of another, by a second name
        inside = any(root is not other and root in set(other.modules()) for other in units.roots.values())
        if inside and _unfit(root, owners, units.ignored) is not None:
            del units.roots[name]
    for name in sorted(found, key=lambda name: -name.count(".")):
        module = found[name]
        if module is model or any(module is root for root in units.roots.values()):
            continue
        why = _unfit(module, owners, units.ignored)
        if why is None:
            units.modules[name] = module
        elif why:
            units.left[name] = why
    _split_dtypes(units)
    return units


def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The named modules below a named one, without it."""
    for inner, one in module.named_modules():
        if inner:
            yield f"{name}.{inner}" if name else inner, one


def computes(module: nn.Module) -> bool:
    """Whether it has a forward; a ModuleList has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _roots(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if computes(model):
        yield name, model
        return
    for inner, child in model.named_children():
        yield from _roots(child, f"{name}.{inner}" if name else inner)


# ---------------------------------------------------------------------- candidates
def _candidates(model: nn.Module, plugin: Any) -> tuple[dict[str, nn.Module], str]:
    policy = getattr(plugin, "auto_wrap_policy", None)
    names = getattr(plugin, "transformer_cls_names_to_wrap", None)
    least = getattr(plugin, "min_num_params", None)
    kind = policy if isinstance(policy, str) else None
    kind = kind.lower() if kind else None
    if callable(policy):
        return _by_policy(model, policy), "by auto_wrap_policy"
    if kind == "no_wrap":
        return {}, "auto_wrap_policy is no_wrap"
    if names and kind in (None, "transformer_based_wrap"):
        names = [names] if isinstance(names, str) else list(names)
        return _by_class(model, names), f"the classes {', '.join(names)} were asked for"
    if kind == "size_based_wrap" or (least and kind is None):
        least = int(least or _LARGE)
        return _by_size(model, least), f"parts of at least {least:,} parameters"
    own = getattr(model, "_no_split_modules", None)
    if own:
        known = {type(module).__name__ for _, module in parts("", model)}
        own = [name for name in own if name in known]
        if own:
            return _by_class(model, own), f"the model names {', '.join(own)} as what is not to be split"
    return _repeated(model)


def _by_class(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in names}
    there = {type(module).__name__ for module in found.values()}
    missing = [name for name in names if name not in there]
    if missing:
        kinds = Counter(type(module).__name__ for _, module in parts("", model) if any(True for _ in module.children()))
        kinds = kinds or Counter(type(module).__name__ for _, module in parts("", model))
        told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(12))
        raise ValueError(
            f"transformer_cls_names_to_wrap: {type(model).__name__} has no module of the class "
            f"{' or '.join(missing)}. It has {told}. Give one of these, or leave it out: then the repeated blocks are "
            "taken"
        )
    return found


def _by_size(model: nn.Module, least: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    counted: set[nn.Module] = set()

    def rest(name: str, module: nn.Module) -> int:
        if module in counted:
            return 0
        counted.add(module)
        numbers = sum(one.numel() for one in module.parameters(recurse=False))
        for inner, child in module.named_children():
            numbers += rest(f"{name}.{inner}" if name else inner, child)
        if numbers >= least and computes(module):
            found[name] = module
            return 0
        return numbers

    rest("", model)
    return found


def _by_policy(model: nn.Module, policy: Callable[..., Any]) -> dict[str, nn.Module]:
    """By a function of a module, or one as torch's FullyShardedDataParallel takes them."""
    try:
        takes = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    short = len([one for one in takes.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]) == 1
    found = {}
    for name, module in model.named_modules():
        if short:
            taken = policy(module)
        else:
            taken = policy(
                module=module, recurse=False, nonwrapped_numel=sum(one.numel() for one in module.parameters())
            )
        if taken:
            found[name] = module
    return found


def _repeated(model: nn.Module) -> tuple[dict[str, nn.Module], str]:
    """Siblings of one class in a list or a sequence; those in others are part of them."""
    blocks: dict[str, nn.Module] = {}
    leaves: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        kinds = Counter(type(child) for _, child in children) if isinstance(module, _PLACES) else Counter()
        for inner, child in children:
            path = f"{name}.{inner}" if name else inner
            alike = kinds[type(child)] > 1 and not isinstance(child, (*_PLACES, nn.ModuleDict))
            if alike and any(True for _ in child.children()):
                blocks[path] = child
            elif alike and sum(one.numel() for one in child.parameters()) >= _BIG:
                leaves[path] = child
            else:
                look(path, child)

    look("", model)
    if blocks:
        kinds = sorted({type(module).__name__ for module in blocks.values()})
        return blocks, f"its repeated blocks, {', '.join(kinds)}"
    if leaves:
        return leaves, "its repeated big layers"
    return {}, "it has no repeated blocks"


# ---------------------------------------------------------------------- what cannot be one
def _owners(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that hold each parameter, by its identity: more than one where it is tied."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            owners.setdefault(id(one), set()).add(module)
    return owners


def _between(
    model: nn.Module, roots: dict[str, nn.Module], owners: dict[int, set[nn.Module]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in what is called from outside that are tied to something outside of it: each part is sharded by
    itself, and would get one of its own.
    """
    inside = [set(root.modules()) for root in roots.values()]
    for name, one in model.named_parameters():
        holders = owners[id(one)]
        if len(holders) > 1 and not any(holders <= part for part in inside):
            yield name, one


def _unfit(module: nn.Module, owners: dict[int, set[nn.Module]], ignored: set[nn.Parameter]) -> str | None:
    """Why this module is no unit; "" where nothing needs to be said."""
    if not computes(module):
        return "it has no forward"
    own = [one for one in module.parameters() if one not in ignored and one.dim()]
    if not own:
        return ""
    inside = set(module.modules())
    if any(not owners[id(one)] <= inside for one in own):
        return "it shares a weight with another part of the model"
    return None


def _ignored(model: nn.Module, asked: Iterable[nn.Module] | str | None) -> set[nn.Parameter]:
    """What is left whole: the parameters of these modules, and those without a dimension, which cannot be cut."""
    ignored = {one for one in model.parameters() if one.dim() == 0}
    if asked is None:
        return ignored
    if isinstance(asked, str):
        pattern = re.compile(asked)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not modules:
            raise ValueError(f"ignored_modules={asked!r}: no module of {type(model).__name__} has a name like this")
    else:
        modules = list(asked)
    return ignored | {one for module in modules for one in module.parameters()}


def _split_dtypes(units: Units) -> None:
    """What is gathered together has one dtype: parts that have another one become units themselves."""
    for name, unit in [*units.modules.items(), *units.roots.items()]:
        below = {id(module) for _, module in parts(name, unit)}
        taken = {id(one) for inner in units.modules.values() if id(inner) in below for one in inner.parameters()}
        holders: dict[torch.dtype, list[tuple[str, nn.Module, int]]] = {}
        for path, module in [(name, unit), *parts(name, unit)]:
            for one in module.parameters(recurse=False):
                if id(one) not in taken and one.requires_grad and one not in units.ignored:
                    holders.setdefault(one.dtype, []).append((path, module, one.numel()))
        if len(holders) < 2:
            continue
        most = max(holders, key=lambda dtype: sum(numbers for _, _, numbers in holders[dtype]))
        for dtype, places in holders.items():
            for path, module, _ in places if dtype != most else ():
                own = {one.dtype for one in module.parameters() if one.requires_grad}
                if module is unit or own != {dtype} or not computes(module):
                    raise ValueError(
                        f"{path or type(module).__name__} has parameters of {dtype} among others of {most}: what is "
                        "sharded together has one dtype. Give them one dtype, or put those that differ into a module "
                        "of their own"
                    )
                units.modules = {path: module} | units.modules
