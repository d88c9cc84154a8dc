"""Names that a rank gives to a cell unless the notebook defines them."""

from __future__ import annotations

from typing import Any

INJECTED = frozenset({"rank", "local_rank", "world_size", "device", "ranks"})


class RunningRanks(tuple[int, ...]):
    """`ranks` in a cell on the ranks: the tuple of those that run it. Where it travels it is a plain tuple."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise TypeError(
                f"ranks[{key!r}]: inside a cell on the ranks `ranks` is the tuple of those that run it, {tuple(self)}; "
                f"here {key} is this rank's own value. Read every rank's with ranks[{key!r}] in an ordinary cell "
                "(after %distributed off, where that is on)"
            )
        return super().__getitem__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
