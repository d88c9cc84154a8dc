"""Models on the meta device: sharded first, then each rank's shards get their values, so that no rank has it whole.

A tensor that some rank has comes from the lowest rank that does, one tensor at a time. One that nobody has is what its
module's `reset_parameters` makes of it (and `_init_weights` of the model, where there is one), as in one process: the
whole tensor of one module after the other, in the order in which they are made, with rank 0's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist import messages, state
from nbdist.strategies import carrying

_RESETS = ("reset_parameters", "_reset_parameters")
_WHOLE = "_init_weights"
Init = Callable[[nn.Module], Any]


@dataclass
class Missing:
    """What has no values yet on some rank.

    Attributes:
        sources: by name, the rank that has it; None: nobody has.
    """

    sources: dict[str, int | None]

    def __contains__(self, name: object) -> bool:
        return name in self.sources


def look(model: nn.Module, init: Init | None = None, alike: bool = False) -> Missing | None:
    """What is on the meta device on any rank; None: nothing. Before anything is sharded; a collective.

    Args:
        model: the user's own.
        init: gives a module's own tensors their values; the plugin's param_init_fn.
        alike: each tensor is to be on the meta device on all ranks or on none.

    Raises:
        ValueError: a tensor that nobody has, and of which nothing can make one; on all ranks, naming all of them. Or
            one that some have, and are to be alike.
    """
    mine = [name for name, tensor in _tensors(model) if tensor.is_meta]
    everyone = [mine] if messages.ranks() == 1 else messages.agree("prepare", mine)
    sources: dict[str, int | None] = {}
    for name in dict.fromkeys(name for names in everyone for name in names):
        sources[name] = next((rank for rank, names in enumerate(everyone) if name not in names), None)
    if not sources:
        return None
    nobody = [name for name, source in sources.items() if source is None]
    if alike and len(nobody) < len(sources):
        name = next(name for name, source in sources.items() if source is not None)
        raise ValueError(
            f"{name} of {type(model).__name__} is on the meta device on some ranks, and rank {sources[name]} has it, "
            "which tensor parallel cannot take apart: make the model alike on all ranks"
        )
    if init is None and not hasattr(model, _WHOLE):
        hopeless = [name for name in nobody if not any(map(_reset, _owners(model, name)))]
        if hopeless:
            raise _unset(model, hopeless)
    return Missing(sources)


def fill(
    model: nn.Module, missing: Missing, had: Mapping[str, torch.Tensor], device: torch.device, init: Init | None = None
) -> None:
    """Give what was missing its values. A collective.

    Args:
        model: whose parameters are spread by now.
        missing: from `look`.
        had: the tensors of before, by name.
        device: where shards are, and buffers.
        init: as for `look`.

    Raises:
        ValueError: something got no value; on all ranks, naming it.
    """
    with torch.no_grad():
        mine = {name for name, tensor in _tensors(model) if tensor.is_meta}
        _make_room(model, device)
        now = dict(_tensors(model))
        done: set[int] = set()
        for name, source in missing.sources.items():
            if source is not None and id(now[name]) not in done:
                done.add(id(now[name]))
                _send(now[name], had.get(name), source, name in mine, device)
        nobody = [name for name, source in missing.sources.items() if source is None]
        if nobody:
            _initialise(model, nobody, init)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The module that has this tensor, and those around it."""
    path = name.split(".")[:-1]
    for end in range(len(path), -1, -1):
        yield model.get_submodule(".".join(path[:end]))


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    return next((found for name in _RESETS if callable(found := getattr(module, name, None))), None)


def _call_reset(module: nn.Module) -> None:
    reset = _reset(module)
    if reset is not None:
        reset()


def _unset(model: nn.Module, names: list[str]) -> ValueError:
    told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ValueError(
        f"{type(model).__name__} is on the meta device, and nothing gives {told} a value: no rank has it, and no "
        "reset_parameters makes one. Make the model on rank 0 without the meta device (the other ranks get their "
        "shards from there), or give fsdp_plugin a param_init_fn"
    )


