"""Self-tests as in nbdist/self_tests.py, for what fully_shard has inside."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def _inside(file: str) -> Any:
    return importlib.import_module(f"torch.distributed.fsdp._fully_shard.{file}")


def _set_by(cls: Any) -> set[str]:
    """What instances have from their start, also by name of their class's annotations."""
    return {*inspect.unwrap(cls.__init__).__code__.co_names, *getattr(cls, "__annotations__", {})}


def insides_of_sharded_modules() -> None:
    from nbdist.strategies import sharded

    state = _inside("_fsdp_state").FSDPState()
    assert state._training_state.name == "IDLE"
    assert hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")
    assert all(callable(getattr(state, name)) for name in ("_lazy_init", "_pre_forward", "_post_forward"))
    group = _inside("_fsdp_param_group").FSDPParamGroup
    assert {"fsdp_params", sharded._PARTIAL} <= _set_by(group) and hasattr(group, "_is_hsdp")
    one = _inside("_fsdp_param").FSDPParam
    assert {"sharded_param", "_unsharded_param", sharded._ACCUMULATED} <= _set_by(one)
    assert hasattr(_inside("_fully_shard").FSDPModule, "_get_fsdp_state")


def repairing_of_sharded_modules() -> None:
    from torch.distributed import _composable_state

    from nbdist.strategies import fsdp_repair

    assert isinstance(_composable_state._module_state_mapping, importlib.import_module("weakref").WeakKeyDictionary)
    assert fsdp_repair.can_repair()
    assert callable(_inside("_fsdp_param").FSDPParam.to_sharded)
    assert {"IDLE", "FORWARD"} <= set(_inside("_fsdp_common").TrainingState.__members__)


def choosing_the_exchange_of_keys() -> None:
    from torch.distributed.tensor.experimental import _attention

    assert callable(getattr(_attention, "set_rotate_method", None))
