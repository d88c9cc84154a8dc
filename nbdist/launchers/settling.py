"""Between two cells: ranks that a Stop or a failure left in different places are brought together again, or
replaced.
"""

from __future__ import annotations

import ast
import time
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.launchers import stalls
from nbdist.launchers.pool import Pool
from nbdist.launchers.shield import on_press, shielded
from nbdist.launchers.stopping import in_step
from nbdist.shipping import RankedValue, handle_facts
from nbdist.shipping.link import Message

if TYPE_CHECKING:
    from nbdist.launchers.cell import CellRun
    from nbdist.launchers.request import Screen

NATIVE_GRACE = 8.0  # seconds that the next cell waits for a rank which is still in a native call
HEAL_LIMIT = 10.0
# What a cell that reads a name of it does not change.
_UNCHANGED = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, type),
    *(ModuleType, FunctionType, BuiltinFunctionType),
)
MANY_HEALS = 20  # where the old backends stay (nbdist.worker.backends): 3 threads and 4 descriptors a group and heal


def settle(pool: Pool, screen: Screen, grace: float = NATIVE_GRACE) -> str:
    """Make the pool ready for a cell; starts it when it has no ranks.

    Returns "started", "kept", "healed" or "replaced". What the user should know is told through `screen.notice`.
    """
    if not pool.started:
        pool.start()
        return "started"
    if pool.unsettled is not None:
        pool.unsettled.stoppable = True  # waiting for it may be given up
        with on_press(pool.unsettled._pressed):
            return _settle(pool, screen, grace)
    return _settle(pool, screen, grace)


def _settle(pool: Pool, screen: Screen, grace: float) -> str:
    _drain(pool, screen)
    run = pool.unsettled
    if len(pool.alive) < pool.size:
        gone = sorted(set(range(pool.size)) - pool.alive)
        return _replace(
            pool, screen, "" if run is not None else f"rank {', '.join(map(str, gone))} ended between cells"
        )
    if run is None:
        return "kept"
    if not _wait_for_native(pool, run, screen, grace):
        return _replace(pool, screen, f"still busy after {grace:g} s: {stalls.tell(_places(pool, run))}")
    run.accept()  # results of a rank that finished late
    run.stoppable = False
    pool.unsettled = None
    repair, heal = what_is_to_be_put_right(run)
    if not repair and not heal:
        return "kept"
    lost, how = _heal(pool, run, screen, heal, repair)
    return _replace(pool, screen, how) if lost else how


def what_is_to_be_put_right(run: CellRun) -> tuple[bool, bool]:
    """(what was built on the groups, the groups) after this cell."""
    if run.put_right:
        return False, False
    return any(message["repaired"] for message in run.done.values()), _needs_healing(run)


def put_right(run: CellRun, screen: Screen) -> str:
    """At the end of a cell that all ranks have ended, what settling would do before the next. Returns what is wrong."""
    repair, heal = what_is_to_be_put_right(run)
    if not repair and not heal:
        run.put_right = True
        return ""
    lost, how = _heal(run.pool, run, screen, heal, repair)
    run.put_right = not lost
    return how if lost else ""


def _drain(pool: Pool, screen: Screen) -> None:
    """What came since the last cell: late messages and ends of processes."""
    pool.notice_ends()
    while (event := pool.next_event(0)) is not None:
        if event.what in ("text", "display"):
            pool.deliver_late(event)
        elif pool.unsettled is not None:
            pool.unsettled.handle(event)


def _listening(pool: Pool, value: bool) -> None:
    if pool.reader is not None:
        pool.reader.listening = value


def _wait_for_native(pool: Pool, run: CellRun, screen: Screen, grace: float) -> bool:
    if not run._outstanding() and all(rank in run.done for rank in range(pool.size)):
        return True
    _listening(pool, True)
    run.screen = screen
    try:
        if run.pump(lambda: not run._outstanding(), 0.5):
            return len(pool.alive) == pool.size
        if run.stop is not None and run.stop.once_more(0.5) and run.pump(lambda: not run._outstanding(), 0.5):
            return len(pool.alive) == pool.size
        screen.notice(f"waiting up to {grace:g} s for the interrupted cell: {stalls.tell(_places(pool, run))}")
        run.pump(lambda: not run._outstanding(), grace - 0.5)
        return not run._outstanding() and len(pool.alive) == pool.size
    finally:
        screen.finish()
        _listening(pool, False)


