"""Accelerator: what a training loop holds. The names are Hugging Face Accelerate's; it delegates, and no backend is
named here.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdist import arguments, checks, later, state, strategies
from nbdist.accumulation import Accumulation
from nbdist.checkpoint.mixin import Checkpoints
from nbdist.data import loader as loaders
from nbdist.data.cursor import Live
from nbdist.data.numbers import Numbers
from nbdist.data.options import Options
from nbdist.data.resume import skip_first_batches
from nbdist.helpers import Helpers
from nbdist.kwargs import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nbdist.models import Models
from nbdist.nested import inside, replaced
from nbdist.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.processes import AcceleratorState
from nbdist.scheduler import PreparedScheduler, is_scheduler
from nbdist.shipping.exporters import register_exporter
from nbdist.state import DistributedType
from nbdist.step import Step
from nbdist.strategies.optimizer import PreparedOptimizer
from nbdist.weighing import Weights


class Accelerator(Models, Step, Checkpoints, Helpers):
    """The front object of a training loop.

    Args:
        device_placement: bring models and batches to this rank's device. Default True.
        split_batches: a loader's batch size is that of all ranks together. Default False: it is a rank's.
        mixed_precision: in what prepared models compute: "no", "bf16" or "fp16". Default: the environment variable
            ACCELERATE_MIXED_PRECISION (`%%distributed --mixed-precision`, `notebook_launcher`), else "no".
        gradient_accumulation_steps: micro-batches that make one optimizer step, see `accumulate`. Default 1; the
            environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS of a launcher comes first.
        cpu: stay on the CPU, whatever devices there are.
        dataloader_config: how loaders are prepared, a `DataLoaderConfiguration`.
        rng_types: no effect: the order of prepared loaders is a function of (seed, number, epoch).
        project_dir: the project's folder; for logs too, unless `project_config` names another.
        project_config: a `ProjectConfiguration`.
        gradient_accumulation_plugin: the same as gradient_accumulation_steps with more options.
        step_scheduler_with_optimizer: False: a scheduler steps at each call, whatever its optimizer does.
        kwargs_handlers: options for what lies underneath, at most one of each class of `nbdist.kwargs` that ends in
            Kwargs.
        dynamo_backend: compile prepared models with this backend of torch.compile. Default: the environment variable
            ACCELERATE_DYNAMO_BACKEND, else "no".
        dynamo_plugin: the same with more options, a `TorchDynamoPlugin`.
        fsdp_plugin: how models are sharded, a `FullyShardedDataParallelPlugin`; one that is given chooses the strategy
            "fsdp", or "hybrid".
        torch_tp_plugin: the same as a parallelism_config with its tp_size.
        parallelism_config: the sizes of the grid of ranks, a `ParallelismConfig`, which choose the strategy.
        deepspeed_plugin, megatron_lm_plugin, log_with, deepspeed_plugins: not available yet, but for None.
        output_dtype: what prepared models give under mixed precision: "float32" (default), or "keep" what they have.
        strategy: how models are spread over the ranks, by name: "single", "ddp", "fsdp" (sharded over all ranks),
            "hybrid" (replicas that are sharded) or "tp" (each layer over all ranks). Default: as the options above say;
            else the cell's --backend; else a launcher's environment (ACCELERATE_USE_FSDP,
            ACCELERATE_USE_PARALLELISM_CONFIG); else "ddp" when there are several processes.

    Raises:
        TypeError: an argument that nobody knows, or a value of a wrong kind. NotImplementedError: one that is not
            available yet. ValueError: a value that an argument does not take. RuntimeError: the device lacks the
            precision.
    """

    def __init__(
        self,
        device_placement: bool = True,  # in Accelerate's order
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: None = None,
        rng_types: list[Any] | None = None,
        log_with: None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        output_dtype: str = "float32",
        strategy: str | None = None,
        **unknown: Any,
    ) -> None:
        arguments.refuse_unknown(unknown, type(self))
        arguments.refuse_later(
            deepspeed_plugin=deepspeed_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            log_with=log_with,
            deepspeed_plugins=deepspeed_plugins,
        )
        cpu = checks.flag(cpu, "Accelerator: cpu")
        handlers = arguments.Handlers(kwargs_handlers)
        self._handlers = handlers
        self.state = AcceleratorState(cpu, **arguments.given(handlers.get(InitProcessGroupKwargs)))
        self.project_configuration = arguments.project(project_dir, project_config)
        self.rng_types = rng_types
        arguments.note_rng_types(rng_types)
        self.device_placement = checks.flag(device_placement, "Accelerator: device_placement", True)
        self._loading = arguments.loading(dataloader_config, split_batches)
        self._process = state.current(cpu)
        self._compute(mixed_precision, output_dtype, dynamo_backend, dynamo_plugin)
        self.state.mixed_precision = self.mixed_precision
        asked = arguments.strategy(strategy, tuple(strategies.STRATEGIES))
        plugin, sizes = arguments.sharding(fsdp_plugin, torch_tp_plugin, parallelism_config)
        choice = strategies.choose(self._process, asked, plugin, sizes)
        # One process: there is nothing that these could change.
        options = arguments.given(handlers.get(DistributedDataParallelKwargs)) if choice.name == "ddp" else {}
        self._strategy = strategies.make(choice, self._process, **options)
        self._strategy.precision = self._precision
        spread = self._strategy.distributed_type, choice.plugin, choice.parallelism, self._strategy.mesh
        self.state.spread(*spread)
        self._live = Live([None])  # running iterators of prepared loaders, the newest last
        self._numbers = Numbers()
        options = arguments.accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        weights = Weights(self._strategy.data_parallel_size, self._process.device, self._strategy.together)
        self._windows = Accumulation(self._strategy, weights, self._live, **options)
        self._scale()
        self.step_scheduler_with_optimizer = checks.flag(
            step_scheduler_with_optimizer, "Accelerator: step_scheduler_with_optimizer", True
        )
        # What optimizers and schedulers were prepared to, by the identity of the user's own, which it keeps alive.
        self._prepared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._remember()

    @property
    def distributed_type(self) -> DistributedType:
        return self._strategy.distributed_type

    # ------------------------------------------------------------------ prepare
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Wrap models, optimizers, loaders and schedulers; anything else passes through as the same object. All ranks
        call it alike.

        Args:
            *args: objects in any order, also inside lists, tuples and dicts. What this Accelerator's `prepare` has
                returned comes back as it is; what another one's has is taken over, never wrapped twice. A bare loader
                that was prepared before gives a new one, at its first epoch and with the same orders, so that a cell
                that runs again trains the same. A loader that is made anew shuffles in orders of its own; so does a
                cell that makes it anew, unless it makes the Accelerator too, whose loaders are counted from 0.
            device_placement: for each argument, whether it is brought to the device. Default: as the Accelerator was
                told.

        Returns:
            One object for one argument, else a tuple in the order of the arguments.
        """
        placement = [self.device_placement] * len(args)
        if device_placement is not None:
            checks.kind(device_placement, list | tuple, "prepare: device_placement", "a list, with a bool for each")
            placement = [
                checks.flag(one, "prepare: device_placement", self.device_placement) for one in device_placement
            ]
        if len(placement) != len(args):
            raise ValueError(f"device_placement has {len(placement)} entries for {len(args)} arguments")
        done: dict[int, Any] = {}
        # Models first: an optimizer is bound to what its model has become, in whatever order they were named.
        with self._windows.preparing():
            for item in inside(args):
                if isinstance(item, torch.optim.Optimizer):
                    self._strategy.expect(item.optimizer if isinstance(item, PreparedOptimizer) else item)
            for kind in (self._prepare_models, self._prepare_rest):
                for argument, placed in zip(args, placement, strict=True):
                    kind(argument, placed, done)
        results = tuple(replaced(argument, done) for argument in args)
        return results[0] if len(results) == 1 else results

    def _prepare_models(self, value: Any, placed: bool, done: dict[int, Any]) -> None:
        for item in inside(value):
            if isinstance(item, torch.nn.Module) and id(item) not in done:
                done[id(item)] = self.prepare_model(item, device_placement=placed)

    def _prepare_rest(self, value: Any, placed: bool, done: dict[int, Any]) -> None:
        for item in inside(value):
            if id(item) in done:
                continue
            if isinstance(item, torch.optim.Optimizer):
                done[id(item)] = self.prepare_optimizer(item, device_placement=placed)
            elif isinstance(item, DataLoader):
                done[id(item)] = self.prepare_data_loader(item, device_placement=placed)
            elif is_scheduler(item):
                done[id(item)] = self.prepare_scheduler(item)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """The optimizer, bound to the prepared parameters and with the step boundary behind its `step`.

        Args:
            optimizer: any of torch.optim, or derived from it.
            device_placement: no effect: what an optimizer holds is where its parameters are.
        """
        checks.kind(optimizer, torch.optim.Optimizer, "prepare_optimizer: optimizer", "a torch.optim.Optimizer")
        prepared = optimizer if isinstance(optimizer, PreparedOptimizer) else self._prepared.get(id(optimizer))
        with self._windows.preparing():
            if prepared is None:
                prepared = PreparedOptimizer(optimizer, self._windows)
                self._windows.admit(prepared)
            elif id(prepared.optimizer) not in self._prepared:  # another Accelerator has prepared it
                prepared.attend(self._windows)
                self._windows.admit(prepared)
            self._prepared[id(prepared.optimizer)] = prepared
            self._named.note("optimizers", optimizer, prepared.optimizer)
            self._strategy.rebind(prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, whose one step is one optimizer step, however many micro-batches and ranks there are.

        In the middle of an accumulation window, and where fp16 has skipped the optimizer's step, `step` does nothing.

        Args:
            scheduler: any of torch.optim.lr_scheduler, or what looks like one: bound to the bare or to the prepared
                optimizer, which may be prepared before or after.
        """
        other = isinstance(scheduler, type | torch.nn.Module) or hasattr(scheduler, "zero_grad")
        if not is_scheduler(scheduler) and (other or not callable(getattr(scheduler, "step", None))):
            wants = "a scheduler, such as one of torch.optim.lr_scheduler"
            raise checks.wrong("prepare_scheduler: scheduler", scheduler, wants)
        known = self._prepared.get(id(scheduler))
        if known is None:
            known = scheduler if type(scheduler) is PreparedScheduler else PreparedScheduler(scheduler)
        known.attend(self._windows, self._prepared, not self.step_scheduler_with_optimizer)
        self._prepared[id(known.scheduler)] = known
        self._named.note("schedulers", scheduler, known.scheduler)
        return known

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
        already_sharded: bool | None = None,
    ) -> DataLoader:
        """The loader, still of the user's class, with its samples split over the ranks and its batches brought to
        the device.

        Full steps give each rank `batch_size` samples. The last step is split evenly; a rank that gets none repeats
        rank 0's samples with weight 0. Order is a function of (seed, which of the prepared loaders it is, epoch): the
        seed of the loader's generator, else of `set_seed`. `state_dict` and `load_state_dict` of the result resume it
        anywhere. All ranks call it alike.

        Args:
            data_loader: any DataLoader. An `IterableDataset` is read whole by each rank, which keeps its part.
            device_placement: whether batches are brought to the device. Default: as the Accelerator was told.
            slice_fn_for_dispatch: no effect: rank 0 makes each rank's batch with the loader's own collate function.
            already_sharded: each rank's dataset has other samples than those of the others, so nothing is split.
                Default: as the dataset's attribute `sharded_by_rank` says, or `datasets.split_dataset_by_node`.

        Raises:
            ValueError: the ranks' loaders are of several kinds, or over datasets of several lengths, or differ in
                batch size, drop_last or sampler; or `split_batches` with a batch size that cannot be split evenly.
        """
        placed = self.device_placement if device_placement is None else device_placement
        if slice_fn_for_dispatch is not None:
            arguments.without_effect(
                "slice_fn_for_dispatch", "rank 0 makes each rank's batch by the loader's collate_fn"
            )
        loading = self._loading
        options = Options(
            rank=self._strategy.data_parallel_rank,
            ranks=self._strategy.data_parallel_size,
            together=self._strategy.together,
            device=self.device if placed and self.device.type != "cpu" else None,
            non_blocking=loading.non_blocking,
            split_batches=loading.split_batches,
            dispatch=bool(loading.dispatch_batches),
            already_sharded=already_sharded,
            data_seed=loading.data_seed,
            accumulates=self._accumulates,
        )
        prepared = loaders.prepare_loader(data_loader, self._live, options, numbers=self._numbers)
        self._named.note("loaders", data_loader, prepared, loaders.user_loader(prepared))
        return prepared

    def _accumulates(self) -> bool:
        return self.gradient_accumulation_steps > 1

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The same loader for one pass without its first batches: see `nbdist.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def __getattr__(self, name: str) -> Any:
        raise later.missing_member(name, self)

    def __repr__(self) -> str:
        strategy = self._strategy
        return (
            f"Accelerator(process {self.process_index} of {self.num_processes}, device {self.device}, "
            f"strategy {strategy.name}: {strategy.reason})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(f"an Accelerator {_STAYS}")


_STAYS = "belongs to its rank"


register_exporter(PreparedOptimizer, unwrap=lambda prepared: prepared.optimizer)
register_exporter(PreparedScheduler, unwrap=lambda prepared: prepared.scheduler)
register_exporter(loaders.Prepared, unwrap=loaders.user_loader)
register_exporter(Accelerator, stays=f"it {_STAYS}")
