"""A wrapper's parameters, buffers and state are named as its module names them: what one process has saved loads under
DDP, and the other way; an optimizer's groups by name, or an average kept by name, are the same on any number of ranks.

torch.distributed.checkpoint takes DDP's prefix `module.` off by itself, so it gets it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

_PREFIX = "module."
_TORCH = "torch.nn.modules.module"
_EXPECTS_PREFIX = "torch.distributed.checkpoint.state_dict"


class Named(torch.nn.Module):
    """What stands in front of DDP's own `state_dict` and the like. State dicts load with and without the prefix."""

    module: torch.nn.Module

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """As torch's; the wrapper and its module have one name, the wrapper first."""
        if _prefixed():
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        if not _prefixed():
            ours = (prefix or "".join(args[1:2])) + _PREFIX
            _rename(state, ours, ours.removesuffix(_PREFIX))
            metadata = getattr(state, "_metadata", None)
            if metadata is not None:  # what loads it looks under either name
                names = [name for name in metadata if f"{name}.".startswith(ours)]
                metadata.update(
                    ((ours.removesuffix(_PREFIX) + f"{name}."[len(ours) :])[:-1], metadata[name]) for name in names
                )
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None and _PREFIX[:-1] not in metadata:
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = metadata | {f"{_PREFIX}{name}".rstrip("."): one for name, one in metadata.items()}
        handle = self.register_load_state_dict_post_hook(_tell_plain_names)
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        finally:
            handle.remove()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        own |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        keys = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        plain = sum(key in own for key in keys)
        wrapped = sum(key.startswith(_PREFIX) and key[len(_PREFIX) :] in own for key in keys)
        if plain >= wrapped and not (plain == 0 and all(key.startswith(_PREFIX) for key in keys)):
            _rename(state_dict, prefix, prefix + _PREFIX)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Give the keys that begin with `old` another beginning, in place and in their order."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key[len(old) :]] = state.pop(key)


def _tell_plain_names(wrapped: torch.nn.Module, found: Any) -> None:
    for keys in (found.missing_keys, found.unexpected_keys):
        keys[:] = [key.removeprefix(_PREFIX) for key in keys]


def _prefixed() -> bool:
    """Whether the one who asks, by torch's own ways through modules, expects DDP's names."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, _TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _EXPECTS_PREFIX