def _places(pool: Pool, run: CellRun) -> dict[int, dict[str, Any]]:
    _listening(pool, True)
    try:
        return run.where(0.2)
    finally:
        _listening(pool, False)


def _needs_healing(run: CellRun) -> bool:
    """Not when nothing was cut and all groups are in step."""
    if run.stop is not None and run.stop.cut:
        return True
    told = [message for message in run.done.values() if message["ran"] is not None]
    return bool(told) and (len(told) < run.pool.size or not in_step(told))


def _heal(pool: Pool, run: CellRun, screen: Screen, heal: bool, repair: bool) -> tuple[bool, str]:
    """Put the groups right (heal) and what was built on them (repair), on all ranks. Returns (whether that failed, why;
    or what was done).
    """
    known = {rank: {tuple(map(_frozen, group)) for group in message["groups"]} for rank, message in run.done.items()}
    every = set().union(*known.values())
    whole = sorted(
        (group for group in every if all(group in known.get(rank, ()) for rank in group[1])),
        key=lambda group: (len(group[0]), group[0]),
    )
    lost = sorted(group[0] for group in every if group not in whole)
    pool.heals += heal
    ask = run.ask if run.over is False else pool.ask
    answers = ask(
        range(pool.size),
        "heal",
        HEAL_LIMIT,
        generation=pool.heals if heal else 0,
        repair=repair,
        names=[group[0] for group in whole],
        count=max(message["group_count"] for message in run.done.values()),
    )
    said = [one["answer"] if isinstance(one, Message) else one for one in answers.values()]
    errors = [answer["error"] for answer in said if answer["error"]]
    if len(answers) < pool.size or errors:
        return True, f"their process groups could not be healed ({errors[0] if errors else 'no answer'})"
    if not heal:
        return False, "kept"
    if lost:
        screen.notice(
            f"a process group was being made when the cell was stopped and is lost: make it again ({', '.join(lost)})"
        )
    if any(answer["how"] == "made again" for answer in said):
        screen.notice(
            "the process groups were made again: DDP and FSDP models, device meshes and groups from before "
            "must be made again too"
        )
    if pool.heals == MANY_HEALS and any(answer["how"] == "healed, old ones stay" for answer in said):
        screen.notice(
            f"these ranks were put right after a Stop or an error {MANY_HEALS} times, and each time leaves some "
            "threads behind; `%%distributed --fresh` starts new ones when it suits you"
        )
    return False, "healed"


def _frozen(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part


def _replace(pool: Pool, screen: Screen, why: str) -> str:
    start = time.monotonic()
    lost = state_on_ranks(pool)
    with shielded():
        pool.start()
    took = time.monotonic() - start
    screen.notice(f"new ranks ({took:.1f} s)" + (f": {why}" if why else "") + lost)
    return "replaced"


def held_by(pool: Pool) -> list[str]:
    """The notebook's names of what only these ranks have."""
    return sorted(
        name
        for name, value in pool.namespace.items()
        if isinstance(value, RankedValue) and handle_facts(value).pool is pool.home and not handle_facts(value).dead
    )


def state_on_ranks(pool: Pool) -> str:
    """What goes with these ranks, as the end of a sentence: names that only they hold, and what an interrupted cell
    that never came back may have made.
    """
    held = [name for name in held_by(pool) if not name.startswith("_")]
    unseen = [name for name in never_came_back(pool) if name not in held]
    made = (
        f". What the interrupted cell set or may have changed did not come back: {', '.join(unseen)}" if unseen else ""
    )
    if not held:
        return f"{made}. What the notebook holds is sent to them again when a cell reads it"
    return (
        f"{made}. Gone with the old ones: {', '.join(held)}; what the notebook holds is sent again when a cell reads it"
    )


def never_came_back(pool: Pool) -> list[str]:
    """Names that the pool's last cell binds, or whose values it can have changed, when its lead rank never ended it.

    Which of them it had reached nobody knows here.
    """
    run = pool.unsettled
    if run is None or not run.committed or run.lead in run.done:
        return []
    request, namespace = run.request, pool.namespace
    changed = {name for name in run.sees if name in namespace and not isinstance(namespace[name], _UNCHANGED)}
    made = (request.stores | request.deletes | changed) - imported(request.runs.get("source", ""))
    return sorted(name for name in made if not name.startswith("_"))


def imported(source: str) -> set[str]:
    """Names that code binds by `import` alone: nothing is lost with them."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return set()
    by_import = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return by_import - {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
