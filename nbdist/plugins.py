"""How models are sharded: the options of FSDP, with Accelerate's names and fields.

Everything is checked, and brought to one form, when a plugin is made: strategies read it as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nbdist import checks, state, variables

if TYPE_CHECKING:
    import torch

# Where launchers say that a plugin is in the environment, and how its variables begin.
USED, PREFIX = "ACCELERATE_USE_FSDP", "FSDP_"
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# What FSDP1's strategies mean: whether a unit is freed after forward, and over what parameters are sharded.
SHARDING = {
    "FULL_SHARD": (True, "all"),
    "SHARD_GRAD_OP": (False, "all"),
    "NO_SHARD": (False, "none"),
    "HYBRID_SHARD": (True, "machine"),
    "HYBRID_SHARD_ZERO2": (False, "machine"),
}
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "no": "float32"}


@dataclasses.dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharding, done by torch's `fully_shard` (FSDP2).

    What is None comes from the environment variable that Accelerate's launcher sets for it (FSDP_OFFLOAD_PARAMS ...),
    else from the default.

    Args:
        fsdp_version: 2. With 1, what FSDP1 called so is done by FSDP2, which is said once.
        sharding_strategy: FSDP1's word for `reshard_after_forward` and for what is sharded over: FULL_SHARD,
            SHARD_GRAD_OP, NO_SHARD (whole replicas), HYBRID_SHARD or HYBRID_SHARD_ZERO2 (shards within a machine).
        reshard_after_forward: whether a unit's full parameters are freed after its forward and gathered again in
            backward, or how many ranks keep them together. Default True. Also one of FSDP1's words.
        backward_prefetch: no effect: FSDP2 gathers the next unit while this one computes.
        mixed_precision_policy: torch's MixedPrecisionPolicy; or "bf16", "fp16" or "fp32", in which is computed, while
            gradients are added up in float32; or a dict of the policy's fields. Default: as the Accelerator's
            mixed_precision says.
        auto_wrap_policy: which modules are units of their own. Default: the model's repeated blocks.
            "TRANSFORMER_BASED_WRAP": the classes in `transformer_cls_names_to_wrap`; "SIZE_BASED_WRAP": modules with
            `min_num_params` parameters; "NO_WRAP": the model is one unit; or a function of torch's form.
        cpu_offload: keep the shards, their gradients and the optimizer on the CPU; True, False or torch's policy.
        ignored_modules: those that stay whole on each rank: modules, or a regular expression that their full names
            match.
        state_dict_type: SHARDED_STATE_DICT (default) or FULL_STATE_DICT.
        state_dict_config, optim_state_dict_config: no effect.
        limit_all_gathers, use_orig_params: no effect: FSDP2 always does.
        param_init_fn: called with each module of a model on the meta device, to give its parameters their values.
        sync_module_states: no effect: ranks always start with rank 0's values.
        forward_prefetch: gather the next unit while this one computes, in the order of the modules. Default False.
        activation_checkpointing: compute each unit's inside again in backward, instead of keeping it.
        activation_checkpointing_offload: besides, keep what goes into a unit in CPU memory.
        cpu_ram_efficient_loading: only rank 0 has the weights; the other ranks' models may be on the meta device.
        transformer_cls_names_to_wrap: names of the blocks' classes (or the classes, or one text with commas).
        min_num_params: see SIZE_BASED_WRAP.

    Raises:
        TypeError, ValueError: a value that a field does not take; the message names the field, or the variable.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self._take_version()
        self._take_sharding()
        self._take_wrapping()
        self._take_flags()
        self.cpu_offload = _offload(self.cpu_offload)
        self.mixed_precision_policy = _policy(self.mixed_precision_policy)
        self.set_state_dict_type()

    @property
    def shards_over(self) -> str | None:
        """What `sharding_strategy` says: "all" ranks, each "machine" alone, "none"; None where it says nothing."""
        return None if self.sharding_strategy is None else SHARDING[self.sharding_strategy][1]

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`: "SHARDED_STATE_DICT" or "FULL_STATE_DICT", or torch's member of that name."""
        from torch.distributed.fsdp import StateDictType

        value = self.state_dict_type if state_dict_type is None else state_dict_type
        if value is None:
            value = _said("STATE_DICT_TYPE", _STATES) or _STATES[2]
        name = _word(value, "state_dict_type", _STATES)
        if name == "LOCAL_STATE_DICT":
            raise ValueError(f"{_FIELD}state_dict_type is {name}, which FSDP2 does not have; it takes {_STATES[2]}")
        self.state_dict_type = StateDictType[name]

    def _take_version(self) -> None:
        version = self.fsdp_version
        if version is None:
            version = variables.whole(f"{PREFIX}VERSION", 1)
        version = checks.whole(2 if version is None else version, f"{_FIELD}fsdp_version", "2", 1)
        if version > 2:
            raise ValueError(f"{_FIELD}fsdp_version is {version}; it takes 2")
        if version == 1:
            state.note_once("fsdp_version=1: the model is sharded by FSDP2, which does the same with other internals")
        self.fsdp_version = 2

    def _take_sharding(self) -> None:
        word, reshard = self.sharding_strategy, self.reshard_after_forward
        if word is not None:
            word = _word(word, "sharding_strategy", tuple(SHARDING))
        if hasattr(reshard, "name") or (isinstance(reshard, str) and not reshard.isdigit()):
            told = _word(reshard, "reshard_after_forward", ("TRUE", "FALSE", *SHARDING))
            reshard = {"TRUE": True, "FALSE": False}.get(told)
            if reshard is None:  # one of FSDP1's words, which may stand in either field
                word, reshard = word or told, SHARDING[told][0]
        if word is None and reshard is None:
            word, reshard = _sharding_said()
        if reshard is None:
            reshard = word is None or SHARDING[word][0]
        if not isinstance(reshard, bool) and (not isinstance(reshard, int) or reshard < 2):
            wants = "True, False or how many ranks keep a unit's parameters together, 2 or more"
            raise checks.wrong(f"{_FIELD}reshard_after_forward", reshard, wants)
        self.sharding_strategy, self.reshard_after_forward = word, reshard

    def _take_wrapping(self) -> None:
        policy = self.auto_wrap_policy
        if policy is None:
            policy = _said("AUTO_WRAP_POLICY", WRAPPING)
        elif isinstance(policy, str):
            policy = _word(policy, "auto_wrap_policy", WRAPPING)
        elif callable(policy):
            policy = next((word for one, word in _torchs_policies() if one is policy), policy)
        else:
            raise checks.wrong(f"{_FIELD}auto_wrap_policy", policy, f"one of {', '.join(WRAPPING)}, or a function")
        names, least = self.transformer_cls_names_to_wrap, self.min_num_params
        if policy is None and names is not None and least is not None:
            raise ValueError(f"{_FIELD}transformer_cls_names_to_wrap and min_num_params exclude each other: give one")
        if policy is None and (names is not None or least is not None):
            policy = WRAPPING[0] if names is not None else WRAPPING[1]
        # A launcher sets these whatever the policy is.
        if names is None and policy == WRAPPING[0]:
            names = variables.text(f"{PREFIX}TRANSFORMER_CLS_TO_WRAP")
        if least is None and policy == WRAPPING[1]:
            least = variables.whole(f"{PREFIX}MIN_NUM_PARAMS", 0)
        elif least is not None:
            least = checks.whole(least, f"{_FIELD}min_num_params", "a number of parameters", 0)
        self.auto_wrap_policy, self.min_num_params = policy, least
        self.transformer_cls_names_to_wrap = _class_names(names)
        for name, wants in (("transformer_cls_names_to_wrap", WRAPPING[0]), ("min_num_params", WRAPPING[1])):
            if getattr(self, name) is not None and policy != wants:
                told = policy if isinstance(policy, str) else "a function"
                _without_effect(name, f"auto_wrap_policy is {told}, not {wants}")
        self.ignored_modules = _ignored(self.ignored_modules)

    def _take_flags(self) -> None:
        for name, variable in _FLAGS.items():
            value = getattr(self, name)
            if value is None:
                value = variables.flag(f"{PREFIX}{variable}")
            setattr(self, name, checks.flag(value, f"{_FIELD}{name}"))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(f"{_FIELD}activation_checkpointing_offload needs activation_checkpointing=True")
        if self.param_init_fn is not None:
            checks.called(self.param_init_fn, f"{_FIELD}param_init_fn", "a function of a module")
        _said("BACKWARD_PREFETCH", _PREFETCH)
        if self.backward_prefetch is not None:
            known = _word(self.backward_prefetch, "backward_prefetch", _PREFETCH)
            if known != "BACKWARD_PRE":
                _without_effect(f"backward_prefetch={known}", "FSDP2 gathers the next unit while this one computes")
            self.backward_prefetch = None
        for name, (usual, why) in _IGNORED.items():
            value = getattr(self, name)
            variables.flag(f"{PREFIX}{name.upper()}")
            if value is not None and checks.flag(value, f"{_FIELD}{name}") is not usual:
                _without_effect(f"{name}={value}", why)
        for name in ("state_dict_config", "optim_state_dict_config"):
            if getattr(self, name) is not None:
                _without_effect(name, "checkpoints are written from the CPU, by each rank what it holds")
                setattr(self, name, None)


