"""Which version of the user's own modules runs: that of the notebook, on every rank.

The notebook may hold an older version than the file does (edited since, or broken), and a rank imports later than it.
So the notebook remembers the state of each file when it loaded the module, and the text; a rank is told the state, and
gets the text where the file says something else by now. What the notebook reloads, the ranks reload.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

Stamp = tuple[int, int]  # time of the last change in ns, size
MOST_WATCHED = 256  # modules; beyond that only those that shipped values refer to
LARGEST_TEXT = 4 << 20  # bytes of a module's text that are remembered


@dataclass(frozen=True)
class Version:
    """A module as the notebook holds it.

    Attributes:
        text: its source, where the file no longer has it; else None.
    """

    path: str
    stamp: Stamp
    package: bool
    text: bytes | None = None


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths: set[str | None] = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    if hasattr(site, "getusersitepackages"):
        paths.add(site.getusersitepackages())
    folders = {path for path in paths if path}
    return tuple(path + os.sep for path in folders | {os.path.realpath(path) for path in folders})


def _users_file(name: str, module: Any) -> str | None:
    """The file of a module that is the user's own: neither of Python nor installed."""
    try:
        path = module.__dict__.get("__file__")
    except AttributeError:
        return None
    if not isinstance(path, str) or not path.endswith(".py") or name == "__main__":
        return None
    if path.startswith(_installed()) or f"{os.sep}site-packages{os.sep}" in path or name.partition(".")[0] == "nbdist":
        return None
    path = os.path.realpath(path)  # not for all: there are thousands
    return None if path.startswith(_installed()) else path


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


class _Looked:
    """Finds modules of the user's that were loaded since the last look."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._count = -1

    def new(self) -> list[tuple[str, ModuleType, str]]:
        if len(sys.modules) == self._count:
            return []
        self._count = len(sys.modules)
        found = []
        for name in [name for name in sys.modules if name not in self._seen]:
            module = sys.modules.get(name)
            path = _users_file(name, module)
            if path is not None and module is not None:
                found.append((name, module, path))
        self._seen = set(sys.modules)
        return found


@dataclass
class _Held:
    spec: Any
    path: str
    package: bool
    stamp: Stamp
    text: bytes | None
    told: Stamp | None = None  # an edit that the user was told of


class Follower(Protocol):
    """Reloads modules by itself when their files change (`%autoreload`)."""

    def how(self) -> str:
        """ "" when it does not; "patch" when it keeps classes and functions the objects they are, where it can; "renew"
        when it makes new ones, and has the old ones behave as these.
        """

    def reloaded(self) -> set[str]:
        """Names of those that it has reloaded since the last call."""


class NotebookModules:
    """The user's modules in this process, each with the state of its file when it was loaded.

    `look` after each cell keeps the time between an import and the look short.
    """

    def __init__(self) -> None:
        self._looked = _Looked()
        self._held: dict[str, _Held] = {}
        self._others: dict[str, tuple[ModuleType, str]] = {}  # beyond MOST_WATCHED
        self._follower: Follower | None = None

    def follow(self, follower: Follower | None) -> None:
        """This one reloads modules by itself from now on."""
        self._follower = follower
        self.look()

    @property
    def upgrade(self) -> str:
        """How objects of a reloaded module become new ones, see Follower.how."""
        return self._follower.how() if self._follower is not None else ""

    def look(self) -> None:
        """What was imported and reloaded since the last look."""
        for name, module, path in self._looked.new():
            if len(self._held) < MOST_WATCHED:
                self._take(name, module, path)
            else:
                self._others[name] = (module, path)
        for name in self._follower.reloaded() if self._follower is not None else ():
            if name in self._held:
                self._renew(self._held[name])

    def _renew(self, held: _Held) -> None:
        """It was loaded again from its file, if that can be loaded."""
        on_disk = _stamp(held.path)
        if on_disk is not None and on_disk != held.stamp and _compiles(text := _read(held.path), held.path):
            held.stamp, held.text = on_disk, text

    def _take(self, name: str, module: ModuleType, path: str) -> None:
        stamp = _stamp(path)
        if stamp is not None:
            self._held[name] = _Held(_spec(name), path, hasattr(module, "__path__"), stamp, _read(path))

    def versions(self, needed: Iterable[str]) -> dict[str, Version]:
        """What the notebook holds, in the order in which it was loaded.

        Args:
            needed: modules that shipped values refer to.
        """
        self.look()
        for name in needed:
            if name in self._others:
                self._take(name, *self._others.pop(name))
        found = {}
        for name, held in self._held.items():
            if name not in sys.modules:
                continue
            if _spec(name) is not held.spec:  # reload() gives a module a new one
                held.spec = _spec(name)
                self._renew(held)
            same = _stamp(held.path) == held.stamp
            found[name] = Version(held.path, held.stamp, held.package, None if same else held.text)
        return found

    def edited(self) -> list[str]:
        """Notes on files that were changed after the notebook had loaded them: once for each change."""
        names = []
        for name, held in self._held.items():
            on_disk = _stamp(held.path)
            if name in sys.modules and on_disk is not None and on_disk not in (held.stamp, held.told):
                held.told = on_disk
                names.append(name)
        if not names:
            return []
        one = len(names) == 1
        return [
            f"{', '.join(names)} {'was' if one else 'were'} edited after the notebook had imported "
            f"{'it' if one else 'them'}: the ranks hold the older version, as the notebook does. "
            f"`importlib.reload({names[0]})` in the notebook brings the new one to both, and "
            "`%load_ext autoreload` with `%autoreload 2` does from now on"
        ]


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_TEXT + 1)
    except OSError:
        return None
    return text if len(text) <= LARGEST_TEXT else None


def _compiles(text: bytes | None, path: str) -> bool:
    """A reload that could not even be compiled has left the module as it was."""
    if text is None:
        return True
    try:
        compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


@lru_cache(maxsize=1)
def notebook_modules() -> NotebookModules:
    """Of this process."""
    return NotebookModules()


class _TextLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from the text that the notebook has loaded, whatever its file says now."""

    def __init__(self, name: str, version: Version) -> None:
        super().__init__(name, version.path)
        assert version.text is not None
        self._text = version.text
        lines = version.text.decode("utf-8", "replace").splitlines(True)
        linecache.cache[version.path] = (len(version.text), None, lines, version.path)

    def get_data(self, path: str) -> bytes:
        return self._text if os.path.realpath(path) == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Any:
        raise OSError("not from the file: no bytecode is read or written")


