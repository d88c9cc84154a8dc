"""Ranks in real processes, and a small notebook that ships cells to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from nbdist.shipping import Arrival, Home, NeedsMore, Parcel, Shipment, analyse

from .peer import receive, send

HERE = Path(__file__).parent


class CellError(Exception):
    """A cell ended in an exception on a rank; the message is the traceback."""


class Remote:
    """One peer process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sock, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), str(theirs.fileno()), str(rank)],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

    def ready(self) -> None:
        self.answer()

    def tell(self, name: str, *arguments: Any, files: Any = (), **options: Any) -> None:
        send(self.sock, (name, arguments, options), files)

    def answer(self) -> Any:
        (status, value), files = receive(self.sock)
        if status == "error":
            raise value
        return Parcel(value, files) if status == "parcel" else value

    def ask(self, name: str, *arguments: Any, files: Any = (), **options: Any) -> Any:
        self.tell(name, *arguments, files=files, **options)
        return self.answer()

    def close(self) -> None:
        self.sock.close()
        self.process.wait(10)


class Notebook:
    """A notebook's namespace and a pool of peers. `here` runs an ordinary cell, `cell` a distributed one."""

    def __init__(self, remotes: list[Remote]) -> None:
        import builtins

        self.remotes = remotes
        self.ns: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.home = Home(self.ns, len(remotes), fetch=self.fetch)
        self.shipped: list[str] = []
        self.left_out: dict[str, str] = {}
        self.failures: list[BaseException] = []
        self.again = False
        self.parcels = 0
        self.size = 0
        for remote in remotes:
            remote.ask("reset", len(remotes))

    def here(self, source: str) -> None:
        exec(compile(source, "<notebook>", "exec"), self.ns)

    def __getitem__(self, name: str) -> Any:
        return self.ns[name]

    def value(self, source: str) -> Any:
        return eval(source, self.ns)

    def deliver(self, shipment: Shipment) -> None:
        """Send to all, and commit or roll back everywhere; with more where a rank's own content differs."""
        self.again = False
        try:
            self._deliver(shipment)
        except NeedsMore as error:
            self.again = True
            missing = {**error.missing}
            for other in self.failures:
                missing.update(getattr(other, "missing", {}))
            self._deliver(self.home.again(shipment, missing))

    def _deliver(self, shipment: Shipment) -> None:
        failures = self.failures = []
        for ranks, parcel in shipment.parcels:
            for rank in ranks:
                self.remotes[rank].tell("decode", parcel.head, files=parcel.files)
        for ranks, _ in shipment.parcels:
            for rank in ranks:
                try:
                    self.remotes[rank].answer()
                except Exception as error:
                    failures.append(error)
        step = "rollback" if failures else "commit"
        for remote in self.remotes:
            remote.ask(step)
        getattr(self.home, step)(shipment)
        if failures:
            raise failures[0]

    def cell(
        self,
        source: str,
        ranks: list[int] | None = None,
        only: frozenset[str] | None = None,
        limit: int = 4 << 30,
        prune: bool = True,
    ) -> Arrival:
        if prune:
            self.home.prune()
        names = analyse(source)
        shipment = self.home.ship(names.reads, maybe=names.maybe, deletes=names.deletes, running=ranks)
        self.shipped = sorted(shipment.plans[0].binds) if shipment.plans else []
        self.left_out, self.parcels, self.size = shipment.left_out, len(shipment.parcels), shipment.size
        self.deliver(shipment)
        running = list(range(len(self.remotes))) if ranks is None else ranks
        lead = min(running)
        for rank in running:
            self.remotes[rank].tell("run", source, names.stores, shipment.names, rank == lead)
        errors = {rank: error for rank in running if (error := self.remotes[rank].answer())}
        arrival = self.collect(running, lead, only=only, limit=limit)
        if errors:
            raise CellError(errors[min(errors)])
        return arrival

    def collect(self, running: list[int], lead: int, **options: Any) -> Arrival:
        hide = frozenset({"rank", "world_size"})
        self.gathered = self._gather(running, lead, hide, options)
        for rank in running:
            self.remotes[rank].tell("give", lead=rank == lead, hide=hide, **options)
        parcels = {rank: self.remotes[rank].answer() for rank in running}
        back = parcels.pop(lead)
        self.returned = len(back.head)
        return self.home.accept(back, {rank: parcel.head for rank, parcel in parcels.items()}, lead=lead)

    def _gather(self, running: list[int], lead: int, hide: frozenset[str], options: dict[str, Any]) -> int:
        """What is spread over the ranks is brought together; how many tensors that were."""
        what = {"hide": hide, "only": options.get("only")}
        told = {rank: self.remotes[rank].ask("reach", lead=rank == lead, **what) for rank in running}
        if told[lead] is None or len(running) < len(self.remotes):
            return 0
        assert len({report["signature"] for report in told.values()}) == 1
        changed = [any(flags) for flags in zip(*(report["changed"] for report in told.values()), strict=True)]
        which = [place for place, flag in enumerate(changed) if flag]
        for rank in running:
            told_by = told[lead]
            self.remotes[rank].tell("gather", which, {}, told_by["stand_for"], told_by["tokens"], lead=rank == lead)
        for rank in running:
            self.remotes[rank].answer()
        return len(which)

    def launch(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        shipment = self.home.ship((), extra=(function, arguments, keywords))
        self.deliver(shipment)
        for remote in self.remotes:
            remote.tell("call", shipment.names, remote.rank == 0)
        for remote in self.remotes:
            remote.answer()
        return self.collect(list(range(len(self.remotes))), 0, with_result=True).extra

    def on(self, rank: int, source: str) -> Any:
        """What an expression gives on a rank now."""
        return self.remotes[rank].ask("evaluate", source)

    def files(self, rank: int) -> set[str]:
        """The shared files that a rank has mapped, by inode: the memory of others is free (nobody has them open)."""
        return set(self.on(rank, "[line.split()[4] for line in open('/proc/self/maps') if '/memfd:nbdist' in line]"))

    def peek(self, rank: int, name: str, *attributes: str, **options: Any) -> Any:
        return self.home.unpack(self.remotes[rank].ask("peek", name, attributes, **options))

    def fetch(self, handle: Any, path: tuple[str, ...]) -> Any:
        from nbdist.shipping import handle_facts

        return self.peek(0, handle_facts(handle).key, *path)
