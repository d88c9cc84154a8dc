"""Which names a run on a rank binds anew and which it deletes, by comparing the namespace with what it was before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbdist.shipping.kinds import MISSING
from nbdist.shipping.names import RESERVED

PLACEHOLDER = object()  # bound to a name that the cell deletes and this rank does not have


class Bindings:
    """The names of one rank's run, and of the next.

    Attributes:
        deletes: names that the run deletes; to be set before it begins.
        reads: names that it can see.
        before: the namespace as it found it.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.deletes: list[str] = []
        self.reads: list[str] = []
        self.before: dict[str, Any] = {}
        self._stores: frozenset[str] = frozenset()
        self._hidden: dict[str, Any] = {}
        self._ended: tuple[list[str], list[str]] | None = None

    def begin(self, stores: Iterable[str], reads: Iterable[str]) -> None:
        """A run is about to begin. Names that it binds and does not read are taken out of the namespace."""
        self._ended = None
        self.reads = sorted(set(reads))
        self._stores = frozenset(stores)
        kept = set(self.reads)
        self._hidden = {name: self.namespace.pop(name) for name in self._stores - kept if name in self.namespace}
        # `del x` needs something to delete, and must be seen afterwards.
        for name in self.deletes:
            self.namespace.setdefault(name, PLACEHOLDER)
        self.before = dict(self.namespace)

    def ended(self) -> tuple[list[str], list[str]]:
        """The names that the run has (bound anew, deleted); what was hidden from it is put back.

        The same each time, until `close` or the next run.
        """
        if self._ended is None:
            self._ended = self._compare()
        return self._ended

    def _compare(self) -> tuple[list[str], list[str]]:
        namespace, before = self.namespace, self.before
        for name in [name for name in self.deletes if namespace.get(name) is PLACEHOLDER]:
            del namespace[name]
            del before[name]
        assigned = sorted(
            name for name, value in namespace.items() if before.get(name, MISSING) is not value and name not in RESERVED
        )
        deleted = [name for name in before if name not in namespace]
        for name, value in self._hidden.items():
            if name not in deleted:
                namespace.setdefault(name, value)
        return assigned, deleted

    def replaced(self, hide: frozenset[str]) -> list[Any]:
        """What the run read and has bound anew, or deleted: it may have been changed before."""
        namespace, before = self.namespace, self.before
        return [
            before[name]
            for name in self.reads
            if name in before and name not in hide and namespace.get(name, MISSING) is not before[name]
        ]

    def present(self, assigned: Iterable[str]) -> set[str]:
        """Of the names that the run had to do with, those that are here."""
        return {name for name in (*assigned, *self.reads, *self._stores) if name in self.namespace}

    def close(self) -> None:
        """What the run has bound is packed: keep nothing alive."""
        self.before, self._hidden, self.deletes, self._ended = {}, {}, [], None
