"""Tokens that a rank gives out by itself, for what its run made, until the notebook says which of them hold."""

from __future__ import annotations

from collections.abc import Iterable

from nbdist.shipping.plain import BULK
from nbdist.shipping.table import Table, Token
from nbdist.shipping.walk import Walked


class Provisional:
    """The tokens of the last run, by group.

    An object gets the token that the lead rank's object has in the same place. Where the structure of a group turns
    out to be another one there, its tokens do not hold.

    Attributes:
        cell: the run's.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._tokens: dict[str, list[Token]] = {}
        self.cell: int | None = None

    @property
    def groups(self) -> list[str]:
        return list(self._tokens)

    def begin(self, cell: int | None) -> None:
        """None given out yet after this run."""
        self._tokens, self.cell = {}, cell

    def give(self, walked: Walked, cell: int) -> None:
        """To all that was met and has none."""
        table = self._table
        if self.cell != cell:  # else it was interrupted, and what it gave is told
            self.begin(cell)
        for key, (group, position) in walked.places.items():
            if key not in table.tokens:
                token = (cell, group, position)
                table.put(token, walked.nodes[key].value)
                if walked.nodes[key].kind is BULK:
                    table.walker.bulk.add(token)
                self._tokens.setdefault(group, []).append(token)

    def settle(self, cell: int | None, rejected: Iterable[str]) -> None:
        """The notebook has taken in the return of this run, and these groups do not hold; none does of another run."""
        lost = rejected if cell == self.cell else self.groups
        for group in lost:
            for token in self._tokens.get(group, ()):
                self._table.drop(token)
        self.begin(cell)
