"""Which strategy an Accelerator gets, and why: what it was told comes first, then its cell's line, then what a
launcher has put into the environment, then how many processes there are.
"""

from __future__ import annotations

import dataclasses
import os

from nbdist import parallelism, plugins, variables
from nbdist.kwargs import STRATEGY_VARIABLE
from nbdist.parallelism import ParallelismConfig
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.state import Process

SHARDED = ("fsdp", "hybrid")  # those that read a plugin


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
        plugin: options of sharding, where given. config: sizes, where given.

    Raises:
        ValueError: they contradict each other, or the sizes do not make up the ranks, or a variable is malformed.
    """
    reason = "it was asked for"
    if asked is None and config is None:
        line = variables.text(STRATEGY_VARIABLE)
        if line is not None and (plugin is None or line in SHARDED):
            asked, reason = line, "the cell's --backend says so"
    if asked is None:
        from_plugin, from_config = "fsdp_plugin was given", "parallelism_config has"
        if plugin is None and variables.flag(plugins.USED):
            plugin, from_plugin = FullyShardedDataParallelPlugin(), f"the environment says {plugins.USED}"
        if config is None and variables.flag(parallelism.USED):
            config, from_config = ParallelismConfig(), f"the environment says {parallelism.USED}, with"
        asked, reason = _by_options(process, plugin, config, from_plugin, from_config)
    _agree(asked, plugin, config)
    if plugin is None and asked in SHARDED:
        plugin = FullyShardedDataParallelPlugin()
    config = _sizes(asked, process, plugin, config)
    if asked == "hybrid" and config is not None:
        reason += f"; dp_replicate_size {config.dp_replicate_size}, dp_shard_size {config.dp_shard_size}"
    return Choice(asked, reason, plugin, config)


def _by_options(
    process: Process,
    plugin: FullyShardedDataParallelPlugin | None,
    config: ParallelismConfig | None,
    from_plugin: str,
    from_config: str,
) -> tuple[str, str]:
    if config is not None and config.total_size > 1:
        sizes = config.sizes
        told = f"{from_config} " + ", ".join(f"{one}_size {size}" for one, size in sizes.items() if size > 1)
        shards = plugin is not None or max(sizes["dp_shard"], sizes["cp"]) > 1
        if sizes["dp_replicate"] > 1:
            return ("hybrid" if shards or sizes["tp"] > 1 else "ddp"), told
        return ("fsdp" if shards else "tp"), told
    if plugin is not None:
        if plugin.shards_over in ("machine", "none"):
            return "hybrid", f"{from_plugin}, and its sharding_strategy is {plugin.sharding_strategy}"
        return "fsdp", from_plugin
    if process.world_size == 1:
        return "single", "there is one process"
    return "ddp", f"there are {process.world_size} processes, and the whole model is on each"


def _sizes(
    name: str, process: Process, plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig | None
) -> ParallelismConfig | None:
    """The sizes, with what was left open filled in."""
    ranks = process.world_size
    if name == "fsdp":
        return (config or ParallelismConfig()).filled(ranks, "dp_shard")
    if name == "tp":
        return (config or ParallelismConfig()).filled(ranks, "tp")
    if name == "hybrid":
        if config is not None:
            return config.filled(ranks, "dp_shard" if "dp_shard" in config.left_open else "dp_replicate")
        shards = 1 if plugin is not None and plugin.shards_over == "none" else _shards(ranks)
        return ParallelismConfig(dp_replicate_size=ranks // shards, dp_shard_size=shards).filled(ranks)
    return None if config is None else config.filled(ranks)


def _shards(ranks: int) -> int:
    """Shards within each machine; on one machine half of its ranks, where that leaves more than one shard."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    if here < ranks and ranks % here == 0:
        return here
    return ranks // 2 if ranks >= 4 and ranks % 2 == 0 else ranks


def _agree(name: str, plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig | None) -> None:
    """Raise a ValueError where the options say one thing and the strategy another."""
    if name not in ("single", "ddp", "tp", *SHARDED):
        return  # another package's: it knows best
    if plugin is not None and name not in SHARDED:
        raise ValueError(f"strategy={name!r} shards nothing, and there is a fsdp_plugin: leave one of them out")
    if config is None:
        return
    large = {one for one, size in config.sizes.items() if size > 1}
    takes = {
        "single": set(),
        "ddp": {"dp_replicate"},
        "tp": {"tp"},
        "fsdp": {"dp_shard", "tp", "cp"},
        "hybrid": set(parallelism.DIMENSIONS),
    }[name]
    if large - takes:
        wrong = sorted(large - takes)[0]
        other = {"dp_shard": "'fsdp'", "cp": "'fsdp'", "tp": "'tp', or 'fsdp'"}.get(wrong, "'hybrid'")
        raise ValueError(
            f"strategy={name!r} and parallelism_config with {wrong}_size={config.sizes[wrong]} contradict each other: "
            f"the strategy for that is {other}; leave strategy out, and the sizes choose it"
        )
    over = None if plugin is None else plugin.shards_over
    if plugin is not None and {"all": config.dp_replicate_enabled, "none": config.dp_shard_enabled}.get(str(over)):
        raise ValueError(
            f"fsdp_plugin's sharding_strategy {plugin.sharding_strategy} and parallelism_config with "
            f"dp_replicate_size={config.dp_replicate_size}, dp_shard_size={config.dp_shard_size} contradict each "
            "other: leave sharding_strategy out"
        )
