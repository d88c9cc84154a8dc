"""RankedValue: a name in the notebook for something that stays on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from nbdist.shipping.errors import in_words


class RankedValue:
    """What stands in the notebook for a value that stays on the ranks.

    A cell that reads it gets the ranks' own object. Reading an attribute fetches that attribute when it is plain
    data. The rest (calls, iteration, ...) needs a cell.
    """

    __slots__ = ("__weakref__", "_nbdist_")

    def __init__(
        self,
        name: str,
        type_name: str,
        *,
        key: str = "",
        path: tuple[str, ...] = (),
        ranks: str = "",
        size: int | None = None,
        reason: str = "",
        fetch: Callable[[RankedValue, tuple[str, ...]], Any] | None = None,
        pool: object = None,
    ) -> None:
        facts = _Facts(name, type_name, key or name, path, ranks, size, reason, fetch, pool)
        object.__setattr__(self, "_nbdist_", facts)

    def __repr__(self) -> str:
        facts = self._nbdist_
        where = f" on {facts.ranks}" if facts.ranks else " on the ranks"
        size = f", {in_words(facts.size)}" if facts.size is not None else ""
        reason = facts.reason
        if facts.dead:
            where, size, reason = "", "", "gone: its ranks were replaced"
        return f"<RankedValue {facts.label}: {facts.type_name}{where}{size}{': ' if reason else ''}{reason}>"

    def __getattr__(self, name: str) -> Any:
        # IPython, copy and pickle ask every object for private names; those must not travel.
        if name.startswith("_"):
            raise AttributeError(name)
        facts = self._nbdist_
        if facts.dead:
            raise AttributeError(f"{facts.label} is gone: its ranks were replaced")
        if facts.fetch is None:
            raise AttributeError(f"{facts.label} stays on the ranks; read {facts.label}.{name} in a %%distributed cell")
        return facts.fetch(self, (*facts.path, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def __delattr__(self, name: str) -> None:
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        facts = self._nbdist_
        if facts.dead:
            raise TypeError(f"{facts.label} is gone: its ranks were replaced")
        raise TypeError(
            f"{facts.label} ({facts.type_name}) stays on the ranks: use a %%distributed cell"
            + (f" [{facts.reason}]" if facts.reason else "")
        )

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    __enter__ = __exit__ = __bool__ = __int__ = __float__ = __index__ = __await__ = __reversed__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __iadd__ = __isub__ = _refuse
    __reduce_ex__ = __reduce__ = __copy__ = __deepcopy__ = _refuse  # only a pool's own message can carry it


class _Facts:
    """What a handle knows; kept apart so that attribute reads of the handle are the ranks' attributes."""

    __slots__ = ("dead", "fetch", "key", "name", "path", "pool", "ranks", "reason", "size", "type_name")

    def __init__(
        self,
        name: str,
        type_name: str,
        key: str,
        path: tuple[str, ...],
        ranks: str,
        size: int | None,
        reason: str,
        fetch: Callable[[RankedValue, tuple[str, ...]], Any] | None,
        pool: object,
    ) -> None:
        self.name, self.type_name, self.key, self.path = name, type_name, key, path
        self.ranks, self.size, self.reason, self.fetch, self.pool = ranks, size, reason, fetch, pool
        self.dead = False

    @property
    def label(self) -> str:
        return ".".join((self.name, *self.path))


def handle_facts(handle: RankedValue) -> _Facts:
    """The facts of a handle: name, key, path, type_name, size, reason, pool, dead.

    `key` is what `Away.peek` takes for `name`: it finds the object also after the rank has rebound the name.
    """
    facts: _Facts = handle._nbdist_
    return facts
