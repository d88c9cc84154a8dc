"""Names: of what was prepared (the user's variables), and of a model's tensors (without what wraps its parts)."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nbdist.strategies.naming import Named

KINDS = ("models", "optimizers", "schedulers", "loaders", "objects")
SINGULAR = {"models": "model", "optimizers": "optimizer", "schedulers": "scheduler", "loaders": "loader",
            "objects": "object"}  # fmt: skip


class _Entry:
    __slots__ = ("_held", "name", "scope", "what")

    def __init__(self, name: str, scope: int | None, held: Any, what: int, strong: bool) -> None:
        self.name, self.scope, self.what = name, scope, what
        self._held = (lambda: held) if strong else weakref.ref(held)

    @property
    def held(self) -> Any:
        return self._held()


class Prepared:
    """What an Accelerator has prepared, by kind and name. Objects registered for checkpointing are kept alive; nothing
    else is.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {kind: [] for kind in KINDS}
        self._doubt = False  # something came since the last look

    def note(self, kind: str, given: Any, held: Any, of: Any = None) -> None:
        """Something was prepared or registered.

        Args:
            kind: one of KINDS.
            given: the user's object, whose variable names it.
            held: what has its state.
            of: what it is known by: prepared anew, it keeps its name. Default: `held`.
        """
        entries, what = self._entries[kind], id(held if of is None else of)
        for at, entry in enumerate(entries):
            if entry.what == what and entry.held is not None:
                entries[at] = _Entry(entry.name, entry.scope, held, what, kind == "objects")
                return
        name, scope = variable_of(given)
        # A cell that runs again: its variable has another object now, and the one before is no longer meant.
        entries[:] = [
            entry
            for entry in entries
            if entry.held is not None and not (scope is not None and (entry.name, entry.scope) == (name, scope))
        ]
        self._doubt = True
        entries.append(_Entry(name or type(held).__name__, scope, held, what, kind == "objects"))

    def of(self, kind: str) -> dict[str, Any]:
        """Those that are alive, by name, in the order in which they were prepared. Two with one name: the first has
        it, the others a number behind it.
        """
        found: dict[str, Any] = {}
        for entry in self._entries[kind]:
            held = entry.held
            if held is not None:
                name, number = entry.name, 1
                while name in found:
                    name, number = f"{entry.name}_{number}", number + 1
                found[name] = held
        return found

    def all(self, surely: bool = False) -> dict[str, dict[str, Any]]:
        """`of` for each kind.

        Args:
            surely: what nobody holds any more, but for a cycle of its own, is not there. That is looked at when
                something was prepared since the last time; it takes some tenths of a second.
        """
        if self._doubt or surely:
            gc.collect()
            self._doubt = False
        return {kind: self.of(kind) for kind in KINDS}


def variable_of(value: Any) -> tuple[str | None, int | None]:
    """The variable that the user's code has this object in: its name, and a number for the namespace where it is a
    module's or the notebook's; (None, None) where it has none.

    An attribute of `self` has its own name; an item of a list or dict is "models[0]".
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("nbdist", "contextlib"):
        frame = frame.f_back
    if frame is None:
        return None, None
    local = frame.f_locals
    found = _found(local, frame.f_globals, value)
    # Before Python 3.13 a function's frame keeps the dict that was made for us, and what is in it alive. It is emptied,
    # unless the user has it too, by `locals()` (3 hold it: the frame, we, and getrefcount).
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(local) is dict and sys.getrefcount(local) <= 3:
        local.clear()
    return found


def _found(local: dict[str, Any], module: dict[str, Any], value: Any) -> tuple[str | None, int | None]:
    for look in (_directly, _inside):
        for space in (local,) if local is module else (local, module):
            name = look(space, value)
            if name is not None:
                return name, id(space) if space is module else None
    return None, None


def _directly(space: dict[str, Any], value: Any) -> str | None:
    for name, one in list(space.items()):
        if one is value and not name.startswith("_"):
            return name
    owner = space.get("self")
    if owner is not None:
        for name, one in list(getattr(owner, "__dict__", {}).items()):
            if one is value and not name.startswith("_"):
                return name
        for name, one in owner.named_children() if isinstance(owner, torch.nn.Module) else ():
            if one is value:
                return name
    return None


def _inside(space: dict[str, Any], value: Any) -> str | None:
    for name, one in list(space.items()):
        if name.startswith("_"):
            continue
        if type(one) in (list, tuple):
            for at, item in enumerate(one):
                if item is value:
                    return f"{name}[{at}]"
        elif type(one) is dict:
            for key, item in list(one.items()):
                if item is value:
                    return f"{name}[{key!r}]"
    return None


# ------------------------------------------------------------------ a model's own names

_WRAPPING = ("_orig_mod", "_checkpoint_wrapped_module")


def plain(key: str, wrappers: frozenset[str]) -> str:
    """A tensor's name without the parts that wrappers have put into it.

    Args:
        wrappers: the paths of wrapping modules whose child is called `module`.
    """
    parts: list[str] = []
    real: list[str] = []  # as the modules are reached
    for part in key.split("."):
        wrapped = part == "module" and ".".join(real) in wrappers
        real.append(part)
        if part not in _WRAPPING and not wrapped:
            parts.append(part)
    return ".".join(parts)


def wrappers_of(model: torch.nn.Module) -> frozenset[str]:
    """The paths in it of what wraps in torch's way of naming, `module`."""
    return frozenset(
        path
        for path, one in model.named_modules(remove_duplicate=False)
        if isinstance(one, DistributedDataParallel | DataParallel) and not isinstance(one, Named)  # which has no prefix
    )


def parameters_of(models: dict[str, torch.nn.Module]) -> dict[int, list[str]]:
    """For each parameter of these models, by identity, its names: "model/layer.weight"."""
    found: dict[int, list[str]] = {}
    for name, model in models.items():
        wrappers = wrappers_of(model)
        for path, parameter in model.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(f"{name}/{plain(path, wrappers)}")
    return found
