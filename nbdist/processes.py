"""What a process may know of itself and say to the others: the face of `nbdist.state`, with Accelerate's names."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from nbdist import checks, messages, state
from nbdist.kwargs import InitProcessGroupKwargs
from nbdist.parallelism import ParallelismConfig
from nbdist.plugins import FullyShardedDataParallelPlugin
from nbdist.splitting import Split
from nbdist.state import DistributedType, Process, wait_for_everyone


class Processes:
    """The members that `PartialState` and `Accelerator` share. Reads `self._process`."""

    _process: Process

    @property
    def process_index(self) -> int:
        return self._process.rank

    @property
    def local_process_index(self) -> int:
        return self._process.local_rank

    @property
    def num_processes(self) -> int:
        return self._process.world_size

    @property
    def device(self) -> Any:
        return self._process.device

    @property
    def backend(self) -> str | None:
        return self._process.backend

    @property
    def use_distributed(self) -> bool:
        return self._process.world_size > 1

    @property
    def distributed_type(self) -> DistributedType:
        return self._process.distributed_type

    @property
    def is_main_process(self) -> bool:
        return self._process.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self._process.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self._process.rank == self._process.world_size - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. A rank that is in another collective instead makes all of them raise."""
        wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once: on the main process."""
        if self.is_main_process:
            builtins.print(*args, **kwargs)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the body first, then the others do. If it fails there, it fails everywhere."""
        with self._first(self.is_main_process, "main process"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """On each machine the first process runs the body first. If it fails on one, it fails everywhere."""
        with self._first(self.is_local_main_process, "local main process"):
            yield

    @contextmanager
    def _first(self, leads: bool, who: str) -> Iterator[None]:
        if not leads:
            for failure in messages.agree(f"{who} first", None):
                if failure is not None:
                    raise messages.echo(f"{who} failed: {failure}")
            yield
            return
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):  # a stop reaches the others by itself
            raise
        except BaseException as error:
            messages.agree(f"{who} first", str(error) or type(error).__name__)
            raise
        for failure in messages.agree(f"{who} first", None):
            if failure is not None:  # another machine's first process
                raise messages.echo(f"{who} failed: {failure}")

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator, with or without brackets: the function runs on the main process only; elsewhere it gives None."""
        return _only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator, with or without brackets: the function runs on each machine's first process only."""
        return _only(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator, with or without brackets: the function runs on the last process only."""
        return _only(function, self.is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: the function runs on one process only: `@state.on_process(process_index=1)`.

        Raises:
            ValueError: there is no such process. TypeError: no process is named.
        """
        return _only(function, self.process_index == _named(process_index, "process_index", self.num_processes))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: the function runs on one process of each machine:
        `@state.on_local_process(local_process_index=1)`.

        Raises:
            ValueError: there is no such process. TypeError: no process is named.
        """
        index = _named(local_process_index, "local_process_index", self.num_processes)
        return _only(function, self.local_process_index == index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Split:
        """A context manager that gives this process's part of some inputs; how many are real, and gathering results in
        order: see `nbdist.splitting.Split`.

        Args:
            inputs: a list, tuple, range, tensor, array, table or dataset, or a dict of them with equal lengths; the
                same on all processes. Each part is of the same type.
            apply_padding: repeat the last item on processes that have less than the first. Default: parts differ by
                one at most, and with less items than processes some are empty.

        Raises:
            TypeError: something that cannot be split (a string, a set, a generator). ValueError: a dict whose values
                differ in length.
        """
        return Split(inputs, self.process_index, self.num_processes, apply_padding)


class PartialState(Processes):
    """A view of this process, with Accelerate's names.

    Args:
        cpu: stay on the CPU, whatever devices there are.
        backend, init_method, timeout: for the process group, where this first look starts it (under torchrun): see
            `nbdist.kwargs.InitProcessGroupKwargs`.
    """

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        cpu = checks.flag(cpu, "PartialState: cpu")
        checks.kind(backend, str | None, "PartialState: backend", "the name of a backend of torch.distributed")
        checks.kind(init_method, str | None, "PartialState: init_method", "a URL")
        checks.kind(timeout, timedelta | None, "PartialState: timeout", "a datetime.timedelta")
        self._process = state.current(cpu, InitProcessGroupKwargs(backend, init_method, timeout))

    @property
    def initialized(self) -> bool:
        """Always true: the facts are read when it is made."""
        return True

    @property
    def debug(self) -> bool:
        """Debug mode: errors of collectives list everything that each rank brings. Default: `ACCELERATE_DEBUG_MODE`.

        Can be set, for the whole process.
        """
        return state.debugging()

    @debug.setter
    def debug(self, on: bool) -> None:
        state.set_debugging(checks.flag(on, "PartialState.debug"))

    def destroy_process_group(self, group: Any = None) -> None:
        """End a process group, by default the one of all processes. In a cell that one only closes for the rest of
        the cell.
        """
        state.end_group(group)

    def __repr__(self) -> str:
        me = self._process
        device = f"device {me.device}: {me.device_reason}"
        return f"PartialState(process {me.rank} of {me.world_size}, {device}; {me.backend or 'no'} group)"


class AcceleratorState(PartialState):
    """`accelerator.state`: this process, in what its Accelerator computes, and how its strategy spreads models."""

    mixed_precision = "no"
    deepspeed_plugin = None
    megatron_lm_plugin = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    device_mesh: Any = None
    _type: DistributedType | None = None

    @property
    def distributed_type(self) -> DistributedType:
        return self._type or super().distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.distributed_type is DistributedType.FSDP

    def spread(self, strategy: DistributedType, plugin: Any, parallelism: Any, mesh: Any) -> None:
        """Show how the Accelerator's strategy spreads models."""
        self._type, self.fsdp_plugin, self.parallelism_config = strategy, plugin, parallelism
        self.device_mesh = mesh


def _named(index: int | None, name: str, ranks: int) -> int:
    if index is None:
        raise TypeError(f"say which process: {name}=...")
    return checks.process(index, name, ranks)


def _only(function: Callable[..., Any] | None, here: bool) -> Any:
    """The function where it is to run, else one that returns None; without a function, the decorator."""
    if function is None:
        return functools.partial(_only, here=here)
    checks.called(function, "the decorated function")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return call