class RankModules(importlib.abc.MetaPathFinder):
    """A rank's side: imports the notebook's versions, and reloads a module when the notebook has.

    Attributes:
        upgrade: reloads a module (and gets its text from before, where the file has the new one) so that objects of
            its old classes and functions become new ones, as `%autoreload` does in the notebook; by default they stay
            old, as after importlib.reload.
    """

    upgrade: Callable[[ModuleType, str | None], Any] = staticmethod(lambda module, before: importlib.reload(module))

    def __init__(self) -> None:
        self._told: dict[str, Version] = {}
        self._loaded: dict[str, tuple[Stamp, bytes | None]] = {}
        self._looked = _Looked()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        version = self._told.get(fullname)
        if version is None or version.text is None:
            return None
        folders = [os.path.dirname(version.path)] if version.package else None
        loader = _TextLoader(fullname, version)
        return importlib.util.spec_from_file_location(
            fullname, version.path, loader=loader, submodule_search_locations=folders
        )

    def look(self) -> None:
        """Remember the versions of what was imported meanwhile."""
        for name, _, path in self._looked.new():
            told = self._told.get(name)
            if told is not None and told.text is not None:
                self._loaded[name] = told.stamp, told.text
            elif (stamp := _stamp(path)) is not None:
                self._loaded[name] = stamp, _read(path)

    def follow(self, versions: dict[str, Version], how: str) -> list[str]:
        """The notebook holds these now. Returns a line for each module that could not be reloaded here; its version
        from before stays in use, and it is not tried again before the notebook has another one.

        Args:
            how: how the notebook's own objects became new ones, see Follower.how.
        """
        if not versions:
            return []
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._told.update(versions)
        importlib.invalidate_caches()
        troubles = []
        for name in versions:  # in the order in which they were loaded: what others import from comes first
            version, module = versions[name], sys.modules.get(name)
            loaded, text = self._loaded.get(name, (version.stamp, None))
            if module is None or loaded == version.stamp:
                continue
            linecache.cache.pop(version.path, None)
            before = dict(module.__dict__)
            try:
                if how:
                    old = text if how == "patch" and version.text is None else None
                    self.upgrade(module, old.decode("utf-8", "replace") if old is not None else None)
                else:
                    importlib.reload(module)
            except Exception as error:
                module.__dict__.update(before)
                troubles.append(
                    f"{name} was not reloaded: {type(error).__name__}: {error}{_at(error, version.path)}; "
                    "the version from before stays in use"
                )
            else:
                text = version.text if version.text is not None else _read(version.path)
            self._loaded[name] = version.stamp, text
        return troubles


def _at(error: BaseException, path: str) -> str:
    """The line of the module at which it failed."""
    line, frames = None, error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == path:
            line = frames.tb_lineno
        frames = frames.tb_next
    return "" if line is None else f" ({os.path.basename(path)}, line {line})"
