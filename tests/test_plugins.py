"""Options of sharding: each is looked at when the plugin is made, and has one form from then on."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from nbdist import FullyShardedDataParallelPlugin, state


@pytest.fixture(autouse=True)
def notes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_noted", set())


def test_what_it_is_without_options() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True and plugin.auto_wrap_policy is None
    assert type(plugin.cpu_offload) is OffloadPolicy and plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.activation_checkpointing is plugin.cpu_ram_efficient_loading is False


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("given", "field", "becomes"),
    [
        ({"sharding_strategy": "full_shard"}, "reshard_after_forward", True),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "reshard_after_forward", False),
        ({"sharding_strategy": 5}, "sharding_strategy", "HYBRID_SHARD_ZERO2"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "shards_over", "machine"),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "reshard_after_forward", False),
        ({"reshard_after_forward": ShardingStrategy.NO_SHARD}, "shards_over", "none"),
        ({"reshard_after_forward": "false"}, "reshard_after_forward", False),
        ({"reshard_after_forward": 4}, "reshard_after_forward", 4),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "reshard_after_forward", False),
        ({"cpu_offload": True}, "cpu_offload", CPUOffloadPolicy()),
        ({"cpu_offload": CPUOffload(True)}, "cpu_offload", CPUOffloadPolicy()),
        ({"cpu_offload": CPUOffloadPolicy(False)}, "cpu_offload", CPUOffloadPolicy(False)),
        ({"mixed_precision_policy": "bf16"}, "mixed_precision_policy", BF16),
        ({"mixed_precision_policy": {"param_dtype": torch.bfloat16, "reduce_dtype": "fp32"}},
         "mixed_precision_policy", BF16),
        ({"mixed_precision_policy": MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)},
         "mixed_precision_policy", BF16),
        ({"mixed_precision_policy": BF16}, "mixed_precision_policy", BF16),
        ({"auto_wrap_policy": "no_wrap"}, "auto_wrap_policy", "NO_WRAP"),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, "auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, "auto_wrap_policy", "SIZE_BASED_WRAP"),
        ({"transformer_cls_names_to_wrap": "Block, Head"}, "transformer_cls_names_to_wrap", ["Block", "Head"]),
        ({"transformer_cls_names_to_wrap": [torch.nn.Linear]}, "transformer_cls_names_to_wrap", ["Linear"]),
        ({"transformer_cls_names_to_wrap": ("A",)}, "auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        ({"min_num_params": 10}, "auto_wrap_policy", "SIZE_BASED_WRAP"),
        ({"ignored_modules": "head.*"}, "ignored_modules", "head.*"),
        ({"state_dict_type": "full_state_dict"}, "state_dict_type", StateDictType.FULL_STATE_DICT),
        ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, "state_dict_type", StateDictType.SHARDED_STATE_DICT),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, "backward_prefetch", None),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_each_field_has_one_form(given: dict[str, Any], field: str, becomes: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(**given)
    assert getattr(plugin, field) == becomes and type(getattr(plugin, field)) is type(becomes)
    once, again = vars(plugin).copy(), pickle.loads(pickle.dumps(plugin))
    plugin.__post_init__()
    assert vars(plugin) == once and again == plugin


def test_a_function_and_modules_stay_what_they_are() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=3)
    layer = torch.nn.Linear(1, 1)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy, ignored_modules=(layer,))
    assert plugin.auto_wrap_policy is policy and plugin.ignored_modules == [layer]


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({"fsdp_version": 3}, ValueError, "fsdp_version is 3; it takes 2"),
        ({"fsdp_version": "2"}, TypeError, "fsdp_version is '2'; it takes 2"),
        ({"sharding_strategy": "ZERO3"}, ValueError, "sharding_strategy is 'ZERO3'; it takes one of FULL_SHARD, SHARD"),
        ({"sharding_strategy": 9}, TypeError, "sharding_strategy is 9; it takes one of FULL_SHARD"),
        ({"reshard_after_forward": "ja"}, ValueError, "reshard_after_forward is 'ja'; it takes one of TRUE, FALSE, FU"),
        ({"reshard_after_forward": 1}, TypeError, "reshard_after_forward is 1; it takes True, False or how many"),
        ({"reshard_after_forward": 0.5}, TypeError, "reshard_after_forward is 0.5"),
        ({"mixed_precision_policy": "bf17"}, ValueError, "mixed_precision_policy is 'bf17'; it takes one of bf16"),
        ({"mixed_precision_policy": 16}, TypeError, "mixed_precision_policy is 16; it takes torch's MixedPrecisionPol"),
        ({"mixed_precision_policy": {"parm_dtype": "bf16"}}, ValueError, "has no field 'parm_dtype'; it has: cast_for"),
        ({"mixed_precision_policy": {"param_dtype": 4}}, TypeError, "mixed_precision_policy['param_dtype'] is 4"),
        ({"auto_wrap_policy": "BLOCKS"}, ValueError, "auto_wrap_policy is 'BLOCKS'; it takes one of TRANSFORMER_BASED"),
        ({"auto_wrap_policy": ["Block"]}, TypeError, "auto_wrap_policy is ['Block']; it takes one of"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload is 'yes'; it takes True, False or torch's CPUOffloadPolicy"),
        ({"ignored_modules": "head["}, ValueError, "ignored_modules is 'head[', which is no regular expression: unt"),
        ({"ignored_modules": ["head"]}, TypeError, "ignored_modules is ['head']; it takes modules, or a regular"),
        ({"state_dict_type": "local_state_dict"}, ValueError, "state_dict_type is LOCAL_STATE_DICT, which FSDP2 does"),
        ({"state_dict_type": "full"}, ValueError, "state_dict_type is 'full'; it takes one of FULL_STATE_DICT"),
        ({"param_init_fn": "zeros"}, TypeError, "param_init_fn is 'zeros'; it takes a function of a module"),
        ({"activation_checkpointing": "yes"}, TypeError, "activation_checkpointing is 'yes'; it takes True or False"),
        ({"activation_checkpointing_offload": True}, ValueError, "_offload needs activation_checkpointing=True"),
        ({"limit_all_gathers": "no"}, TypeError, "limit_all_gathers is 'no'; it takes True or False"),
        ({"backward_prefetch": "SOMETIMES"}, ValueError, "backward_prefetch is 'SOMETIMES'; it takes one of BACKWARD"),
        ({"transformer_cls_names_to_wrap": [3]}, TypeError, "transformer_cls_names_to_wrap is [3]; it takes a list"),
        ({"min_num_params": -1}, ValueError, "min_num_params is -1; it takes a number of parameters"),
        ({"min_num_params": 1, "transformer_cls_names_to_wrap": "A"}, ValueError, "exclude each other: give one"),
    ],
)
def test_a_wrong_value_is_named_when_the_plugin_is_made(given: dict[str, Any], kind: type, told: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        FullyShardedDataParallelPlugin(**given)
    assert raised.type is kind and told in str(raised.value)
    assert "FullyShardedDataParallelPlugin." in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fsdp_version": 1}, "the model is sharded by FSDP2"),
        ({"use_orig_params": False}, "use_orig_params=False has no effect"),
        ({"sync_module_states": False}, "the ranks always start with rank 0's values"),
        ({"backward_prefetch": "NO_PREFETCH"}, "backward_prefetch=NO_PREFETCH has no effect"),
        ({"state_dict_config": object()}, "state_dict_config has no effect"),
        ({"mixed_precision_policy": {"buffer_dtype": torch.float16}}, "buffer_dtype has no effect"),
        ({"auto_wrap_policy": "NO_WRAP", "min_num_params": 3}, "min_num_params has no effect: auto_wrap_policy is NO_"),
    ],
)
def test_what_has_no_effect_is_said_once(given: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning) as said:
        FullyShardedDataParallelPlugin(**given)
        FullyShardedDataParallelPlugin(**given)
    assert len(said) == 1 and told in str(said[0].message) and said[0].filename == __file__


# ---------------------------------------------------------------------- what a launcher has put into the environment
LAUNCHERS = {  # as Accelerate 1.15 sets it for `fsdp_version: 2`
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


@pytest.mark.filterwarnings("error")
def test_a_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHERS.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.reshard_after_forward is False and plugin.sharding_strategy is None
    assert plugin.cpu_offload == CPUOffloadPolicy() and plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap) == (
        "TRANSFORMER_BASED_WRAP",
        ["Block", "Head"],
    )
    assert plugin.min_num_params is None and plugin.activation_checkpointing and plugin.cpu_ram_efficient_loading
    mine = FullyShardedDataParallelPlugin(reshard_after_forward=True, cpu_offload=False, min_num_params=7,
                                          auto_wrap_policy="SIZE_BASED_WRAP")  # fmt: skip
    assert mine.reshard_after_forward is True and type(mine.cpu_offload) is OffloadPolicy and mine.min_num_params == 7


def test_a_launchers_environment_of_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD_ZERO2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    with pytest.warns(UserWarning, match="fsdp_version=1"):
        plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.shards_over) == (2, False, "machine")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("FSDP_VERSION", "two", "a whole number of at least 1"),
        ("FSDP_OFFLOAD_PARAMS", "perhaps", "true or false"),
        ("FSDP_RESHARD_AFTER_FORWARD", "sometimes", "one of true, false, FULL_SHARD"),
        ("FSDP_SHARDING_STRATEGY", "ZERO3", "one of FULL_SHARD"),
        ("FSDP_AUTO_WRAP_POLICY", "BLOCKS", "one of TRANSFORMER_BASED_WRAP"),
        ("FSDP_STATE_DICT_TYPE", "FULL", "one of FULL_STATE_DICT"),
        ("FSDP_BACKWARD_PREFETCH", "NEVER", "one of BACKWARD_PRE"),
        ("FSDP_USE_ORIG_PARAMS", "2", "true or false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "-", "true or false"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "-", "true or false"),
    ],
)
def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        FullyShardedDataParallelPlugin()
    assert str(raised.value).startswith(f"the environment variable {name} is {value!r}; it takes {told}")