_FIELD = "FullyShardedDataParallelPlugin."
_FLAGS = {
    "activation_checkpointing": "ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "CPU_RAM_EFFICIENT_LOADING",
    "forward_prefetch": "FORWARD_PREFETCH",
}
# What FSDP2 always does: the value that says so, and why another one changes nothing.
_IGNORED = {
    "limit_all_gathers": (True, "FSDP2 needs no limit"),
    "use_orig_params": (True, "FSDP2 keeps parameters apart as they are"),
    "sync_module_states": (True, "the ranks always start with rank 0's values"),
}


def _without_effect(what: str, why: str) -> None:
    state.note_once(f"FullyShardedDataParallelPlugin: {what} has no effect: {why}")


def _word(value: Any, field: str, known: tuple[str, ...]) -> str:
    """One of these words: as a text, as torch's member of that name, or as its number, counted from 1."""
    name = getattr(value, "name", value)
    if isinstance(name, str) and name.isdigit():
        name = int(name)
    if isinstance(name, int) and not isinstance(name, bool) and 1 <= name <= len(known):
        return known[name - 1]
    if not isinstance(name, str):
        raise checks.wrong(f"{_FIELD}{field}", value, f"one of {', '.join(known)}")
    if name.upper() not in known:
        raise ValueError(f"{_FIELD}{field} is {checks.short(value)}; it takes one of {', '.join(known)}")
    return name.upper()


