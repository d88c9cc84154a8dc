"""Which strategy an Accelerator gets, and why: what it was told comes first, then its cell's line, then what a
launcher has put into the environment, then how many processes there are.
"""

from __future__ import annotations

import dataclasses

from nbdist import parallelism, plugins, variables
from nbdist.kwargs import STRATEGY_VARIABLE
from nbdist.parallelism import ParallelismConfig
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.state import Process

# The dimensions that may be larger than 1 under each of this package's strategies; another package's knows best.
_TAKES = {
    "single": set[str](),
    "ddp": {"dp_replicate"},
    "tp": {"tp"},
    "fsdp": {"dp_shard", "tp", "cp"},
    "hybrid": set(parallelism.DIMENSIONS),
}
_SHARDED = ("fsdp", "hybrid")  # those that read a plugin
# What takes the ranks that are left, where its size was not given.
_FILLS = {"ddp": "dp_replicate", "tp": "tp", "fsdp": "dp_shard"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy's name, why it, and what it is made with."""

    name: str
    reason: str
    plugin: FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None


def choose(
    process: Process,
    asked: str | None = None,
    plugin: FullyShardedDataParallelPlugin | None = None,
    config: ParallelismConfig | None = None,
) -> Choice:
    """The strategy for this process.

    Args:
        asked: its name, where the user has given one.
        plugin: options of sharding, where given.
        config: sizes, where given.

    Raises:
        ValueError: they contradict each other, or the sizes do not make up the ranks, or a variable is malformed.
    """
    reason = "it was asked for"
    if asked is None and config is None:
        line = variables.text(STRATEGY_VARIABLE)
        if line is not None and (plugin is None or line in _SHARDED):
            asked, reason = line, "the cell's --backend says so"
    if asked is None:
        from_plugin, from_config = "fsdp_plugin was given", "parallelism_config has"
        if plugin is None and variables.flag(plugins.USED):
            plugin, from_plugin = FullyShardedDataParallelPlugin(), f"the environment says {plugins.USED}"
        if config is None and variables.flag(parallelism.USED):
            config, from_config = ParallelismConfig(), f"the environment says {parallelism.USED}, with"
        asked, reason = _by_options(process, plugin, config, from_plugin, from_config)
    if asked in _SHARDED:
        plugin = plugin or FullyShardedDataParallelPlugin()
    if asked in (*_SHARDED, "tp"):
        config = config or ParallelismConfig()
    _agree(asked, plugin, config)
    if config is not None:
        config, told = _filled(asked, process.world_size, plugin, config)
        reason += told
    return Choice(asked, reason, plugin, config)


def _by_options(
    process: Process,
    plugin: FullyShardedDataParallelPlugin | None,
    config: ParallelismConfig | None,
    from_plugin: str,
    from_config: str,
) -> tuple[str, str]:
    if config is not None and config.total_size > 1:
        sizes = ", ".join(f"{one}_size {size}" for one, size in config.sizes.items() if size > 1)
        return _by_sizes(config, plugin is not None), f"{from_config} {sizes}"
    if plugin is not None:
        if plugin.shards_over in ("machine", "none"):
            return "hybrid", f"{from_plugin}, and its sharding_strategy is {plugin.sharding_strategy}"
        return "fsdp", from_plugin
    if process.world_size == 1:
        return "single", "there is one process"
    return "ddp", f"there are {process.world_size} processes, and the whole model is on each"


def _by_sizes(config: ParallelismConfig, shards: bool) -> str:
    shards = shards or config.dp_shard_enabled or config.cp_enabled
    if config.dp_replicate_enabled:
        return "hybrid" if shards or config.tp_enabled else "ddp"
    return "fsdp" if shards else "tp"


def _filled(
    name: str, ranks: int, plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig
) -> tuple[ParallelismConfig, str]:
    """The sizes, with what was left open filled in, and what is to be said of it."""
    if name != "hybrid":
        return config.filled(ranks, _FILLS.get(name)), ""
    why = ""
    if config.left_open >= set(parallelism.DATA) and ranks % config.non_data_parallel_size == 0:
        left = ranks // config.non_data_parallel_size
        shards, why = _shards(left, plugin)
        config = dataclasses.replace(config, dp_replicate_size=left // shards, dp_shard_size=shards)
    fills = "dp_shard" if "dp_shard" in config.left_open else "dp_replicate"
    config = config.filled(ranks, fills)
    replicas, shards = config.sizes["dp_replicate"], config.sizes["dp_shard"]
    return config, f"; dp_replicate_size {replicas}, dp_shard_size {shards}{why}"


def _shards(ranks: int, plugin: FullyShardedDataParallelPlugin | None) -> tuple[int, str]:
    """Into how many shards a replica is split where no size says it, and why."""
    if plugin is not None and plugin.shards_over == "none":
        return 1, ""
    here = variables.whole("LOCAL_WORLD_SIZE", 1) or ranks
    if here < ranks and ranks % here == 0:
        return here, ": a replica on each machine"
    if ranks >= 4 and ranks % 2 == 0:
        return ranks // 2, ": two replicas on this machine"
    return ranks, ": too few ranks for two replicas of several shards" if ranks < 4 else ": an odd number of ranks"


def _agree(name: str, plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig | None) -> None:
    """Raise a ValueError where the options say one thing and the strategy another."""
    takes = _TAKES.get(name)
    if takes is None:
        return
    if plugin is not None and name not in _SHARDED:
        raise ValueError(
            f"strategy={name!r} does not shard, and fsdp_plugin says how to: leave one of them out"
            + ("" if name != "tp" else "; with fsdp_plugin, parallelism_config's tp_size makes layers parallel within")
        )
    if config is None:
        return
    for one, size in config.sizes.items():
        if size > 1 and one not in takes:
            right = _by_sizes(config, plugin is not None)
            raise ValueError(
                f"strategy={name!r} and {one}_size={size} contradict each other: these sizes are for {right!r}. Leave "
                "strategy out, and the sizes choose it"
            )
    over = None if plugin is None else plugin.shards_over
    if plugin is not None and {"all": config.dp_replicate_enabled, "none": config.dp_shard_enabled}.get(str(over)):
        raise ValueError(
            f"fsdp_plugin's sharding_strategy {plugin.sharding_strategy} contradicts dp_replicate_size="
            f"{config.dp_replicate_size}, dp_shard_size={config.dp_shard_size}: leave sharding_strategy out; the sizes "
            "say it"
        )
