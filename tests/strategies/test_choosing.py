"""Which strategy an Accelerator gets: from its arguments, its cell's line, the environment, the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbdist import FullyShardedDataParallelPlugin, ParallelismConfig, strategies
from nbdist.kwargs import STRATEGY_NAMES
from nbdist.state import Process
from nbdist.strategies import choose
from nbdist.utils import TorchTensorParallelConfig

Plugin, Sizes = FullyShardedDataParallelPlugin, ParallelismConfig


def there_are(ranks: int) -> Process:
    return Process(0, 0, ranks, torch.device("cpu"), "", "gloo", "")


def sizes(choice: strategies.Choice) -> tuple[int, ...] | None:
    """dp_replicate, dp_shard, cp, tp."""
    config = choice.parallelism
    return None if config is None else tuple(config.sizes[name] for name in ("dp_replicate", "dp_shard", "cp", "tp"))


def test_the_names_that_the_magic_knows() -> None:
    assert sorted(strategies.STRATEGIES) == sorted(STRATEGY_NAMES)


@pytest.mark.parametrize(
    ("ranks", "asked", "plugin", "config", "name", "grid"),
    [
        (1, None, None, None, "single", None),
        (4, None, None, None, "ddp", None),
        (4, None, {}, None, "fsdp", (1, 4, 1, 1)),
        (4, "fsdp", None, None, "fsdp", (1, 4, 1, 1)),
        (1, "fsdp", None, None, "fsdp", (1, 1, 1, 1)),
        (4, "tp", None, None, "tp", (1, 1, 1, 4)),
        (4, "hybrid", None, None, "hybrid", (2, 2, 1, 1)),
        (2, "hybrid", None, None, "hybrid", (1, 2, 1, 1)),
        (8, "hybrid", None, {"tp_size": 2}, "hybrid", (2, 2, 1, 2)),
        (6, "hybrid", None, {"dp_shard_size": 2}, "hybrid", (3, 2, 1, 1)),
        (6, "hybrid", None, {"dp_replicate_size": 2}, "hybrid", (2, 3, 1, 1)),
        (4, None, {"sharding_strategy": "HYBRID_SHARD"}, None, "hybrid", (2, 2, 1, 1)),
        (4, None, {"sharding_strategy": "NO_SHARD"}, None, "hybrid", (4, 1, 1, 1)),
        (4, None, None, {"dp_shard_size": 4}, "fsdp", (1, 4, 1, 1)),
        (4, None, None, {"dp_replicate_size": 4}, "ddp", (4, 1, 1, 1)),
        (4, None, None, {}, "ddp", (4, 1, 1, 1)),
        (4, None, None, {"dp_shard_size": 2, "dp_replicate_size": 2}, "hybrid", (2, 2, 1, 1)),
        (4, None, None, {"tp_size": 4}, "tp", (1, 1, 1, 4)),
        (4, None, None, {"tp_size": 2, "dp_shard_size": 2}, "fsdp", (1, 2, 1, 2)),
        (4, None, None, {"tp_size": 2, "dp_replicate_size": 2}, "hybrid", (2, 1, 1, 2)),
        (4, None, {}, {"tp_size": 2}, "fsdp", (1, 2, 1, 2)),
        (4, None, {}, {"dp_replicate_size": 4}, "hybrid", (4, 1, 1, 1)),
        (4, None, None, {"cp_size": 4}, "fsdp", (1, 1, 4, 1)),
        (4, "ddp", None, {}, "ddp", (4, 1, 1, 1)),
    ],
)
def test_what_was_said_chooses(
    ranks: int, asked: str | None, plugin: Any, config: Any, name: str, grid: tuple[int, ...] | None
) -> None:
    choice = choose(
        there_are(ranks),
        asked,
        None if plugin is None else Plugin(**plugin),
        None if config is None else Sizes(**config),
    )
    assert (choice.name, sizes(choice)) == (name, grid) and choice.reason
    assert (choice.plugin is not None) == (name in ("fsdp", "hybrid"))


def test_a_replica_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    choice = choose(there_are(16), "hybrid")
    assert sizes(choice) == (2, 8, 1, 1) and choice.reason.endswith("a replica on each machine")


@pytest.mark.parametrize(
    ("asked", "plugin", "config", "told"),
    [
        ("ddp", {}, None, "strategy='ddp' does not shard, and fsdp_plugin says how to"),
        ("tp", {}, None, "strategy='tp' does not shard"),
        ("ddp", None, {"dp_shard_size": 4}, "strategy='ddp' and dp_shard_size=4 contradict each other: these sizes"),
        ("single", None, {"tp_size": 4}, "these sizes are for 'tp'"),
        ("fsdp", None, {"dp_replicate_size": 2}, "strategy='fsdp' and dp_replicate_size=2 contradict"),
        ("tp", None, {"dp_shard_size": 2}, "these sizes are for 'fsdp'"),
        (None, {"sharding_strategy": "FULL_SHARD"}, {"dp_replicate_size": 2}, "sharding_strategy FULL_SHARD contradic"),
        (None, {"sharding_strategy": "NO_SHARD"}, {"dp_shard_size": 4}, "sharding_strategy NO_SHARD contradicts dp_re"),
        (None, None, {"tp_size": 2}, "= 2, and there are 4 ranks: dp_shard_size=2 makes 4, and so does dp_replicate_s"),
        (None, None, {"dp_shard_size": 3}, "= 3, and there are 4 ranks: start 3 ranks, or give sizes whose product is"),
    ],
)
def test_contradictions_are_one_error(asked: str | None, plugin: Any, config: Any, told: str) -> None:
    with pytest.raises(ValueError) as raised:
        choose(
            there_are(4),
            asked,
            None if plugin is None else Plugin(**plugin),
            None if config is None else Sizes(**config),
        )
    assert told in str(raised.value)


def test_the_environment_and_what_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    four = there_are(4)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    chosen = choose(four)
    assert chosen.name == "fsdp" and chosen.reason == "the environment says ACCELERATE_USE_FSDP"
    assert chosen.plugin is not None and chosen.plugin.reshard_after_forward is False
    assert choose(four, "ddp").name == "ddp"
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert sizes(choose(four)) == (1, 2, 1, 2)
    monkeypatch.delenv("PARALLELISM_CONFIG_TP_SIZE")
    monkeypatch.setenv("NBDIST_STRATEGY", "hybrid")
    assert choose(four).reason.startswith("the cell's --backend says so; dp_replicate_size 2, dp_shard_size 2")
    assert choose(four, plugin=Plugin()).name == "hybrid"
    assert choose(four, config=Sizes(tp_size=4)).name == "fsdp"  # the environment's plugin, over no more shards
    monkeypatch.setenv("NBDIST_STRATEGY", "ddp")
    assert choose(four).name == "ddp" and choose(four, plugin=Plugin()).name == "fsdp"
    assert choose(four, "tp").name == "tp"
    monkeypatch.setenv("NBDIST_STRATEGY", "")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "many")
    with pytest.raises(ValueError, match="variable PARALLELISM_CONFIG_DP_SHARD_SIZE is 'many'; it takes a whole numb"):
        choose(four)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "maybe")
    with pytest.raises(ValueError, match="variable ACCELERATE_USE_FSDP is 'maybe'; it takes true or false"):
        choose(four)


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({"dp_shard_size": 0}, ValueError, "ParallelismConfig.dp_shard_size is 0; it takes a number of ranks"),
        ({"tp_size": -2}, ValueError, "tp_size is -2"),
        ({"cp_size": 2.0}, TypeError, "cp_size is 2.0; it takes a number of ranks"),
        ({"dp_replicate_size": True}, TypeError, "dp_replicate_size is True"),
        ({"cp_backend": "ring"}, ValueError, "cp_backend is 'ring'; it takes 'torch'"),
        ({"sp_size": 2}, NotImplementedError, "sp_size=2"),
        ({"tp_handler": 3}, TypeError, "tp_handler is 3; it takes a nbdist.utils.TorchTensorParallelConfig"),
        ({"cp_handler": TorchTensorParallelConfig()}, TypeError, "it takes a nbdist.utils.TorchContextParallelConfig"),
    ],
)
def test_a_wrong_size_is_named_when_the_sizes_are_given(given: dict[str, Any], kind: type, told: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        Sizes(**given)
    assert raised.type is kind and told in str(raised.value)
