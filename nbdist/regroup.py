"""Getting all ranks out of whatever collective they are in, and into a process group that works again.

For one purpose: a rank cannot go on (it is out of memory) while others wait for it in a collective. They cannot be
asked through the group, so the ranks talk through a store beside it.

What is possible: with gloo, waiting ranks get out at once, because the connections between the ranks are shut down.
With NCCL they get out when NCCL gives up by itself. In a pool the group is healed in place, and what holds it lives on;
elsewhere a new default group takes its place, and what was built on the old one has to be prepared again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

from nbdist import messages, sockets, state

_LONGEST = 1800.0  # seconds that a rank waits for the others, as long as a collective does


class Pool(Protocol):
    """The groups of a rank of a pool (`nbdist.worker.groups.Groups`)."""

    store: Any

    def cut(self, store_too: bool) -> int:
        """Free every rank that waits in a collective with this one."""

    def heal_together(self, key: str, names: list[str], count: int) -> None:
        """New backends inside the living groups; all ranks call it with the same arguments."""

    def names(self) -> list[str]: ...

    def count(self) -> int: ...


class Meeting:
    """A place beside the process group where the ranks tell each other how they fare. All ranks make it together.

    Args:
        what: in words, for errors.
    """

    def __init__(self, what: str) -> None:
        import torch.distributed as dist

        self._what, self._round = what, 0
        me = state.current()
        self.rank, self.ranks = me.rank, me.world_size
        self._pool: Pool | None = state.pool_groups
        self._port = 0
        store, offered = _main_store() if self._pool is None and self.rank == 0 else (None, ("", 0))
        self._key, (host, self._port) = messages.agree(what, (uuid.uuid4().hex, offered))[0]
        if self._pool is not None:
            store = self._pool.store
        elif self.rank != 0:
            store = dist.TCPStore(host, self._port, None, False, wait_for_workers=False)
        self._store = dist.PrefixStore(f"nbdist/{self._key}", store)
        self._connected = self._pool is None and self._connects()

    # ------------------------------------------------------------------ one round
    def begin(self) -> None:
        """A round begins: what the others need to know of this rank is written down."""
        self._round += 1
        mine = [(one.local, one.remote) for one in sockets.connections().values()] if self._pool is None else []
        self._set("ports", mine)

    def tell(self, word: str) -> None:
        """How this rank fared in the round."""
        self._set("word", word)

    def said_so_far(self, word: str) -> bool:
        """Whether another rank has said this word already."""
        others = [self._at("word", rank) for rank in range(self.ranks) if rank != self.rank]
        with self._reaching():
            return any(self._store.check([key]) and json.loads(self._store.get(key)) == word for key in others)

    def words(self) -> list[str]:
        """What every rank said, by rank; waits for all.

        Raises:
            RuntimeError: a rank did not come for half an hour.
        """
        return [self._get("word", rank) for rank in range(self.ranks)]

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.rank == 0:
            self._set("shared", value)
        return self._get("shared", 0)

    # ------------------------------------------------------------------ out of the collectives, and on
    def free(self) -> None:
        """Let ranks that wait for this one in a collective get out of it, with an error."""
        if self._pool is not None:
            self._pool.cut(False)
            return
        theirs = {
            (remote, local)
            for rank in range(self.ranks)
            if rank != self.rank
            for local, remote in map(tuple, self._get("ports", rank))
        }
        for fd, one in sockets.connections().items():
            if (one.local, one.remote) in theirs and self._port not in (one.local, one.remote):
                sockets.shut_down(fd, one)

    def renew(self) -> None:
        """A process group that works again; all ranks call it. Wrapped models of a pool are put right too."""
        import torch.distributed as dist

        if self._pool is not None:
            self._set("groups", [self._pool.names(), self._pool.count()])
            said = [self._get("groups", rank) for rank in range(self.ranks)]
            names = [name for name in said[0][0] if all(name in theirs for theirs, _ in said)]
            self._pool.heal_together(f"{self._key}/{self._round}", names, max(count for _, count in said))
            for repair in list(state.interrupt_hooks):
                repair()
            return
        old: Any = dist.group.WORLD
        backend = dist.get_backend_config(old)
        _ended.append(old)  # ending it could wait for what is still in it
        dist.group.WORLD = None
        store = dist.PrefixStore(f"group{self._round}", self._store)
        options = {"timeout": state.group_timeout()} if state.group_timeout() is not None else {}
        dist.init_process_group(str(backend), store=store, rank=self.rank, world_size=self.ranks, **options)

    # ------------------------------------------------------------------ the store
    def _at(self, what: str, rank: int) -> str:
        return f"{self._round}/{what}/{rank}"

    def _set(self, what: str, value: Any) -> None:
        with self._reaching():
            self._store.set(self._at(what, self.rank), json.dumps(value))

    def _get(self, what: str, rank: int) -> Any:
        # Looked for again and again: while the store's own `wait` runs, this rank could not be interrupted.
        key, start = self._at(what, rank), time.monotonic()
        while True:
            with self._reaching():
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            waited = time.monotonic() - start
            if waited > _LONGEST:
                raise RuntimeError(f"{self._what}: rank {rank} has not come for {_LONGEST:.0f} s")
            time.sleep(min(0.001 + waited / 20, 0.1))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """The store is asked. Where the process that holds it has ended, that is seen before: torch would print pages
        of its frames.

        Raises:
            RuntimeError: it has ended.
        """
        import torch.distributed as dist

        if self._connected and not self._connects():
            raise messages.echo(messages.gone("its store is closed"))
        try:
            yield
        except dist.DistNetworkError as error:
            raise messages.echo(messages.gone(str(error))) from None

    def _connects(self) -> bool:
        """Whether there is a living connection to the store, where it has a port."""
        live = [one.remote for one in sockets.connections().values() if one.state == sockets.ESTABLISHED]
        return self._port in live


_ended: list[Any] = []  # groups


@functools.cache
def _main_store() -> tuple[Any, tuple[str, int]]:
    """Rank 0's: the launcher's store, or one that is opened on this machine; and where it is. It stays, since other
    ranks may still read what was said there last.
    """
    import torch.distributed as dist

    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*place, None, False, timedelta(seconds=10), wait_for_workers=False), place
    listening = socket.create_server(("127.0.0.1", 0))
    place = listening.getsockname()
    fd = listening.detach()
    return dist.TCPStore(*place, None, True, wait_for_workers=False, master_listen_fd=fd), place
