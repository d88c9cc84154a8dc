"""The process groups of a rank: made, cut when a rank must get out of a collective, and healed in place.

Healing puts a new backend *inside the same ProcessGroup object*, so that DDP, FSDP2, DeviceMesh and the user's own
groups, which hold that object, go on. It stands on private names of torch; `self_test` tries it on a group of one, and
where it fails the groups are destroyed and made again, and the notebook is told what has to be re-made.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as registry

from nbdist import sockets
from nbdist.worker import backends
from nbdist.worker.where import flight_recorder, reached

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
STORE_TIMEOUT = timedelta(seconds=60)
LOOKS = 5  # at the state of collectives, until none is in flight
_TYPES = (c10d.ProcessGroup.BackendType.GLOO, c10d.ProcessGroup.BackendType.NCCL)
_BELOW_ALL = "_new_process_group_helper"  # what makes every group
_FIRST_FREE_BACKEND_TYPE = 6  # where the old backends stay: a type that is set already would keep the old one


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]


def _world() -> Any:
    """torch's table of groups; None with a torch that keeps it elsewhere: groups are then made again, not healed."""
    return getattr(registry, "_world", None)


class Groups:
    """Every process group of this rank.

    Args:
        spec: the rank's start message: rank, world_size, port and store_key of the store, device.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank, self.world_size = spec["rank"], spec["world_size"]
        self.device = spec["device"]
        self._port, self._key = spec["port"], spec["store_key"]
        self._noted: dict[int, sockets.Connection] = {}
        self._old: list[Any] = []  # replaced backends that stay: see nbdist.worker.backends
        self._dead_status: set[str] = set()
        self._store_was_cut = False
        self._generation, self._heals = "", 0
        self._heal_works: bool | None = None
        # torch's own: the guest puts others in their place, which only open and close the default group
        self._init_process_group, self._destroy_process_group = dist.init_process_group, dist.destroy_process_group
        self._watch_new_groups()

    def _connect(self) -> None:
        store = dist.TCPStore("127.0.0.1", self._port, None, False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        self.store = dist.PrefixStore(self._key, store)
        self._store_was_cut = False

    def open(self) -> None:
        """Join the default group: every rank of the pool must come."""
        self._connect()
        self._join(dist.PrefixStore("group", self.store))

    def _join(self, store: Any) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        self._init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=COLLECTIVE_TIMEOUT
        )

    def _watch_new_groups(self) -> None:
        """Note the sockets that appear while a group is made; one private function is below init_process_group,
        new_group and DeviceMesh. Without it the public two are watched, and what a DeviceMesh makes is not cut.
        """

        def watched(make: Any) -> Any:
            @functools.wraps(make)
            def noting(*args: Any, **kwargs: Any) -> Any:
                before = sockets.connections()
                made = make(*args, **kwargs)
                self._note(before)
                return made

            return noting

        make = getattr(registry, _BELOW_ALL, None)
        if make is not None:
            setattr(registry, _BELOW_ALL, watched(make))
            return
        self._init_process_group = watched(self._init_process_group)
        dist.new_group = registry.new_group = watched(dist.new_group)

    def _note(self, before: dict[int, sockets.Connection]) -> None:
        """Note what is connected now and was not before.

        By ports, not by number: a backend that is replaced closes its sockets at about this time, on a thread of its
        own, and a new connection gets the number. One that is not noted cannot be cut, and its rank cannot be stopped.
        """
        for fd, connection in sockets.connections().items():
            was = before.get(fd)
            if was is not None and was[:2] == connection[:2]:
                continue
            if connection.state == sockets.ESTABLISHED and self._port not in connection[:2]:
                self._noted[fd] = connection

    def known(self) -> list[Group]:
        """The groups of this rank, for the notebook: only those that all their members know can be healed."""
        world = _world()
        if world is None:
            return []
        return [
            Group(world.pg_names[group], tuple(sorted(world.pg_group_ranks[group])))
            for group in world.pg_map
            if type(group) is c10d.ProcessGroup
        ]

    def count(self) -> int:
        """How many groups were ever made: names of the next ones follow from it, so it must be equal on all ranks."""
        return getattr(_world(), "group_count", 0)

    def status(self) -> dict[str, Any]:
        """Where the collectives of each living group stand; equal on all ranks and nothing in flight means that
        nothing needs healing.
        """
        for _ in range(LOOKS):
            told = self._status()
            if all(begun == ended for begun, ended in told["groups"].values()):
                break
            time.sleep(0.002)  # gloo frees who waits first, and writes down that it is done a moment later
        return told

    def _status(self) -> dict[str, Any]:
        dump = flight_recorder()
        told = dump.get("pg_status", {})
        return {
            "groups": {
                key: (value["last_enqueued_collective"], value["last_completed_collective"])
                for key, value in told.items()
                if key not in self._dead_status
            },
            "point to point": any(entry.get("is_p2p") for entry in dump.get("entries", ())),
            "known": bool(dump),
        }

    def reached(self) -> tuple[dict[str, int], bool] | None:
        """How far this rank has come in each group; see `nbdist.worker.where.reached`."""
        return reached(frozenset(self._dead_status))

    def cut(self, store_too: bool, more: Collection[tuple[int, int]] = ()) -> int:
        """From another thread: free the main thread from whatever collective (or store call) it waits in. Returns
        the sockets shut down.

        Args:
            more: (local port, remote port) of connections that are cut too, though they were not noted.
        """
        shut = 0
        if store_too:
            self._store_was_cut = True
            for fd, connection in sockets.connections().items():
                if connection.remote == self._port:
                    shut += sockets.shut_down(fd, connection)
        noted = list(self._noted.items())
        if more:
            noted += [(fd, one) for fd, one in sockets.connections().items() if one[:2] in more]
        for fd, connection in noted:
            shut += sockets.shut_down(fd, connection)
        if self.device == "cuda":
            shut += self._abort_nccl()
        return shut

    def _abort_nccl(self) -> int:
        aborted = 0
        for group in list(getattr(_world(), "pg_map", ())):
            try:
                group._get_backend(torch.device("cuda")).abort()
                aborted += 1
            except Exception:
                continue
        return aborted

    def heal(self, generation: int, names: Iterable[str], count: int) -> str:
        """New backends inside the living groups, in this order on all ranks.

        Returns "healed", "healed, old ones stay" where the backends that were replaced cannot be ended, or "made
        again" where the private interface does not work (groups and what holds them must then be re-made).
        """
        if self._store_was_cut:
            self._connect()
        return self._heal(str(generation), names, count)

    def heal_together(self, key: str, names: Iterable[str], count: int) -> None:
        """`heal` in the middle of a cell, by the ranks themselves; the key is one that was never used.

        Raises:
            RuntimeError: healing in place is not possible: the groups were made again, and what holds them must be
                too.
        """
        if self._heal(key, names, count) == "made again":
            raise RuntimeError("the process groups had to be made again: run the cell once more")

    def names(self) -> list[str]:
        """The groups of this rank, in the order in which all ranks heal them."""
        return [group.name for group in sorted(self.known(), key=lambda group: (len(group.name), group.name))]

    def _heal(self, generation: str, names: Iterable[str], count: int) -> str:
        self._generation, self._heals = generation, self._heals + 1
        self._dead_status.update(flight_recorder(status_only=True).get("pg_status", {}))
        for fd, connection in self._noted.items():
            sockets.shut_down(fd, connection)  # a thread of gloo that still waits there gets out, and can end
        self._noted.clear()
        if not self.heal_works():
            self._make_again()
            return "made again"
        before = sockets.connections()
        world = _world()
        by_name = {world.pg_names[group]: group for group in world.pg_map if type(group) is c10d.ProcessGroup}
        for name in names:
            if name in by_name:
                self._heal_one(by_name[name], name, self.store, world.pg_group_ranks[by_name[name]][self.rank])
        world.group_count = max(world.group_count, count)
        self._note(before)
        return "healed, old ones stay" if self._old and not backends.works() else "healed"

    def _heal_one(self, group: Any, name: str, base: Any, group_rank: int) -> None:
        world = _world()
        store = dist.PrefixStore(f"heal{self._generation}/{name}/", base)
        made = self._new_backends(group, name, store, group_rank)
        replaced = [group._get_backend(device) for device, _ in made]
        free = backends.works() and backends.take_out(group)
        for index, (device, new) in enumerate(made):
            new._set_sequence_number_for_group()
            # Not `_set_default_backend`: DDP's constructor then meets a type that it has no name for.
            kind = _TYPES[index] if free else _FIRST_FREE_BACKEND_TYPE + len(made) * self._heals + index
            group._register_backend(device, c10d.ProcessGroup.BackendType(kind), new)
        world.pg_map[group] = (world.pg_map[group][0], store)  # the store that new_group and friends use
        if free:
            backends.bury([replaced.pop(0)])
        self._old.extend(replaced)  # NCCL's are not destroyed: not tried, no GPU where this was written

    def _new_backends(self, group: Any, name: str, store: Any, group_rank: int) -> list[tuple[torch.device, Any]]:
        cpu = torch.device("cpu")
        old = group._get_backend(cpu)
        options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = old.options._timeout
        options._devices = [c10d.ProcessGroupGloo.create_default_device()]
        options.group_name, options.global_ranks_in_group = name, old.options.global_ranks_in_group
        made: list[tuple[torch.device, Any]] = [(cpu, c10d.ProcessGroupGloo(store, group_rank, group.size(), options))]
        if self.device == "cuda":  # not run so far: no GPU where this was written
            cuda = torch.device("cuda")
            previous = group._get_backend(cuda)
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout, nccl.group_name = previous.options._timeout, name
            made.append((cuda, c10d.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), group_rank, group.size(), nccl)))
        return made

    def heal_works(self) -> bool:
        """Try the private interface once, on a group of one rank of its own."""
        if self._heal_works is None:
            try:
                self._heal_works = self.self_test()
            except Exception as error:
                print(
                    f"nbdist: healing groups in place is not possible with torch {torch.__version__}: {error}",
                    file=sys.stderr,
                )
                self._heal_works = False
        return self._heal_works

    def self_test(self) -> bool:
        store = dist.HashStore()
        cpu = torch.device("cpu")

        def backend(key: str) -> Any:
            options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=5)
            options._devices = [c10d.ProcessGroupGloo.create_default_device()]
            options.group_name, options.global_ranks_in_group = "self test", [0]
            made = c10d.ProcessGroupGloo(dist.PrefixStore(key, store), 0, 1, options)
            made._set_sequence_number_for_group()
            return made

        group = c10d.ProcessGroup(store, 0, 1)
        group._register_backend(cpu, c10d.ProcessGroup.BackendType.GLOO, backend("a"))
        second = backend("b")
        group._register_backend(cpu, c10d.ProcessGroup.BackendType(_FIRST_FREE_BACKEND_TYPE), second)
        value = torch.ones(2)
        group.allreduce([value]).wait()
        world = _world()
        named = all(hasattr(world, name) for name in ("pg_map", "pg_names", "pg_group_ranks", "group_count"))
        return named and group._get_backend(cpu) is not None and value.tolist() == [1.0, 1.0]

    def _make_again(self) -> None:
        try:
            self._destroy_process_group()
        except Exception:  # a group whose peers were cut may not end cleanly; it is dropped anyway
            registry.GroupMember.WORLD = None
        self._connect()
        self.store = dist.PrefixStore(f"again{self._generation}", self.store)
        self._join(self.store)
