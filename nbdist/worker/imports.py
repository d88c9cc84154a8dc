"""Something done when a library is imported, in this process, now or later; the import itself is never made for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _After(importlib.abc.Loader):
    """A module's own loader, and then what waits for the module."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for done in _waiting.pop(self._name, ()):
            done(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _After(spec.loader, fullname)
                return spec
        return None


_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
_finder = _Finder()


def when_imported(name: str, do: Callable[[ModuleType], None]) -> None:
    """Call `do(module)` as soon as this module has been imported: at once if it has been already."""
    module = sys.modules.get(name)
    if module is not None:
        do(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _waiting.setdefault(name, []).append(do)
