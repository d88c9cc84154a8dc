"""What knows IPython: the magics, the capture of a cell, output, errors."""

from __future__ import annotations

from typing import Any

_sessions: dict[int, Any] = {}


def load(shell: Any) -> None:
    """`%load_ext nbdist`. Starts the supervisor, which warms in the background; torch is not imported here."""
    from nbdist.magics.distributed import Distributed
    from nbdist.magics.session import Session

    session = _sessions[id(shell)] = Session(shell)
    magics = Distributed(session)
    shell.register_magic_function(magics.cell, "cell", "distributed")
    shell.register_magic_function(magics.line, "line", "distributed")
    session.every.install()
    session.debugger.install()
    session.completer.install()
    shell.events.register("post_run_cell", session.prune)
    if "ranks" not in shell.user_ns:
        shell.push({"ranks": session.ranks}, interactive=False)
    session.supervisor()


def unload(shell: Any) -> None:
    """`%unload_ext nbdist`."""
    session = _sessions.pop(id(shell), None)
    if session is None:
        return
    session.end()
    session.every.remove()
    session.debugger.remove()
    session.completer.remove()
    shell.events.unregister("post_run_cell", session.prune)
    if shell.user_ns.get("ranks") is session.ranks:
        del shell.user_ns["ranks"]
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("distributed", None)
