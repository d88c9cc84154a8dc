"""A registry of named things that others may extend by an entry point: strategies, launchers, trackers.

Usage::

    STRATEGIES = Registry("strategy", group="nbdist.strategies", builtin={"ddp": "nbdist.strategies.ddp:DDP"})
    STRATEGIES.get("ddp")           # imports the module now, and not before
    STRATEGIES.get("dpp")           # UnknownName: the names there are, the closest one, and why others are unavailable
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

STRATEGY_GROUP = "nbdist.strategies"  # where other packages have strategies


class UnknownName(LookupError):
    """A name that no registry entry has, or whose entry cannot be loaded here. The message lists what can be used."""


class Registry:
    """Names and where they live, `module:attribute`; the module is imported when the name is asked for.

    Args:
        kind: what the entries are, in the singular, for messages ("strategy").
        group: the entry-point group through which other packages add entries ("nbdist.strategies").
        builtin: the entries of this package, by name.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._places: dict[str, str | EntryPoint] = dict(builtin)
        self._loaded: dict[str, Any] = {}
        self._looked = False

    def register(self, name: str, value: Any) -> None:
        """Add or replace an entry from code, as a notebook user would."""
        self._loaded[name] = value

    def names(self) -> list[str]:
        if not self._looked:
            self._looked = True
            for point in entry_points(group=self.group):
                self._places.setdefault(point.name, point)
        return sorted({*self._places, *self._loaded})

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def get(self, name: str) -> Any:
        """The entry of this name.

        Raises:
            UnknownName: no such entry, or its module cannot be imported; the message says which.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name not in self.names():
            close = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise UnknownName(f"no {self.kind} is called {name!r}{hint} There are: {', '.join(self.names())}.")
        place = self._places[name]
        try:
            if isinstance(place, EntryPoint):
                value = place.load()
            else:
                module, _, attribute = place.partition(":")
                value = getattr(import_module(module), attribute)
        except ImportError as error:
            raise UnknownName(f"the {self.kind} {name!r} is not available here: {error}") from error
        self._loaded[name] = value
        return value
