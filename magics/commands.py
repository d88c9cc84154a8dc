"""`%distributed on | off | status | stop | restart | pull NAME | resync | env`."""

from __future__ import annotations

import difflib
import html
import os
import time
from typing import Any

from nbdist.launchers import client
from nbdist.launchers.cell import run_cell
from nbdist.launchers.errors import NotOnTheRanks
from nbdist.launchers.pool import Pool
from nbdist.launchers.request import Request
from nbdist.launchers.settling import held_by, settle, state_on_ranks
from nbdist.launchers.status import footprint, look, on_gpus
from nbdist.magics.environment import report
from nbdist.magics.options import OptionError, Options, parse
from nbdist.magics.output import NotebookScreen
from nbdist.magics.session import Session
from nbdist.magics.tables import as_html, as_text, rows, size
from nbdist.shipping import RankedValue

_NO_LIMIT = 1 << 62


def run(session: Session, line: str) -> None:
    """Run one command.

    Raises:
        OptionError: an unknown one, with the list.
    """
    word, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(word)
    if command is None:
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close and word else ""
        raise OptionError(f"%distributed {word or '(nothing)'}: takes one of {', '.join(COMMANDS)}{hint}")
    command(session, rest.strip())


def _started(session: Session) -> list[Pool]:
    return [pool for pool in session.pools.values() if pool.started]


def _on(session: Session, rest: str) -> None:
    options = _options("on", rest)
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
    text, page, own = [], [], 0
    for pool in pools:
        ranks = look(pool)
        head, table = rows(ranks)
        own += sum(rank.own or 0 for rank in ranks)
        lines = _about(session, pool)
        held = held_by(pool)
        below = [f"only on the ranks: {', '.join(held)}"] if held else []
        text += [lines[0], *(f"  {line}" for line in lines[1:]), as_text(head, table), *(f"  {line}" for line in below)]
        page += [f"<b>{html.escape(lines[0])}</b>", *map(html.escape, lines[1:]), as_html(head, table)]
        page += map(html.escape, below)
    if not any(pool.lives(rank) for pool in pools for rank in range(pool.size)):
        cost = "they have ended: the next %%distributed cell starts new ones"
    else:
        cost = _cost(pools, own)
    text.append(cost)
    page.append(html.escape(cost))
    session.shell.display_pub.publish({"text/plain": "\n".join(text), "text/html": "<br>".join(page)})


def _cost(pools: list[Pool], own: int) -> str:
    behind = max(0, footprint([client.supervisor().process.pid]) - own)
    whose = "these ranks have" if len(pools) == 1 else f"the ranks of {len(pools)} pools have"
    return (
        f"{whose} {size(own)} of their own, which `%distributed stop` gives back; {size(behind)} more for torch in the "
        "supervisor and its fork server, so that ranks start at once"
    )


def _about(session: Session, pool: Pool) -> list[str]:
    last = " (used last)" if pool is session.last else ""
    now = "running" if pool.busy else f"idle for {time.monotonic() - pool.last_used:.0f} s"
    cells = "1 cell" if pool.cells == 1 else f"{pool.cells} cells"
    return [
        f"{pool.options}{last}: {cells} run, {now}",
        *([f"chosen by {pool.why}"] if pool.why else []),
        f"{pool.threads} thread{'s' if pool.threads > 1 else ''} a rank: {pool.why_threads}",
    ]


def _named(session: Session, command: str, rest: str) -> list[Pool]:
    """The pools that the options of `stop` or `restart` name: all that run where there are none.

    Raises:
        OptionError: another option than those that say which ranks.
    """
    pools = _started(session)
    if not rest:
        return pools
    options = _options(command, rest)
    if options != Options(n=options.n, gpus=options.gpus, cpus=options.cpus) or options == Options():
        raise OptionError(
            f"%distributed {command} {rest}: takes -n, --gpus or --cpus, as the cells have them that run on the ranks"
        )
    wanted = session.key_for(options)
    named = [pool for pool in pools if pool.options == wanted]
    if not named:
        there = f"; there are {' and '.join(str(pool.options) for pool in pools)}" if pools else ""
        print(f"there are no {wanted}{there}")
    return named


