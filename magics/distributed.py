"""The magics: `%%distributed` on a cell, `%distributed` for everything around it."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from IPython.core.magic import output_can_be_silenced

from nbdist.config.detect import NotEnoughDevices
from nbdist.launchers import failures
from nbdist.launchers.cell import run_cell
from nbdist.launchers.client import SupervisorLost
from nbdist.launchers.errors import NotOnTheRanks, RanksBusy, RanksEnded, StartFailed, missing_name, say_why_missing
from nbdist.launchers.pool import Pool
from nbdist.launchers.request import Request, Result, Screen
from nbdist.launchers.settling import settle
from nbdist.launchers.shield import shielded
from nbdist.launchers.stopping import RESYNC, steps_apart
from nbdist.magics import commands, global_settings
from nbdist.magics.capture import CellSource, capture, cell_named, count
from nbdist.magics.errors import raise_as_here, raise_plain, raise_syntax
from nbdist.magics.options import OptionError, Options, parse
from nbdist.magics.output import NotebookScreen
from nbdist.magics.rank_names import INJECTED
from nbdist.magics.screens import screens
from nbdist.magics.session import Session
from nbdist.shipping import CannotShip, NotEnoughMemory

_IMPORTS_TORCH = re.compile(r"^(import|from) torch\b", re.MULTILINE)
# What the notebook's shell puts into the namespace for itself; a rank has its own.
_THE_SHELLS_OWN = frozenset({"get_ipython", "exit", "quit", "open", "display"})


class Distributed:
    """Both magics of one session."""

    def __init__(self, session: Session) -> None:
        self.session, self.shell = session, session.shell

    def line(self, line: str) -> None:
        """`%distributed on [options] | off | status | stop | restart | pull NAME | resync | env`

        on       every following cell runs on ranks, with these options, as if `%%distributed` were its first line.
                 Here in the notebook stay: cells of line magics and `!` alone (`%time f()` and the like run code, and
                 go to the ranks), cells of another cell magic (`%%bash`, `%%html`; `%%timeit` goes to the ranks,
                 `%%time` and `%%capture` stay around the cell), and cells that begin with `%distributed` or `%load_ext`
        off      cells run in the notebook again
        status   the pools and why they are what they are; each rank's process, device, state, memory, biggest names
        stop     end all ranks, or one pool's (`stop -n 4`); says how much memory came back
        restart  end them and start new ones now; all, or one pool's (`restart -n 4`)
        pull     bring a name home that stayed on the ranks, whatever its size
        env      versions, machine, GPUs, limits, settings and choices, to paste into a report
        resync   write rank 0's models, optimizers, tensors and numbers over the other ranks'
        """
        try:
            commands.run(self.session, line)
        except (
            ValueError,
            NotEnoughDevices,
            NotOnTheRanks,
            RanksBusy,
            RanksEnded,
            StartFailed,
            SupervisorLost,
            NameError,
        ) as error:
            raise_plain(error)
        except KeyboardInterrupt as error:
            raise_plain(error if error.args else KeyboardInterrupt(f"stopped: `%distributed {line.strip()}`"))

    @output_can_be_silenced
    def cell(self, line: str, cell: str) -> Any:
        """`%%distributed [-n N | --gpus N | --cpus N] [options]`: run this cell on N ranks.

        What the cell reads goes to the ranks. What rank 0 made of it comes back.

        -n N            that many ranks (default: one a GPU; else one a physical core, at least 2)
        --gpus N        that many, one GPU each; --gpus 0,2 these, rank i on the i-th; --gpus 3, is GPU 3 alone
        --cpus N        that many, on the CPU
        --ranks 0,2-3   only these run the cell; what needs all ranks (gather, prepare, backward) is an error then
        --return NAMES  only these names come back (a,b,c)
        --no-return     nothing comes back
        --return-limit S   how much comes back, like 500MB or 16GiB (default 4GiB); what is over it stays on the ranks
        --output MODE   merged: rank 0's as an ordinary cell's, another rank's line only where it differs, as [3] ... or
                        [1-7] ...; all: every line with its ranks in front; tabs: a tab for each rank; rank0; none
        --mixed-precision P  bf16, fp16 or no: in what models compute that an Accelerator() of this cell prepares
        --backend B     fsdp, hybrid, ddp, tp or single: how an Accelerator() of this cell that is not told otherwise
                        spreads models over the ranks
        --fresh         new ranks
        --timeout S     stop the cell after S seconds
        --env K=V       a variable for this cell

        On a rank `rank`, `local_rank`, `world_size`, `device` and `ranks` are there unless the notebook defines them.
        """
        try:
            options = parse(line)
            every = self.session.every
            every.show_as_typed()
            source = capture(self.shell, line, cell, every.typed, every.plain)
        except OptionError as error:
            raise_plain(error)
        except SyntaxError as error:
            raise_syntax(self.shell, error)
        try:
            pool = self.session.pool_for(options, lambda size: NotebookScreen(self.shell, "merged", 0))
            if not pool.started and options.only is None:
                import_meanwhile(self.session, source.source)
            with pool.turn.take():
                request, screen = self._prepare(pool, options, source)
                result = run_cell(pool, request, screen)
        except (
            OptionError,
            NotEnoughDevices,
            RanksBusy,
            RanksEnded,
            StartFailed,
            SupervisorLost,
            CannotShip,
            NotEnoughMemory,
            ValueError,
        ) as error:
            raise_plain(error)
        except KeyboardInterrupt:
            raise_plain(KeyboardInterrupt("stopped before the cell started"))
        return self._finish(result, screen, options, source, pool)

    def _prepare(self, pool: Pool, options: Options, source: CellSource) -> tuple[Request, Screen]:
        session, namespace = self.session, self.shell.user_ns
        ranks = options.running(pool.size)
        here, late = screens(self.shell, options.output, ranks or range(pool.size))
        settle(pool, here)
        session.last = pool
        pool.late.follow(late)
        defined = {name for name in INJECTED if name in namespace and namespace[name] is not session.ranks}
        own = {name for name in _THE_SHELLS_OWN if name in namespace and namespace[name] is self._shells(name)}
        leave = (INJECTED - defined) | own
        sources = session.new_sources(pool, source.file)
        shown, formatters, left_out, new = session.new_settings(pool, everyone=ranks is None)
        for line in left_out:
            here.notice(line)
        request = Request(
            runs={
                "settings": shown,
                "globals": new,
                "shows": options.output,
                "source": source.source,
                "file": source.file,
                "flags": source.flags,
                "count": count(self.shell),
                "inject": sorted(INJECTED - defined),
                "sources": sources,
                "cells": {file: told for file in sources if (told := cell_named(self.shell, file))},
            },
            reads=source.reads - leave,
            maybe=source.maybe - leave,
            stores=source.stores,
            deletes=source.deletes,
            files=tuple(sources) or (source.file,),
            ranks=ranks,
            only=options.only,
            environment=options.env,
            timeout=options.timeout,
            limit=options.limit,
            extra={"formatters": formatters} if formatters else None,
        )
        return request, here

    def _shells(self, name: str) -> Any:
        return self.shell.user_ns_hidden.get(name)

    def _finish(self, result: Result, screen: Screen, options: Options, source: CellSource, pool: Pool) -> Any:
        for note in result.notes:
            screen.notice(note)
        if options.only != frozenset():  # --no-return
            global_settings.put(result.settings)
        missing = sorted((options.only or frozenset()) - self.shell.user_ns.keys())
        if missing:
            screen.notice(f"--return {','.join(missing)}: neither the cell nor the notebook has such a name")
        if result.interrupted:
            error = KeyboardInterrupt(how_it_stopped(result))
            self.session.debugger.remember(error, result.failure, pool)
            raise_plain(error)
        if result.error is not None:
            self.session.debugger.remember(result.error, result.failure, pool)
            sys.stdout.flush()
            self._explain(result, source)
            if (
                result.failure is not None
                and result.failure.first is not None
                and result.error.__traceback__ is not None
            ):
                raise_as_here(self.shell, result.error)
            raise_plain(result.error)
        return result.value

    def _explain(self, result: Result, source: CellSource) -> None:
        """A NameError on the ranks for a name that the notebook has: say why the cell could not see it."""
        error = result.error
        name = missing_name(error)
        if name is None and isinstance(error, KeyError) and error.args and "globals()" in source.source:
            name = error.args[0]
        if not isinstance(name, str) or name not in self.shell.user_ns or error is None:
            return
        if name in result.left_out:
            why = result.left_out[name]
            say_why_missing(
                error, f"the notebook has {name!r}, but it could not be sent: {why}. Make it in a cell there"
            )
        else:
            say_why_missing(
                error,
                f"the notebook has {name!r}, but nbdist did not see that the cell reads it (by eval, for example): "
                f"mention it in the cell, as in `{name}`",
            )


def import_meanwhile(session: Session, source: str) -> None:
    """torch for a cell that imports it: the notebook gets that name with the results, and the first ranks take as long
    to come as the import takes here. Stop waits for its end: half an import could not be repeated.
    """
    if "torch" not in sys.modules and _IMPORTS_TORCH.search(source) and not session.supervisor().is_up:
        with shielded():
            importlib.import_module("torch")


def how_it_stopped(result: Result) -> str:
    """What the user should know after Stop: whether the state is consistent, and what is still running."""
    stop = result.stop
    if result.had_ended:
        told = "Stop came when the cell had run to its end"
        return told if result.left_there else f"{told}: what it made is in the notebook"
    if stop is None or not (stop.run.running() or any(message["ran"] for message in stop.run.done.values())):
        return "stopped before the cell started"
    if stop.rung == "agreed":
        told = f"stopped at step {stop.agreed_on} on every rank"
        if not stop.run.pool.apart:
            return f"{told}: models and optimizers are in step"
        return f"{told}; what was trained may be a step apart since an earlier cell: {RESYNC}"
    told = "stopped"
    if stop.rung == "left":
        from nbdist.launchers import stalls

        still = {rank: place for rank, place in stop.places.items() if rank in stop.run.running()}
        return (
            f"stopped; {stalls.tell(still)}: native code cannot be interrupted. It goes on, and the next cell "
            "waits for it a little before it replaces the ranks"
        )
    handled = stop.run.handled()
    if handled:
        told += f"; the cell handled it and ran to its end on {failures.ranks_in_words(handled)}, and not on the others"
    failed = result.failure.first if result.failure is not None else None
    if failed is not None and not failed["ours"]:
        told += f"; rank {failed['rank']} had failed: {failures.in_short(failed)}"
    if stop.apart():
        why = steps_apart(stop.run.done) or "the ranks were in different places"
        told += f"; {why}, so what they trained may be a step apart: {RESYNC}"
    return told