def _sharding_said() -> tuple[str | None, bool | None]:
    """What the environment says: one of FSDP1's words, or whether parameters are freed after forward."""
    word = _said("SHARDING_STRATEGY", tuple(SHARDING))
    if word is not None and variables.whole(f"{PREFIX}VERSION", 1) != 2:  # with 2 a launcher sets it too
        return word, None
    word = variables.one_of(f"{PREFIX}RESHARD_AFTER_FORWARD", ("true", "false", *SHARDING))
    return (None, word == "true") if word in ("true", "false") else (word, None)


def _said(variable: str, known: tuple[str, ...]) -> str | None:
    """What the environment says, one of these words; or its number, counted from 1."""
    said = variables.text(f"{PREFIX}{variable}")
    if said is not None and said.isdigit() and 1 <= int(said) <= len(known):
        return known[int(said) - 1]
    return variables.one_of(f"{PREFIX}{variable}", known)


def _torchs_policies() -> list[tuple[Any, str]]:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    return [(transformer_auto_wrap_policy, WRAPPING[0]), (size_based_auto_wrap_policy, WRAPPING[1])]


def _class_names(value: Any) -> list[str] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else [value] if isinstance(value, type) else value
    wants = "a list of class names"
    if not isinstance(names, list | tuple | set | frozenset):
        raise checks.wrong(f"{_FIELD}transformer_cls_names_to_wrap", value, wants)
    found = []
    for name in names:
        text = name.__name__ if isinstance(name, type) else name
        if not isinstance(text, str) or not text.strip():
            raise checks.wrong(f"{_FIELD}transformer_cls_names_to_wrap", value, wants)
        found.append(text.strip())
    return found


def _ignored(value: Any) -> Any:
    """Modules in a list, or a regular expression."""
    from torch.nn import Module

    if value is None:
        value = variables.text(f"{PREFIX}IGNORED_MODULES")
    if value is None:
        return None
    where, wants = f"{_FIELD}ignored_modules", "modules, or a regular expression of their names"
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{where} is {checks.short(value)}, which is no regular expression: {error}") from None
        return value
    modules = [value] if isinstance(value, Module) else list(value) if isinstance(value, Iterable) else None
    if modules is None or not all(isinstance(one, Module) for one in modules):
        raise checks.wrong(where, value, wants)
    return modules


def _offload(value: Any) -> Any:
    """torch's policy."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if value is None:
        value = variables.flag(f"{PREFIX}OFFLOAD_PARAMS")
    if isinstance(value, OffloadPolicy):
        return value
    if isinstance(value, CPUOffload):
        value = value.offload_params
    try:
        return CPUOffloadPolicy() if checks.flag(value, "") else OffloadPolicy()
    except TypeError:
        wants = "True, False or torch's CPUOffloadPolicy"
        raise checks.wrong(f"{_FIELD}cpu_offload", value, wants) from None


def _policy(value: Any) -> Any:
    """torch's policy, or None."""
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    where = f"{_FIELD}mixed_precision_policy"
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, str):
        if value.lower() not in _DTYPES:
            raise ValueError(f"{where} is {checks.short(value)}; it takes one of {', '.join(_DTYPES)}")
        return MixedPrecisionPolicy(_dtype(value, where), torch.float32)
    if isinstance(value, MixedPrecision):  # FSDP1's
        fields = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs")
        value = {name: getattr(value, name) for name in fields if getattr(value, name) is not None}
    if not isinstance(value, dict):
        raise checks.wrong(
            where, value, "torch's MixedPrecisionPolicy, a dict of its fields, or one of bf16, fp16, fp32"
        )
    known = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    given = dict(value)
    if given.pop("buffer_dtype", None) is not None:
        _without_effect("buffer_dtype", "FSDP2 leaves buffers as they are")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where} has no field {unknown[0]!r}; it has: {', '.join(sorted(known))}")
    return MixedPrecisionPolicy(
        **{
            name: _dtype(one, f"{where}[{name!r}]")
            if name.endswith("dtype")
            else checks.flag(one, f"{where}[{name!r}]")
            for name, one in given.items()
        }
    )


def _dtype(value: Any, where: str) -> Any:
    import torch

    if value is None or isinstance(value, torch.dtype):
        return value
    name = _DTYPES.get(value.lower(), value.removeprefix("torch.")) if isinstance(value, str) else None
    found = getattr(torch, name, None) if name else None
    if not isinstance(found, torch.dtype):
        raise checks.wrong(where, value, "a torch.dtype")
    return found
