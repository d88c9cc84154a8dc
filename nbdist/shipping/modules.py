"""Modules travel by name: the rank imports them. What a name alone does not carry is here.

A package brings the submodules that the notebook has imported (`import xml.dom` binds `xml`). A module without a file
is refused by name. Which version of a module is loaded: see versions.py.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def importable(name: str) -> bool:
    """Can another process import the module of this name, as far as one can see from here?"""
    top = sys.modules.get(name.partition(".")[0])
    if top is None or name == "__main__":
        return True
    return getattr(top, "__spec__", None) is not None or getattr(top, "__file__", None) is not None


def submodules(module: ModuleType) -> tuple[str, ...]:
    """The public submodules of a package that are imported here, full names."""
    if not hasattr(module, "__path__"):
        return ()
    prefix = module.__name__ + "."
    return tuple(name for name in list(sys.modules) if name.startswith(prefix) and "._" not in name)


def _expect(module: ModuleType, names: tuple[str, ...]) -> None:
    """A package of a rank imports a submodule when it is first looked at, if the notebook has it imported.

    By a module-level `__getattr__` (PEP 562): the module stays what it is, its class included.
    """
    if not names or not isinstance(module, ModuleType):
        return
    own = module.__dict__
    if (pending := own.get("_nbdist_pending")) is not None:
        pending.update(names)
        return
    pending = own["_nbdist_pending"] = set(names)
    asked_before = own.get("__getattr__")

    def look(name: str) -> Any:
        full = f"{module.__name__}.{name}"
        if full in pending:
            found = importlib.import_module(full)
            _expect(found, tuple(other for other in pending if other.startswith(full + ".")))
            return found
        if asked_before is not None:
            return asked_before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    own["__getattr__"] = look


def find_module(name: str, children: tuple[str, ...]) -> ModuleType:
    """On a rank: import a module, and be ready to import the submodules that the notebook has."""
    module = importlib.import_module(name)
    _expect(module, tuple(child for child in children if child not in sys.modules))
    return module
