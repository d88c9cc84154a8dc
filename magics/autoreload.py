"""IPython's `%autoreload` in the notebook, and the same reloading on a rank.

Its bookkeeping is private; where it is not as expected, a module counts as reloaded when it got a new spec, and a rank
reloads as importlib does.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Autoreload:
    """What the extension does in this shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._seen: dict[str, float] = {}

    def _reloader(self) -> Any:
        magics = getattr(self._shell.magics_manager, "registry", {}).get("AutoreloadMagics")
        return getattr(magics, "_reloader", None)

    def how(self) -> str:
        """ "" when it is off, "patch" when it patches modules where it can, "renew" when it does not."""
        reloader = self._reloader()
        if not getattr(reloader, "enabled", False):
            return ""
        return "renew" if getattr(reloader, "autoload_obj", False) else "patch"

    def reloaded(self) -> set[str]:
        """Modules that it has brought to the state of their file since the last look.

        It may patch a module without giving it a new spec. A time that it notes for the first time is no reload.
        """
        reloader = self._reloader()
        times, failed = getattr(reloader, "modules_mtimes", None), getattr(reloader, "failed", {})
        if not times or times == self._seen:
            return set()
        found = {
            name for name, time in times.items() if self._seen.get(name, time) != time and time not in failed.values()
        }
        self._seen = dict(times)
        return found


_old_objects: dict[Any, Any] = {}  # of a rank: what is to be upgraded


def reload_as_autoreload(module: ModuleType, before: str | None) -> None:
    """On a rank: reload so that classes, functions and instances from before become new ones.

    Args:
        before: the text that is loaded, where the file has the new one: enough for patching what differs.
    """
    try:
        from IPython.extensions.autoreload import superreload
    except ImportError:
        importlib.reload(module)
        return
    if before is None or not _patched(module, before):
        superreload(module, importlib.reload, _old_objects)


def _patched(module: ModuleType, before: str) -> bool:
    """What newer IPythons try first: it keeps classes the objects they are."""
    try:
        from IPython.extensions.deduperreload.deduperreload import DeduperReloader

        reloader = DeduperReloader()
        reloader.source_by_modname[module.__name__] = before
        return bool(reloader.maybe_reload_module(module))
    except (ImportError, AttributeError):
        return False
