"""Optimizers whose parameters were replaced: a strategy that spreads a module over the ranks puts new parameters into
it, and an optimizer that was made before would step on the old ones, silently, training nothing.

A strategy takes `snapshot(module)`, replaces, and calls `replaced(module, before)`. From then on `moved(old)` gives the
new parameter, and every optimizer that is known here, or that steps, is rebound: the same object, with the same groups,
defaults, hooks and schedulers. What belongs to a parameter goes along: the optimizer's state, `.grad`, attributes, and
hooks where torch calls them. Nothing here keeps an old parameter or a new one alive.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from nbdist.state import replaced_hooks
from nbdist.strategies import carrying
from nbdist.strategies.refusing import nested, refuse

Parameters = dict[str, torch.nn.Parameter]


class _Place:
    """Where a parameter stands: all that have stood there share it. `now` is the one that does."""

    __slots__ = ("now",)

    def __init__(self, now: torch.Tensor) -> None:
        self.now = TensorWeakRef(now)


_places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_replacements = [0]  # how often anything was replaced
# The optimizers to rebind; how often anything was replaced, and how many groups they had, when they last were.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def moved(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter that has taken this one's place; None where it stands there itself, or the new one is gone."""
    place = _places.get(parameter)
    now = None if place is None else place.now()
    return None if now is parameter else now


def snapshot(module: torch.nn.Module, shards: int = 1) -> Parameters:
    """The module's parameters by name, as `replaced` wants them: before they are replaced.

    Args:
        module: whose parameters will be.
        shards: over how many ranks each will be split.

    Raises:
        ValueError: one of them was replaced in another module that shares it; or an optimizer that is known trains some
            of them and cannot be rebound. Nothing was changed.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if moved(parameter) is not None:
            raise ValueError(
                f"{name} of this {type(module).__name__} is shared with a module that was prepared before, whose "
                "parameters are spread over the ranks already, and it would be trained apart from it. Put both into "
                "one module and prepare that"
            )
    mine = {id(parameter) for parameter in before.values()}
    for optimizer in list(_known):
        if any(id(parameter) in mine for parameter in trained_by(optimizer)):
            _admit(optimizer, shards)
    return before


def replaced(module: torch.nn.Module, before: Parameters) -> None:
    """The parameters of this module have been replaced: carry over what belongs to them, and rebind every optimizer
    that is known. A collective where parameters had gradients.

    Args:
        before: what `snapshot` gave. It is emptied: the old parameters go as soon as nobody else holds them.
    """
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    done: set[int] = set()
    after = dict(module.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        new = after.get(name)
        if new is None or new is old or id(old) in done:
            continue
        done.add(id(old))
        pairs.append((name, old, new))
        place = _places.get(old)
        if place is None:
            place = _places[old] = _Place(new)
        place.now = TensorWeakRef(new)
        _places[new] = place
    before.clear()
    if not pairs:
        return
    _replacements[0] += 1
    carrying.belongings(pairs)
    for hook in replaced_hooks:
        hook(module, [(old, new) for _, old, new in pairs])
    pairs.clear()
    for optimizer in list(_known):
        if any(moved(parameter) is not None for parameter in trained_by(optimizer)):
            rebind(optimizer)
    _watch_steps()


def expect(optimizer: torch.optim.Optimizer) -> None:
    """From now on this one is rebound when a module was replaced, and refused before."""
    _known.setdefault(optimizer, (-1, 0))


def rebind(optimizer: torch.optim.Optimizer) -> bool:
    """Make an optimizer train the parameters that stand where its own stood, in place; it is known from now on.

    Returns:
        Whether there was anything to do.

    Raises:
        ValueError: it cannot be, or cannot train parameters that are spread over the ranks. It is as it was.
    """
    optimizers = list(nested(optimizer))
    moves = {id(old): (old, new) for one in optimizers for old in _held_by(one) if (new := moved(old)) is not None}
    if moves or any(carrying.is_spread(parameter) for parameter in trained_by(optimizer)):
        _admit(optimizer, moves=bool(moves))
    for one in optimizers if moves else ():
        _rebind(one, moves)
    _known[optimizer] = (_replacements[0], len(optimizer.param_groups))
    return bool(moves)


def _admit(optimizer: torch.optim.Optimizer, shards: int = 1, moves: bool = True) -> None:
    try:
        refuse(optimizer, shards, moves)
    except ValueError:
        _known.pop(optimizer, None)  # the user takes another one, and this one may live on in the traceback
        raise


def _rebind(optimizer: torch.optim.Optimizer, moves: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for group in optimizer.param_groups:
        _exchange(group, moves)
        _one_by_one(group)
    entries, states = list(optimizer.state.items()), []
    if any(isinstance(key, torch.Tensor) and id(key) in moves for key, _ in entries):
        optimizer.state.clear()
        while entries:
            key, state = entries.pop(0)  # an old tensor goes as soon as its shard is there
            old, new = moves.get(id(key), (None, None)) if isinstance(key, torch.Tensor) else (None, None)
            if old is None or new is None:
                optimizer.state[key] = state
                continue
            for name, value in list(state.items()):
                state[name] = _spread(value, old, new)
                if replaced_hooks and state[name] is not value and isinstance(value, torch.Tensor):
                    states.append((value, state[name]))
                del value
            optimizer.state[new] = state
    for hook in replaced_hooks if states else ():
        hook(None, states)
    for name, value in list(vars(optimizer).items()):
        if name not in ("param_groups", "state"):
            _exchange(value, moves)


def _spread(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """A piece of a parameter's state, as the new parameter has it. Containers are changed in place."""
    if isinstance(value, torch.Tensor):
        return carrying.like(value, new) if value.shape == old.shape and value.dim() else value
    if isinstance(value, list):
        value[:] = [_spread(item, old, new) for item in value]
    elif type(value) is tuple:
        return tuple(_spread(item, old, new) for item in value)
    elif isinstance(value, dict):
        for key in list(value):
            value[key] = _spread(value[key], old, new)
    return value


