"""Options that a user hands to the Accelerator, with Accelerate's names and fields.

Plain data: what they mean is said by the room that reads them (the class that each docstring names).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import Any


class DDPCommunicationHookType(StrEnum):
    """Gradient compression of DDP by name."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class PrecisionType(StrEnum):
    """What `mixed_precision` may be."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


# Where launchers say the precision; an Accelerator that is not told another takes it from there.
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
# The same for the strategy, by its name in `nbdist.strategies`.
STRATEGY_VARIABLE = "NBDIST_STRATEGY"
STRATEGY_NAMES = ("ddp", "fsdp", "hybrid", "single", "tp")


class DynamoBackend(StrEnum):
    """Backends of torch.compile by Accelerate's names; `NO` compiles nothing."""

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    CUDAGRAPHS = "cudagraphs"
    ONNXRT = "onnxrt"
    TENSORRT = "tensorrt"
    OPENXLA = "openxla"
    TVM = "tvm"


@dataclasses.dataclass
class DistributedDataParallelKwargs:
    """Options for torch's DistributedDataParallel, by its own names; what is None is left to torch.

    `comm_hook` compresses gradients, `comm_wrapper` (NO, FP16 or BF16) what the hook sends, and `comm_state_option` is
    given to PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class AutocastKwargs:
    """Options for torch.autocast under mixed precision."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class GradScalerKwargs:
    """Options for the loss scaler of fp16: torch.amp.GradScaler's own, with its defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclasses.dataclass
class InitProcessGroupKwargs:
    """Options for init_process_group, where this package starts the group (under torchrun; in a pool it is there)."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclasses.dataclass
class ProfileKwargs:
    """Options for torch.profiler.profile.

    `activities` by name ("cpu", "cuda", ...; default: what there is); `schedule_option` are the arguments of
    torch.profiler.schedule; `output_trace_dir` is where each rank writes a Chrome trace.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclasses.dataclass
class GradientAccumulationPlugin:
    """Accumulation windows: `num_steps` micro-batches each.

    `sync_with_dataloader`: a window ends with its loader. `sync_each_batch`: share gradients in every micro-batch (with
    sharded gradients this saves memory). `adjust_scheduler` has no effect: one scheduler step is one optimizer step.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclasses.dataclass
class DataLoaderConfiguration:
    """How loaders are prepared.

    `split_batches`: a loader's batch size is that of all ranks together. `dispatch_batches`: rank 0 reads, and sends
    each rank its part. `even_batches` has no effect: tails are uneven and weighed. `use_seedable_sampler` has no
    effect: the order always is a function of (seed, epoch). `data_seed`: the seed of loaders without a generator;
    default: that of `set_seed`. `non_blocking`: bring batches to the device beside the computation; with
    pin_memory=True on CUDA the next one is copied while this one is in use. `use_stateful_dataloader` has no effect:
    every prepared loader has `state_dict` and `load_state_dict`. Neither has `custom_classes`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: dict[str, Any] | None = None


@dataclasses.dataclass
class TorchDynamoPlugin:
    """Options for torch.compile of prepared models; `use_regional_compilation` compiles repeated blocks once."""

    backend: DynamoBackend | str | Callable[..., Any] = DynamoBackend.NO
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool = False


@dataclasses.dataclass
class ProjectConfiguration:
    """Where a project keeps its files: `project_dir`, and `logging_dir` (default: the same).

    `automatic_checkpoint_naming`, `total_limit` (checkpoints kept), `iteration` (the next checkpoint's number) and
    `save_on_each_node` are for `save_state`.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
