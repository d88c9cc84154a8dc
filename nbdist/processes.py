"""What a process may know of itself and say to the others: the face of `nbdist.state`, with Accelerate's names."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nbdist import messages, state
from nbdist.state import DistributedType, Process, wait_for_everyone

F = TypeVar("F", bound=Callable[..., Any])


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
        if self._process.world_size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self._process.device.type == "cuda" else DistributedType.MULTI_CPU

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
                    raise RuntimeError(f"{who} failed: {failure}")
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
                raise RuntimeError(f"{who} failed: {failure}")

    def on_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process only; elsewhere it returns None."""
        return _only(function, self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: the function runs on each machine's first process only."""
        return _only(function, self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: the function runs on the last process only."""
        return _only(function, self.is_last_process)


class PartialState(Processes):
    """A read-only view of this process, with Accelerate's names.

    Args:
        cpu: stay on the CPU, whatever devices there are.
    """

    def __init__(self, cpu: bool = False) -> None:
        self._process = state.current(cpu)

    def __repr__(self) -> str:
        me = self._process
        device = f"device {me.device}: {me.device_reason}"
        return f"PartialState(process {me.rank} of {me.world_size}, {device}; {me.backend or 'no'} group)"


def _only(function: F, here: bool) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return call  # type: ignore[return-value]
