"""HOW a model is wrapped: one file a strategy, found through a registry that other packages extend by an entry
point.
"""

from __future__ import annotations

from nbdist import context, rng
from nbdist.parallelism import ParallelismConfig
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.registry import STRATEGY_GROUP, Registry
from nbdist.state import Process, draw_apart
from nbdist.strategies.base import Strategy
from nbdist.strategies.choosing import Choice, choose

__all__ = ["STRATEGIES", "Choice", "Strategy", "choose", "create"]

STRATEGIES = Registry(
    "strategy",
    group=STRATEGY_GROUP,
    builtin={
        "ddp": "nbdist.strategies.ddp:DDP",
        "fsdp": "nbdist.strategies.fsdp:FSDP",
        "hybrid": "nbdist.strategies.fsdp:Hybrid",
        "single": "nbdist.strategies.single:Single",
        "tp": "nbdist.strategies.tensor:TensorParallel",
    },
)


def create(
    name: str | None,
    process: Process,
    *,
    plugin: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    **options: object,
) -> Strategy:
    """The strategy of this name, or the chosen one, set up for this process.

    Args:
        name: as users write it; None: see `nbdist.strategies.choosing`.
        plugin, parallelism: how it shards, and over how many ranks.
        **options: what its class takes besides.

    Raises:
        UnknownName: no strategy has this name.
        RuntimeError: it cannot run here; the message says why.
    """
    return make(choose(process, name, plugin, parallelism), process, **options)


def make(choice: Choice, process: Process, **options: object) -> Strategy:
    """The chosen strategy, set up for this process. Raises what `create` raises."""
    kind = STRATEGIES.get(choice.name)
    if getattr(kind, "spreads", False):
        options |= {"plugin": choice.plugin, "parallelism": choice.parallelism}
    strategy: Strategy = kind(process, **options)
    obstacle = strategy.obstacle()
    if obstacle is None and choice.parallelism is not None:
        obstacle = context.obstacle(process, choice.parallelism.sizes["cp"])
    if obstacle is not None:
        raise RuntimeError(f"the strategy {choice.name!r} cannot run here: {obstacle}")
    strategy.reason = choice.reason
    strategy.setup()
    draw_apart(strategy.data_parallel_rank)
    if strategy.together > 1:
        rng.share(strategy.together)
    return strategy