# ---------------------------------------------------------------------- room
def _make_room(model: nn.Module, device: torch.device) -> None:
    """Memory for each rank's part of what is on the meta device; what is shared stays shared."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if one.is_meta:
                if id(one) not in made:
                    made[id(one)] = nn.Parameter(_empty(one, device), requires_grad=one.requires_grad)
                setattr(module, name, made[id(one)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = _empty(buffer, device)
                setattr(module, name, made[id(buffer)])


def _empty(like: Any, device: torch.device) -> torch.Tensor:
    """One without values, which is seen on it."""
    if not carrying.is_spread(like):
        return _blank(like.shape, like.dtype, device)
    from torch.distributed.tensor import DTensor

    local = _blank(like.to_local().shape, like.dtype, device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=tuple(like.stride())
    )


def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, False if dtype is torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


def _is_blank(tensor: Any) -> bool:
    tensor = _own(tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _own(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if carrying.is_spread(tensor) else tensor


# ---------------------------------------------------------------------- values
def _send(now: Any, had: torch.Tensor | None, source: int, here: bool, device: torch.device) -> None:
    """One tensor, from the rank that has it to those that do not."""
    if dist.get_rank() == source:
        whole = (now if had is None else had).detach().to(device).contiguous()
    else:
        whole = torch.empty(now.shape, dtype=now.dtype, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(whole, src=source)
    if here:
        _own(now).copy_(_own(carrying.like(whole, now)))


def _initialise(model: nn.Module, names: list[str], init: Init | None) -> None:
    before = rng_state = torch.get_rng_state()
    if messages.ranks() > 1:
        rng_state = torch.frombuffer(
            bytearray(messages.agree("prepare", before.numpy().tobytes())[0]), dtype=torch.uint8
        )
    torch.set_rng_state(rng_state)
    wanted, done = set(names), set[int]()
    try:
        for name, module in list(_in_order(model)):
            if init is not None:
                _run(name, module, init, wanted, done)
            elif _reset(module) is not None:
                _run(name, module, _call_reset, wanted, done, deep=True)
        whole = getattr(model, _WHOLE, None)
        if init is None and callable(whole):
            done.clear()
            for name, module in list(_in_order(model)):
                _run(name, module, whole, wanted, done)
    finally:
        if not torch.equal(before, rng_state):
            torch.set_rng_state(before)  # as other ranks' random numbers, this one's are its own
    if init is None:
        now = dict(_tensors(model))
        blank = [name for name in names if _is_blank(now[name])]
        everyone = [blank] if messages.ranks() == 1 else messages.agree("prepare", blank)
        if any(everyone):
            raise _unset(model, list(dict.fromkeys(name for rank in everyone for name in rank)))
    state.note_once(
        f"{type(model).__name__} was on the meta device, so that its values come from "
        + ("param_init_fn" if init is not None else "each module's reset_parameters")
        + "; what its constructor does besides is not repeated"
    )


def _in_order(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Modules as constructors make them: those inside first."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for inner, child in module.named_children():
        yield from _in_order(child, f"{name}.{inner}" if name else inner, seen)
    yield name, module


class _Call(nn.Module):
    """Calls a function of a module, and gives the module's tensors as they are then."""

    def __init__(self, module: nn.Module, function: Init, names: list[str]) -> None:
        super().__init__()
        self.module, self._function, self._names = module, function, names

    def forward(self) -> dict[str, torch.Tensor]:
        self._function(self.module)
        there = dict(_tensors(self.module))
        return {name: there[name] for name in self._names}


def _run(prefix: str, module: nn.Module, function: Init, wanted: set[str], done: set[int], deep: bool = False) -> None:
    """Let a function give a module's tensors values, while they are whole; this rank keeps its part of them. What two
    modules share is the first one's: the other's draws random numbers all the same, as its constructor does.
    """
    dot = f"{prefix}." if prefix else ""
    inside = {name: one for name, one in _tensors(module) if dot + name in wanted and (deep or "." not in name)}
    if not inside:
        return
    whole: dict[str, torch.Tensor] = {}
    for name, one in inside.items():
        if "." in name:  # made before: what is around it may use it
            whole[name] = (one.full_tensor() if carrying.is_spread(one) else one).detach().cpu().clone()
        else:
            whole[name] = _blank(one.shape, one.dtype, "cpu")
    found = torch.func.functional_call(
        _Call(module, function, list(inside)), {f"module.{name}": one for name, one in whole.items()}, ()
    )
    for name, one in inside.items():
        if "." not in name:
            if id(one) in done:
                continue
            done.add(id(one))
        _own(one).copy_(_own(carrying.like(found[name].detach().cpu(), one)))
