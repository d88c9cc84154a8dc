"""`%distributed on | off | status | stop | restart | pull NAME | resync`."""

from __future__ import annotations

import difflib
import time
from typing import Any

import psutil

from nbdist.launchers.cell import Request, run_cell
from nbdist.launchers.errors import NotOnTheRanks
from nbdist.launchers.pool import Pool
from nbdist.launchers.settling import held_by, settle, state_on_ranks
from nbdist.magics.options import OptionError, parse
from nbdist.magics.output import NotebookScreen
from nbdist.magics.session import Session
from nbdist.shipping import RankedValue

_NO_LIMIT = 1 << 62


def run(session: Session, line: str) -> None:
    """Run one command.

    Raises:
        OptionError: an unknown one, with the list.
    """
    word, _, rest = line.strip().partition(" ")
    command = _COMMANDS.get(word)
    if command is None:
        close = difflib.get_close_matches(word, _COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close and word else ""
        raise OptionError(f"%distributed {word or '(nothing)'}: takes one of {', '.join(_COMMANDS)}{hint}")
    command(session, rest.strip())


def _started(session: Session) -> list[Pool]:
    return [pool for pool in session.pools.values() if pool.started]


def _on(session: Session, rest: str) -> None:
    options = parse(rest)
    if options.fresh:
        raise OptionError("%distributed on --fresh: every cell would start new ranks; `%distributed restart` does once")
    session.every.options = rest
    print(
        f"on: every following cell runs as under `%%distributed{' ' if rest else ''}{rest}`; `%distributed off` ends it"
    )


def _off(session: Session, rest: str) -> None:
    was, session.every.options = session.every.options, None
    print("off: cells run in the notebook" + ("" if was is not None else ", as before"))


def _status(session: Session, rest: str) -> None:
    if session.every.options is not None:
        print(f"on: every cell runs as under `%%distributed {session.every.options}".rstrip() + "`")
    pools = _started(session)
    if not pools:
        print("no ranks: a %%distributed cell starts them")
        return
    for pool in pools:
        last = " (used last)" if pool is session.last else ""
        print(f"{pool.options}{last}: {pool.cells} cells run, idle for {time.monotonic() - pool.last_used:.0f} s")
        for rank, pid in enumerate(pool.pids):
            print(f"  rank {rank}  pid {pid}  {_state(pool, rank)}  {_memory(pid)}")
        held = held_by(pool)
        if held:
            print(f"  only on the ranks: {', '.join(held)}")


def _state(pool: Pool, rank: int) -> str:
    if rank not in pool.alive:
        return "ended"
    if pool.unsettled is not None and rank not in pool.unsettled.done:
        return "still in native code of the interrupted cell"
    return "ready"


def _memory(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        info = process.memory_full_info()
        return f"{info.uss / 2**20:.0f} MiB of its own, {info.rss / 2**20:.0f} MiB with what is shared"
    except psutil.Error:
        return ""


def _stop(session: Session, rest: str) -> None:
    pools = _started(session)
    for pool in pools:
        lost = state_on_ranks(pool)
        pool.end()
        print(f"ended: {pool.options}{lost}")
    if not pools:
        print("no ranks are running")


def _restart(session: Session, rest: str) -> None:
    pools = _started(session)
    if not pools:
        raise NotOnTheRanks("there are no ranks to restart: a %%distributed cell starts them")
    for pool in pools:
        lost = state_on_ranks(pool)
        start = time.monotonic()
        pool.start()
        print(f"restarted: {pool.options} in {time.monotonic() - start:.1f} s{lost}")


def _last(session: Session) -> Pool:
    if session.last is None or not session.last.alive:
        raise NotOnTheRanks("there are no ranks: a %%distributed cell starts them")
    return session.last


def _pull(session: Session, rest: str) -> None:
    if not rest.isidentifier():
        raise OptionError(f"%distributed pull {rest}: takes one name")
    pool = _last(session)
    screen = NotebookScreen(session.shell, "merged", 0)
    request = Request(
        runs={"source": "", "file": "<pull>", "flags": 0, "count": 0, "inject": [], "sources": {}, "pull": [rest]},
        reads=frozenset({rest}),
        only=frozenset({rest}),
        limit=_NO_LIMIT,
    )
    with pool.turn():
        settle(pool, screen)
        run_cell(pool, request, screen).conclude(screen)
    value = session.shell.user_ns.get(rest)
    if rest not in session.shell.user_ns:
        raise NameError(f"neither the notebook nor rank 0 has a name {rest!r}")
    if isinstance(value, RankedValue):
        print(f"{rest} cannot come home: {value!r}")


def _resync(session: Session, rest: str) -> None:
    pool = _last(session)
    screen = NotebookScreen(session.shell, "merged", 0)
    with pool.turn():
        settle(pool, screen)
        answers = pool.ask(range(pool.size), "resync", 600.0)
    if len(answers) < pool.size:
        raise NotOnTheRanks("resync did not end on every rank; `%distributed restart` starts new ones")
    told: Any = answers[0]["answer"]
    if "error" in told:
        raise NotOnTheRanks(f"resync: {told['error']}")
    print(f"rank 0's values are on every rank now: {', '.join(told['done']) or 'nothing to write'}")
    if told["differ"]:
        print(f"left alone, since they differ in structure between ranks: {', '.join(told['differ'])}")


_COMMANDS = {
    "on": _on,
    "off": _off,
    "status": _status,
    "stop": _stop,
    "restart": _restart,
    "pull": _pull,
    "resync": _resync,
}
