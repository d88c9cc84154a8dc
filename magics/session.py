"""What one notebook has: its pools of ranks, and which of them ran last."""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Callable
from typing import Any

from nbdist.config.detect import Choice, choose_ranks
from nbdist.launchers import client
from nbdist.launchers.devices import PoolOptions, check_free, in_the_way
from nbdist.launchers.errors import RanksBusy
from nbdist.launchers.pool import Pool
from nbdist.launchers.request import Screen
from nbdist.launchers.settling import state_on_ranks
from nbdist.magics import global_settings, settings
from nbdist.magics.autoreload import Autoreload
from nbdist.magics.completion import Completer
from nbdist.magics.debug import Debugger
from nbdist.magics.every import EveryCell
from nbdist.magics.options import Options
from nbdist.magics.ranks import Ranks
from nbdist.shipping import RankedValue
from nbdist.shipping.versions import notebook_modules

RUNNER = "nbdist.magics.rank"
# Constructing a DistributedDataParallel imports this: a second of work that every rank would do again.
SLOW_TO_IMPORT = "torch._dynamo"


class Session:
    """One for each shell that loaded the extension."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pools: dict[PoolOptions, Pool] = {}
        self.last: Pool | None = None
        self.every = EveryCell(shell)
        self.debugger = Debugger(shell)
        self.completer = Completer(shell, self._stay_on_ranks)
        self.ranks = Ranks(lambda: self.last)
        self._sent_sources: dict[str, set[str]] = {}
        self._told: dict[str, tuple[dict[str, Any], dict[Any, Any]]] = {}
        self._pid = os.getpid()
        notebook_modules().follow(Autoreload(shell))

    def supervisor(self) -> client.Supervisor:
        return client.supervisor(preload=[RUNNER, SLOW_TO_IMPORT])

    def choice_for(self, options: Options) -> Choice:
        """What these options mean here."""
        return choose_ranks(ranks=options.n, cpus=options.cpus, gpus=options.gpus, devices=client.devices)

    def key_for(self, options: Options) -> PoolOptions:
        """What the pool of these options is known by."""
        return PoolOptions.of(self.choice_for(options), RUNNER)

    def pool_for(self, options: Options, screen: Callable[[int], Screen]) -> Pool:
        """The pool that these options name; not started when it is new.

        Raises:
            NotEnoughDevices: with what there is and the way out.
        """
        choice = self.choice_for(options)
        size, key = choice.ranks, PoolOptions.of(choice, RUNNER)
        pool = self.pools.get(key)
        if pool is not None and options.fresh and pool.started:
            with pool.turn.take():
                screen(size).notice(f"new ranks, as asked{state_on_ranks(pool)}")
                pool.end()
        if pool is None:
            pool = self.pools[key] = Pool(key, self.shell.user_ns, self.supervisor)
        if not pool.started:
            pool.why = choice.reason
            self._free_devices(pool, screen(size))
            if choice.surprise:
                screen(size).notice(f"{key}: {choice.reason}")
        return pool

    def _free_devices(self, wanted: Pool, screen: Screen) -> None:
        """A pool that sits idle on devices which another one needs is ended, and the user is told.

        Raises:
            DevicesHeld: another process has them; no pool is ended then.
        """
        idle = [other for other in self.pools.values() if other is not wanted and other.started]
        idle = [other for other in idle if in_the_way(wanted.options, other.options)]
        check_free(wanted.options, {pid for other in idle for pid in other.pids})
        for other in idle:
            with other.turn.take():
                screen.notice(f"the {other.options} were ended: their devices are needed{state_on_ranks(other)}")
                other.end()

    def new_sources(self, pool: Pool, file: str) -> dict[str, str]:
        """Sources of notebook cells that these ranks have not seen: `inspect.getsource`, warnings and tracebacks on
        a rank need them.
        """
        key = f"{pool.name}/{pool.pids[0]}"
        sent = self._sent_sources.setdefault(key, set())
        folder = os.path.dirname(file)
        new = {}
        for name, entry in list(linecache.cache.items()):
            if name not in sent and len(entry) == 4 and (name == file or (folder and os.path.dirname(name) == folder)):
                new[name] = "".join(entry[2])
        sent.update(new)
        return new

    def new_settings(self, pool: Pool, everyone: bool) -> tuple[dict[str, Any], list[Any], list[str], dict[str, Any]]:
        """How things are shown here, as far as these ranks do not know it: settings, formatters, and what cannot be
        sent; and the global settings of libraries. It counts as known when every rank is told.
        """
        key = f"{pool.name}/{pool.pids[0]}"
        told, functions = self._told.setdefault(key, ({}, {}))
        if not everyone:
            told, functions = dict(told), dict(functions)
        shown = settings.changes(told)
        return shown, *settings.formatters(self.shell, functions), global_settings.news(told)

    def _stay_on_ranks(self) -> list[str]:
        return [name for name, value in self.shell.user_ns.items() if isinstance(value, RankedValue)]

    def prune(self, *ignored: Any) -> None:
        """After every cell: what the notebook dropped is dropped here too, what it imported is looked at."""
        notebook_modules().look()
        for pool in self.pools.values():
            if pool.started:
                pool.home.prune()

    def end(self) -> None:
        """End every rank and the supervisor."""
        for pool in self.pools.values():
            with contextlib.suppress(RanksBusy), pool.turn.take_over("the extension's end"):
                pool.end()
        self.pools.clear()
        self.last = None
        notebook_modules().follow(None)
        if self._pid == os.getpid():
            client.end_supervisor()
