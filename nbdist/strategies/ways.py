"""Methods of a sharded module other than forward: the parameters that they compute with are gathered for them.

torch does that for forward alone. Parts that are units themselves gather what is theirs when they are called; what
belongs to the model as a whole (embeddings, a head) is gathered from the moment on when the method calls a module of
torch's. So a method that computes nothing (`save_pretrained`) is no conversation of ranks, and one rank may call it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbdist import views
from nbdist.strategies import fsdp_repair, sharded

_MARK = "_nbdist_ways"


def open_up(model: nn.Module) -> None:
    """Give the methods of the model and of its units their way; they are put on the classes that torch has made."""
    for module in model.modules():
        cls = type(module)
        if isinstance(module, FSDPModule) and _MARK not in vars(cls):
            setattr(cls, _MARK, True)
            kind = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
            for name in views.methods(kind):
                if name != "forward" and name not in vars(cls):
                    setattr(cls, name, _way(cls, name))


def _way(cls: type, name: str) -> Any:
    @functools.wraps(getattr(cls, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(super(cls, self), name)
        if sharded.computes(self):  # in forward, or in another method, for which they are gathered already
            return call(*args, **kwargs)
        begin = _Begin(views.bare(self))
        try:
            output = call(*args, **kwargs)
        except Exception:
            if begin.begun:
                fsdp_repair.mend(begin.unit, drops=False)
            raise
        finally:
            begin.end()
        return sharded.end(begin.unit, output) if begin.begun else output

    return method


class _Begin:
    """The first call of a module in this thread begins the unit's way."""

    def __init__(self, unit: Any) -> None:
        self.unit, self.begun = unit, False
        self._thread = threading.get_ident()
        self._handle: Any = nn.modules.module.register_module_forward_pre_hook(self._at_a_module)

    def _at_a_module(self, module: nn.Module, inputs: Any) -> None:
        if self._handle is None or threading.get_ident() != self._thread:
            return
        self.end()
        if views.bare(module) is not self.unit:  # else it is its forward, which does it itself
            self.begun = True
            sharded.begin(self.unit)

    def end(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
