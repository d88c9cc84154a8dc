"""`ranks`: every rank's own values, seen from the notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nbdist.launchers.errors import NotOnTheRanks
from nbdist.launchers.launch import Values
from nbdist.launchers.pool import Pool
from nbdist.magics.errors import raise_plain


class OneRank:
    """`ranks[3]`: the names of one rank, `ranks[3]["loss"]`."""

    def __init__(self, pool: Pool, rank: int) -> None:
        self._pool, self._rank = pool, rank

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise TypeError(f"ranks[{self._rank}][{name!r}]: takes a name, like ranks[{self._rank}]['loss']")
        try:
            return self._pool.peek(name, [self._rank])[0]
        except (NotOnTheRanks, NameError) as error:
            raise_plain(error)
        except KeyboardInterrupt:
            raise_plain(KeyboardInterrupt(f"stopped while {name!r} was read from the ranks: nothing has changed"))

    def __repr__(self) -> str:
        pid = self._pool.pids[self._rank]
        return f"<rank {self._rank} of {self._pool.size}, pid {pid}: ranks[{self._rank}]['name'] reads a name>"


class Ranks:
    """The ranks that ran the last cell. `ranks["loss"]` is the value of `loss` on each, `ranks[3]["loss"]` on one.

    The values are copies; what does not travel stands as a RankedValue.
    """

    def __init__(self, pool: Callable[[], Pool | None]) -> None:
        self._last_pool = pool

    def _pool(self) -> Pool:
        pool = self._last_pool()
        if pool is None or not pool.alive:
            raise NotOnTheRanks("there are no ranks: a %%distributed cell starts them")
        return pool

    def __getitem__(self, key: str | int) -> Any:
        try:
            return self._get(key)
        except (NotOnTheRanks, NameError) as error:
            raise_plain(error)
        except KeyboardInterrupt:
            raise_plain(KeyboardInterrupt(f"stopped while {key!r} was read from the ranks: nothing has changed"))

    def _get(self, key: str | int) -> Any:
        pool = self._pool()
        if isinstance(key, str):
            return Values(pool.peek(key, range(pool.size)))
        if isinstance(key, int):
            if not -pool.size <= key < pool.size:
                raise IndexError(f"ranks[{key}]: these are ranks 0 to {pool.size - 1}")
            return OneRank(pool, key % pool.size)
        raise TypeError(f"ranks[{key!r}]: takes a name (every rank's value) or a rank's number")

    def __len__(self) -> int:
        return self._pool().size

    def __iter__(self) -> Iterator[OneRank]:
        pool = self._pool()
        return iter([OneRank(pool, rank) for rank in range(pool.size)])

    def __repr__(self) -> str:
        pool = self._last_pool()
        if pool is None or not pool.alive:
            return "<no ranks: a %%distributed cell starts them>"
        return f"<{pool.options}: ranks['name'] reads a name on each, ranks[0]['name'] on one>"
