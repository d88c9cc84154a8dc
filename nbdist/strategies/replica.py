"""DistributedDataParallel with what its module has besides forward: attributes, methods, `len(m)`, `m[0]`, and names
of parameters and state without a prefix (strategies/naming.py).

A method that computes with gradients goes the way that DDP's own forward goes: buffers are made equal and unused
parameters are looked for behind it. That way is a conversation of all ranks, and many methods are called on one alone
(`if accelerator.is_main_process: model.save_pretrained(...)`). So it is gone from the moment on when the method calls a
module of torch's, and never without gradients.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.strategies.naming import Named
from nbdist.strategies.watch import WATCH

# What Python looks for on the class alone.
_SPECIAL = (
    "__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__", "__enter__",
    "__exit__",
)  # fmt: skip
_PATH = ("_pre_forward", "_post_forward")
_BEHIND = getattr(DistributedDataParallel, "_check_sync_bufs_post_fwd", None)
_COMPILED = "_nbdist_compiled_inside"  # some of its modules had a compiled call when it was made
_OPEN = "_nbdist_open"  # the wrapper is made: what it does not have is the module's


class Replica(Named, DistributedDataParallel):
    """What `prepare` makes of a module under DDP. Names that DDP has itself are DDP's; `module` is the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "module":  # also while it is being made: then there is no module yet
                raise
        module = getattr(self.module, "_orig_mod", self.module)  # torch.compile's own names are none of the user's
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module and not _runs_later(value):
            return _through(self, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if type(value) is bool and name in own:
            own[name] = value  # what DDP notes at each step; nn.Module would look at what it is, ten times as long
        elif _OPEN in own and not name.startswith("_") and not _has(self, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        own = self.__dict__
        return bool(own.get("modules_buffers", True) and _as_torch_does(own) and super()._check_sync_bufs_pre_fwd())

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Buffers become rank 0's behind a forward that shares gradients, and not before the next one of any kind: so
        they are equal when it is over, and evaluation, which may be one rank's alone, exchanges nothing.
        """
        own = self.__dict__
        if not own.get("modules_buffers", True):
            return False
        if _as_torch_does(own):
            return bool(super()._check_sync_bufs_post_fwd())
        if not (own["require_backward_grad_sync"] and torch.is_grad_enabled()):
            return False
        return bool(own.get("forward_sync_buffers", own.get("broadcast_buffers")))

    def __bool__(self) -> bool:
        return True  # torch asks `if ddp_module:`, and a module's own __len__ is not meant

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _unmade, (), *state  # the object's own class is not found by its name; pickle insists on that one

    def __setstate__(self, state: dict[str, Any]) -> None:
        # While it is made again, what is set is DDP's and not the module's.
        super().__setstate__({name: value for name, value in state.items() if name not in (_OPEN, WATCH)})
        _open(self, self.module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.module) if not name.startswith("_"))})


def _unmade() -> Replica:
    return Replica.__new__(Replica)


# What is printed, and what libraries look for; by which it is found (pickle) is __qualname__.
Replica.__name__ = DistributedDataParallel.__name__


def class_for(module: torch.nn.Module, base: type = Replica) -> type[Any]:
    """The class of wrappers for this module: with those special methods that its class has."""
    kind = type(getattr(module, "_orig_mod", module))  # what torch.compile has made has them all, for better or worse
    theirs = [name for name in _SPECIAL if hasattr(kind, name)]
    if not theirs:
        return base
    known: type[Any]
    for known in type.__subclasses__(base):
        if vars(known).get("_nbdist_special") == theirs:
            return known
    body: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_nbdist_special": theirs}
    return type(base.__name__, (base,), body | {name: _special(name) for name in theirs})


def open_up(wrapped: DistributedDataParallel, module: torch.nn.Module) -> None:
    """Give a wrapper, also one that the user has made, what this module has. It is the wrapped one or a view of it."""
    _open(wrapped, module)
    hidden = sorted(name for name in _own_names(module) if _has(wrapped, name) and not _same(wrapped, module, name))
    if hidden:
        warnings.warn(
            f"{type(module).__name__} has {', '.join(hidden)}, and so has DistributedDataParallel around it, whose "
            f"meaning wins: write model.module.{hidden[0]} for the module's own",
            stacklevel=5,
        )


def _open(wrapped: DistributedDataParallel, module: torch.nn.Module) -> None:
    if type(wrapped) is DistributedDataParallel or isinstance(wrapped, Replica):
        wrapped.__class__ = class_for(module)
    wrapped.module = module
    vars(wrapped)["module"] = module  # found at once: DDP's forward asks for it, and __getattr__ comes last
    vars(wrapped)[_OPEN] = True
    vars(wrapped)[_COMPILED] = any(getattr(one, "_compiled_call_impl", None) is not None for one in module.modules())


def _own_names(module: torch.nn.Module) -> set[str]:
    """The public names that the user's class and object add to nn.Module's."""
    bases = (base for base in type(module).__mro__ if base not in torch.nn.Module.__mro__)
    names = {*vars(module), *_parts(module), *(name for base in bases for name in vars(base))}
    return {name for name in names if not name.startswith("_") and not hasattr(torch.nn.Module, name)} - {"training"}


def _has(wrapped: torch.nn.Module, name: str) -> bool:
    """Is this name DDP's own?"""
    return name in vars(wrapped) or name == "module" or hasattr(type(wrapped), name)


def _parts(module: torch.nn.Module) -> set[str]:
    named = (module.named_children(), module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {name for parts in named for name, _ in parts}


def _same(wrapped: Any, module: Any, name: str) -> bool:
    one, other = getattr(wrapped, name, None), getattr(module, name, None)
    return one is other or (isinstance(one, int | str | torch.device) and one == other) or name == "forward"


def _runs_later(method: MethodType) -> bool:
    return inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)


def _special(name: str) -> Any:
    def special(self: Replica, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    special.__name__ = name
    return special


def _through(wrapped: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """This method of the module, gone DDP's way when it computes with gradients that are to be shared."""

    @functools.wraps(method)
    def through(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and wrapped.require_backward_grad_sync) or not _can_go():
            return method(*args, **kwargs)
        begin = _Begin(wrapped)
        if vars(wrapped).get(_COMPILED, False):
            begin()  # the first call of a module may be inside compiled code, where no hook of ours runs
        else:
            begin.handle = torch.nn.modules.module.register_module_forward_pre_hook(begin.at_a_module)
        try:
            output = method(*args, **kwargs)
        finally:
            begin.end()
        return wrapped._post_forward(output) if begin.begun else output

    return through


class _Begin:
    """The first call of a module in this thread begins DDP's way."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped, self.begun, self.handle = wrapped, False, None
        self._thread = threading.get_ident()

    def at_a_module(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() == self._thread and not self.begun and torch.is_grad_enabled():
            self.end()
            self()

    def __call__(self) -> None:
        self.begun = True
        self.wrapped._pre_forward()

    def end(self) -> None:
        handle: Any = self.handle
        if handle is not None:
            self.handle = None
            handle.remove()


def _as_torch_does(own: dict[str, Any]) -> bool:
    """Whether buffers go torch's way: by the user's hook, which a wrapper may have given to its module, or in a torch
    that asks for none behind forward. Asked twice in each forward, so not by `hasattr`.
    """
    return _BEHIND is None or "buffer_hook" in own or "buffer_hook" in own["module"].__dict__


def _can_go() -> bool:
    """Has this torch the two halves of DDP's forward? Without them gradients are averaged all the same, by arming."""
    return all(hasattr(DistributedDataParallel, name) for name in _PATH)