def _options(command: str, rest: str) -> Options:
    try:
        return parse(rest)
    except OptionError as error:
        raise OptionError(str(error).replace("%%distributed", f"%distributed {command}", 1)) from None


def _stop(session: Session, rest: str) -> None:
    """All pools, or the one that the options name."""
    pools = _named(session, "stop", rest)
    if not pools:
        if not rest:
            print("no ranks are running")
        return
    # The notebook is measured too: what it shared with the ranks is all its own afterwards.
    before, on_device = footprint([os.getpid()]), on_gpus(pools)
    for pool in pools:
        with pool.turn.take_over("`%distributed stop`"):
            lost = state_on_ranks(pool)
            pool.end()
        print(f"ended: {pool.options}{lost}")
    freed = before - footprint([os.getpid()])
    after = on_gpus(pools)
    device = f", and {size(on_device - after)} on the GPUs" if on_device is not None and after is not None else ""
    print(f"memory given back: {size(max(0, freed))}{device}")


def _restart(session: Session, rest: str) -> None:
    """As `_stop`: all, or one."""
    pools = _named(session, "restart", rest)
    if not pools and not rest:
        raise NotOnTheRanks("there are no ranks to restart: a %%distributed cell starts them")
    for pool in pools:
        with pool.turn.take_over("`%distributed restart`"):
            lost = state_on_ranks(pool)
            start = time.monotonic()
            try:
                pool.start()
            except KeyboardInterrupt:
                now = (
                    "are as they were"
                    if pool.alive
                    else f"have ended{lost}: the next %%distributed cell starts new ones"
                )
                raise KeyboardInterrupt(f"stopped: the {pool.options} {now}") from None
            took = time.monotonic() - start
        print(f"restarted: {pool.options} in {took:.1f} s{lost}")


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
    was_away = isinstance(session.shell.user_ns.get(rest), RankedValue)
    with pool.turn.take():
        try:
            settle(pool, screen)
            run_cell(pool, request, screen).conclude(screen)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_how_a_pull_stopped(session, rest, was_away)) from None
    value = session.shell.user_ns.get(rest)
    if rest not in session.shell.user_ns:
        raise NameError(f"neither the notebook nor rank 0 has a name {rest!r}")
    if isinstance(value, RankedValue):
        print(f"{rest} cannot come home: {value!r}")


def _how_a_pull_stopped(session: Session, name: str, was_away: bool) -> str:
    if not was_away:
        return f"stopped: the notebook's {name!r} may be what it was or the ranks' one; pull it again to be sure"
    if isinstance(session.shell.user_ns.get(name), RankedValue):
        return f"stopped: {name!r} stays on the ranks"
    return f"Stop came when {name!r} had come home: it is in the notebook"


def _resync(session: Session, rest: str) -> None:
    pool = _last(session)
    screen = NotebookScreen(session.shell, "merged", 0)
    with pool.turn.take():
        settle(pool, screen)
        try:
            answers = pool.ask(range(pool.size), "resync", 600.0)
        except KeyboardInterrupt:  # the ranks are not told: half of it would be worse than all of it
            raise KeyboardInterrupt(
                "stopped waiting; the ranks go on with it, and the next cell finds rank 0's values on every rank"
            ) from None
    if len(answers) < pool.size:
        raise NotOnTheRanks("resync did not end on every rank; `%distributed restart` starts new ones")
    told: Any = answers[0]["answer"]
    if "error" in told:
        raise NotOnTheRanks(f"resync: {told['error']}")
    pool.apart = False
    print(f"rank 0's values are on every rank now: {', '.join(told['done']) or 'nothing to write'}")
    if told["differ"]:
        print(f"left alone, since they differ in structure between ranks: {', '.join(told['differ'])}")


def _env(session: Session, rest: str) -> None:
    print(report(session))


COMMANDS = {
    "on": _on,
    "off": _off,
    "status": _status,
    "stop": _stop,
    "restart": _restart,
    "pull": _pull,
    "resync": _resync,
    "env": _env,
}