def _exchange(value: Any, moves: Mapping[int, tuple[torch.Tensor, torch.Tensor]], depth: int = 4) -> None:
    """New parameters for old ones in an optimizer's own lists, dicts and sets of them, in place."""

    def of(item: Any) -> Any:
        return moves[id(item)][1] if isinstance(item, torch.Tensor) and id(item) in moves else item

    if depth == 0 or isinstance(value, str | bytes | torch.Tensor):
        return
    if isinstance(value, list | deque):
        for at, item in enumerate(value):
            if of(item) is not item:
                value[at] = of(item)
            elif type(item) is tuple and any(of(one) is not one for one in item):
                value[at] = tuple(map(of, item))
            else:
                _exchange(item, moves, depth - 1)
    elif isinstance(value, MutableMapping):
        entries = list(value.items())
        if any(of(one) is not one for entry in entries for one in entry):
            value.clear()
            value.update({of(key): of(item) for key, item in entries})
        for item in value.values():
            _exchange(item, moves, depth - 1)
    elif isinstance(value, set):
        items = list(value)
        if any(of(item) is not item for item in items):
            value.clear()
            value.update(map(of, items))


def _one_by_one(group: dict[str, Any]) -> None:
    """torch computes with a whole list of parameters at once only where all are spread alike."""
    if len({carrying.spread_over(parameter) for parameter in group["params"]}) > 1:
        group.update({name: False for name in ("foreach", "fused") if name in group})


def trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from trained_by(optimizer)
    yield from (key for key in optimizer.state if isinstance(key, torch.Tensor))


@functools.cache
def _watch_steps() -> None:
    """From now on an optimizer that nobody has prepared is rebound at its first step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_at_a_step)


def _at_a_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _known.get(optimizer) != (_replacements[0], len(optimizer.param_groups)):
        rebind(optimizer)
