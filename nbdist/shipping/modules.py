"""Modules travel by name: the rank imports them. What a name alone does not carry is here.

A package brings the submodules that the notebook has imported (`import xml.dom` binds `xml`). A module of the user's
that was edited and reloaded in the notebook is reloaded on the ranks. A module without a file is refused by name.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from types import ModuleType
from typing import Any

Stamp = tuple[str, int, int]  # path, time of change, size


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


def _installed() -> tuple[str, ...]:
    paths: set[str | None] = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    if hasattr(site, "getusersitepackages"):
        paths.add(site.getusersitepackages())
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


class UserModules:
    """Watches the user's own modules among those that shipped values refer to."""

    def __init__(self) -> None:
        self._installed = _installed()
        self._seen: dict[str, tuple[Any, Stamp] | None] = {}  # name -> (the spec that it was loaded by, the stamp then)

    def note(self, names: set[str]) -> None:
        """Values that are shipped refer to these modules."""
        for name in names:
            if name not in self._seen:
                self._seen[name] = self._look(name)

    def _look(self, name: str) -> tuple[Any, Stamp] | None:
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name == "__main__":
            return None
        path = os.path.realpath(path)
        if path.startswith(self._installed) or name.partition(".")[0] == "nbdist":
            return None
        try:
            status = os.stat(path)
        except OSError:
            return None
        return getattr(module, "__spec__", None), (path, status.st_mtime_ns, status.st_size)

    def stamps(self) -> dict[str, Stamp]:
        """The user's modules, each with the state of its file when the notebook loaded it."""
        found = {}
        for name, seen in self._seen.items():
            if seen is not None:
                # reload() gives a module a new spec: its file is looked at again only then, because what matters is
                # what runs here.
                if getattr(sys.modules.get(name), "__spec__", None) is not seen[0]:
                    seen = self._seen[name] = self._look(name) or seen
                found[name] = seen[1]
        return found


class LoadedModules:
    """A rank's side: reloads a module when the notebook runs another state of its file."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}

    def follow(self, stamps: dict[str, Stamp]) -> None:
        """Reload what differs. Errors are those of the import."""
        for name, stamp in stamps.items():
            before = self._stamps.get(name)
            module = sys.modules.get(name)
            if module is not None and before is not None and before != stamp:
                importlib.invalidate_caches()
                importlib.reload(module)
            self._stamps[name] = stamp
