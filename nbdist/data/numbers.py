"""The numbers of an Accelerator's loaders: why two of them, of one length, do not come in one order."""

from __future__ import annotations

import weakref
from typing import Any


class Numbers:
    """Counts loaders in the order in which they are prepared, from 0.

    A loader that comes again has the number that it had. Loaders with a generator of their own are counted by
    themselves, for each generator: one generator in two loaders gives each its own order, as it does in torch. Nothing
    is kept alive.
    """

    def __init__(self) -> None:
        # By identity; each lasts as long as what it is of.
        self._of: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._counted: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._plain = 0

    def of(self, loader: Any, generator: Any) -> int:
        """The number of a loader of the user's.

        Args:
            generator: the loader's own, None if it has none.
        """
        known = self._of.get(id(loader))
        if known is not None:
            return known[1]
        number = self._plain if generator is None else self._counted.get(id(generator), (None, 0))[1]
        self.take(loader, generator, number)
        return number

    def take(self, loader: Any, generator: Any, number: int) -> None:
        """This loader has its number from another Accelerator and keeps it; those after it have others."""
        _remember(self._of, loader, number)
        if generator is None:
            self._plain = max(self._plain, number + 1)
        else:
            counted = self._counted.get(id(generator), (None, 0))[1]
            _remember(self._counted, generator, max(counted, number + 1))


def _remember(table: dict[int, tuple[weakref.ref[Any], int]], one: Any, number: int) -> None:
    key = id(one)
    table[key] = weakref.ref(one, lambda _: table.pop(key, None)), number
