"""HOW a model is wrapped: one file a strategy, found through a registry that other packages extend by an entry
point.
"""

from __future__ import annotations

from nbdist import rng
from nbdist.registry import Registry
from nbdist.state import Process, draw_apart
from nbdist.strategies.base import Strategy

STRATEGIES = Registry(
    "strategy",
    group="nbdist.strategies",
    builtin={"ddp": "nbdist.strategies.ddp:DDP", "single": "nbdist.strategies.single:Single"},
)


def choose(process: Process) -> tuple[str, str]:
    """The strategy for this process when the user names none, and the reason."""
    if process.world_size == 1:
        return "single", "there is one process"
    return "ddp", f"there are {process.world_size} processes, and the whole model is on each"


def create(name: str | None, process: Process, **options: object) -> Strategy:
    """The strategy of this name, or the chosen one, set up for this process.

    Raises:
        UnknownName: no strategy has this name.
        RuntimeError: it cannot run here; the message says why.
    """
    reason = "it was asked for"
    if name is None:
        name, reason = choose(process)
    strategy: Strategy = STRATEGIES.get(name)(process, **options)
    obstacle = strategy.obstacle()
    if obstacle is not None:
        raise RuntimeError(f"the strategy {name!r} cannot run here: {obstacle}")
    strategy.reason = reason
    strategy.setup()
    draw_apart(strategy.data_parallel_rank)
    if strategy.together > 1:
        rng.share(strategy.together)
    return strategy
