"""The members of the Accelerator beside the step: collectives, triggers, files, profiles, memory, folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checks, collectives, messages, metrics, saving, state
from nbdist.data.cursor import Live
from nbdist.grid import Grid
from nbdist.kwargs import DataLoaderConfiguration, ProfileKwargs, ProjectConfiguration
from nbdist.processes import Processes
from nbdist.splitting import Split

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation
    from nbdist.arguments import Handlers


class Helpers(Grid, Processes):
    """What the Accelerator offers around a training loop.

    Reads `self._live` (running iterators of prepared loaders, the newest last), `self._windows`, `self._handlers`,
    `self._loading` and `self.project_configuration`.
    """

    _live: Live
    _windows: Accumulation
    _handlers: Handlers
    _loading: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _behind: Any  # a save in the background
    _triggered = False

    # ------------------------------------------------------------------ collectives
    def gather(self, tensor: Any) -> Any:
        """The nested values of all ranks, joined, on every rank: see `nbdist.collectives.gather`. What the ranks of a
        tensor parallel group have is the same, and comes once; so in the other collectives here.
        """
        return collectives.gather(tensor, self._windows.strategy.copies)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without what a rank computed on stand-ins because nothing was left for it: see
        `nbdist.metrics.gather_for_metrics`. Call it in the loop, for each batch: behind it, stand-ins are not known.

        Args:
            input_data: a nested value. While a prepared loader runs, one float (such as a mean loss) comes once for
                each real row of the batch, so that averaging what is gathered is right; for a sum use `reduce`.
            use_gather_object: gather it as one object, as `gather_object` does.
        """
        copies = self._windows.strategy.copies
        return metrics.gather_for_metrics(input_data, self._live[-1], use_gather_object, self._live.stand_ins, copies)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean, max or min over the ranks: see `nbdist.collectives.reduce`."""
        return collectives.reduce(tensor, reduction, scale, self._windows.strategy.copies)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Split:
        """This process's part of some inputs: see `nbdist.processes.Processes.split_between_processes`. Ranks that take
        the same part of a batch (tensor and context parallel) get the same part.
        """
        together = self._windows.strategy.together
        return Split(inputs, self.process_index // together, self.num_processes // together, apply_padding, together)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Each tensor padded to the largest size over the ranks: see `nbdist.collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Accepted, and does nothing: prepared loaders give every rank the same number of steps, and rows that are
        none weigh 0.
        """
        state.note_once(
            "join_uneven_inputs does nothing: with prepared loaders all ranks make the same number of steps"
        )
        yield

    # ------------------------------------------------------------------ what it was told
    deepspeed_plugin = None

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, on GPUs."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a model that is whole on each."""
        return self.is_main_process

    @property
    def split_batches(self) -> bool:
        return self._loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._loading.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        return self._loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self._loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self._loading.use_stateful_dataloader

    # ------------------------------------------------------------------ triggers
    def set_trigger(self) -> None:
        """Raise a flag on this rank, which `check_trigger` shows to all."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether a rank has raised its flag since the last time; lowers them all. A collective: all ranks call it."""
        raised = any(messages.agree("check_trigger", self._triggered))
        self._triggered = False
        return raised

    # ------------------------------------------------------------------ files and folders
    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """An object in a file, written by the main process (with `ProjectConfiguration(save_on_each_node=True)` by each
        machine's first), whole or not at all: see `nbdist.saving.save`.
        """
        saving.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    # ------------------------------------------------------------------ memory, profile, the end
    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of what was prepared and give memory back, to the device too: `a, b = accelerator.free_memory(a, b)`.

        Returns:
            None for each argument. Names of yours that are not rebound so keep their objects alive.
        """
        from nbdist.batch_size import free_memory

        nothing: list[None] = [None] * len(objects)
        del objects
        del self._live[1:]  # the list itself is known to prepared loaders
        self._windows.forget()
        self._behind.forget()
        free_memory()
        return nothing

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """A context manager that runs its body under torch.profiler and gives the profiler.

        Args:
            profile_handler: the options. Default: those of `kwargs_handlers`. With `output_trace_dir` each rank writes
                `profile_<rank>.json` there; then all ranks leave together.
        """
        from nbdist.profiling import profiling

        wants = "a nbdist.ProfileKwargs"
        checks.fields(checks.kind(profile_handler, ProfileKwargs | None, "profile: profile_handler", wants))
        return profiling(profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs())

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether a part of the model is spread over several devices by a device map: such a model is not prepared."""
        checks.kind(model, torch.nn.Module, "verify_device_map: model", "a torch.nn.Module")
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def end_training(self) -> None:
        """The end of a script: the process group that this package has started ends. In a cell nothing does: the next
        cell trains on.
        """
        state.end_own_group()
