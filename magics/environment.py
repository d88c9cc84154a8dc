"""`%distributed env`: what is known about the machine, torch, and this notebook's ranks. torch is not imported here;
the supervisor, which has it, is asked.
"""

from __future__ import annotations

import os

from nbdist.config.cores import threads_for
from nbdist.config.machine import Facts
from nbdist.config.report import sections, write
from nbdist.launchers import client
from nbdist.launchers.devices import PoolOptions
from nbdist.magics.options import Options
from nbdist.magics.session import Session


def report(session: Session) -> str:
    """The text of the report."""
    told = sections(os.environ)
    told.insert(2, ("torch, as ranks have it", _torch()))
    told.append(("a cell without options", _default(session)))
    told.append(("pools", _pools(session)))
    return write(told)


def _torch() -> Facts:
    try:
        return client.facts()
    except client.SupervisorLost as error:
        return [("trouble", " ".join(str(error).split()))]


def _default(session: Session) -> Facts:
    try:
        choice = session.choice_for(Options())
    except (ValueError, client.SupervisorLost) as error:
        return [("trouble", str(error))]
    threads, why = threads_for(choice.ranks, os.environ)
    return [
        ("runs on", f"{PoolOptions.of(choice)}: {choice.reason}"),
        ("threads", f"{threads} a rank: {why}"),
    ]


def _pools(session: Session) -> Facts:
    owner = client.supervisor()
    facts = [("supervisor", f"pid {owner.process.pid}, " + ("alive" if owner.alive else "ended"))]
    for pool in session.pools.values():
        if not pool.started:
            continue
        cells = "1 cell" if pool.cells == 1 else f"{pool.cells} cells"
        state = f"pids {', '.join(map(str, pool.pids))}, {cells} run"
        facts.append((str(pool.options), f"{state}; chosen by {pool.why}" if pool.why else state))
    return facts
