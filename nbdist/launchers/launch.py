"""`nbdist.launch`: one function on N ranks, from Python, in a notebook or outside of one."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from nbdist.config.detect import choose_ranks
from nbdist.launchers import client
from nbdist.launchers.cell import RETURN_LIMIT, Request, Screen, run_cell
from nbdist.launchers.errors import CannotComeBack
from nbdist.launchers.pool import Pool, PoolOptions
from nbdist.launchers.screen import MODES, MergedScreen
from nbdist.launchers.settling import settle
from nbdist.shipping import RankedValue
from nbdist.shipping.wire import RESULT


class Values(Sequence[Any]):
    """What the function returned on every rank: item i is rank i's."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return "[" + ", ".join(f"{rank}: {value!r}" for rank, value in enumerate(self._values)) + "]"


def launch(
    function: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    gpus: int | None = None,
    output: str = "merged",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = RETURN_LIMIT,
    **kwargs: Any,
) -> Values:
    """Call `function(*args, **kwargs)` on every one of N ranks and return what each returned.

    The ranks are processes of this machine with a `torch.distributed` group open (gloo on the CPU, NCCL beside it
    on GPUs); they end with the call.
    Functions and classes of `__main__` travel by value, tensors and arrays in shared memory. As in a
    `%%distributed` cell, objects that
    the function is given and that rank 0 changes are changed here, in place.

    Args:
        ranks: how many, on the CPU. Default: one for each GPU, else one for each physical core, at least 2.
        gpus: how many, on one GPU each; exclusive with `ranks`.
        output: "merged" (other ranks' lines have their rank in front), "rank0" or "none".
        timeout: seconds after which it is stopped; CellTimeout says where each rank was.
        env: variables set on the ranks for this call.
        limit: bytes that may come back from rank 0; what is larger is an error here, since the ranks end.

    Raises:
        What the first failing rank raised, with that rank's traceback; RankLost when one died; CannotShip before
        anything started; CannotComeBack when a value cannot leave its rank.
    """
    if output not in MODES:
        raise ValueError(f"output={output!r}: takes one of {', '.join(MODES)}")
    if sys.platform == "win32":
        raise OSError("nbdist runs on Linux and macOS; on Windows use WSL 2")
    if not callable(function):
        raise TypeError(f"launch({function!r}): takes a function, and what to call it with")
    try:
        size, device, _ = choose_ranks(ranks=ranks, gpus=gpus, count_gpus=client.count_gpus)
    except ValueError as error:
        raise type(error)(_as_arguments(str(error))) from None
    namespace = _namespace_of(function)
    pool = Pool(PoolOptions(size, device), namespace, client.supervisor)
    screen: Screen = MergedScreen(output)
    request = Request(
        files=_files_of(function),
        environment=dict(env or {}),
        timeout=timeout,
        extra=(function, args, kwargs),
        limit=limit,
        only=None,
    )
    try:
        settle(pool, screen)
        first = run_cell(pool, request, screen).conclude(screen)
        values = [first, *(pool.peek(RESULT, range(1, size)) if size > 1 else ())]
        for rank, value in enumerate(values):
            if isinstance(value, RankedValue):
                raise CannotComeBack(f"what {_name(function)} returned on rank {rank} cannot come back: {value!r}")
        return Values(values)
    finally:
        pool.end()


def _as_arguments(text: str) -> str:
    """What is said about options of the magic, as said about arguments."""
    names = {"-n": "ranks", "--cpus": "ranks", "--gpus": "gpus"}
    return re.sub(r"(?<!\w)(-n|--cpus|--gpus)(?: (\d+))?\b", lambda m: names[m[1]] + (f"={m[2]}" if m[2] else ""), text)


def _namespace_of(function: Any) -> dict[str, Any]:
    """The globals that travel with a function of `__main__`; a function of a module is imported on the ranks."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
        return function.__globals__
    return {"__name__": "__main__"}


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _files_of(function: Any) -> tuple[str, ...]:
    while hasattr(function, "func"):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return (code.co_filename,) if code is not None else ()
