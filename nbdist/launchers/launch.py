"""`nbdist.launch`: one function on N ranks, from Python, in a notebook or outside of one."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol, overload

from nbdist import checks
from nbdist.config.detect import choose_ranks, inside_a_rank
from nbdist.launchers import client
from nbdist.launchers.cell import run_cell
from nbdist.launchers.devices import PoolOptions, check_free
from nbdist.launchers.errors import CannotComeBack, missing_name, say_why_missing
from nbdist.launchers.pool import Pool
from nbdist.launchers.request import RETURN_LIMIT, Request, Result, Screen
from nbdist.launchers.screen import MODES, MergedScreen
from nbdist.launchers.settling import settle
from nbdist.shipping import RankedValue, handle_facts
from nbdist.shipping.errors import in_words
from nbdist.shipping.wire import RESULT

IN_A_NOTEBOOK = "nbdist.magics.function"  # a Surface, by name: this package knows no IPython


class Surface(Protocol):
    """Where a launched function's output goes and its errors are shown."""

    runner: str  # the module of the CellRunner

    def screen(self, mode: str, ranks: int) -> Screen: ...
    def sources(self) -> dict[str, str]:
        """The user's code that exists in no file, for the ranks' tracebacks: {file name: text}."""

    def settings(self) -> dict[str, Any]:
        """The global settings of libraries here, which are to hold on the ranks."""

    def show_as_here(self, error: BaseException) -> None:
        """Called before an error is raised: hide our own frames where that can be done."""


class Plain:
    """A Python without a notebook: standard streams."""

    runner = "nbdist.worker.calls"

    def screen(self, mode: str, ranks: int) -> Screen:
        return MergedScreen(mode, ranks=range(ranks))

    def sources(self) -> dict[str, str]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {}

    def show_as_here(self, error: BaseException) -> None:
        pass


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
    gpus: int | Sequence[int] | None = None,
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
        gpus: how many, on one GPU each, or which ones ([0, 2]: rank i on the i-th); exclusive with `ranks`.
        output: "merged" (rank 0's lines, and others' where they differ, with their rank in front), "all" (every
            line with its ranks in front), "rank0" or "none".
        timeout: seconds after which it is stopped; CellTimeout says where each rank was.
        env: variables set on the ranks for this call.
        limit: bytes that may come back from rank 0; what is larger is an error here, since the ranks end.

    Raises:
        What the first failing rank raised, with that rank's traceback; RankLost when one died; CannotComeBack when a
        value cannot leave its rank. Before anything has started: CannotShip, and TypeError or ValueError for a wrong
        argument.
    """
    with shown_as_here():
        if output not in MODES:
            raise ValueError(f"output={checks.short(output)}: takes one of {', '.join(MODES)}")
        check_place("launch", function)
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
            raise checks.wrong("launch: timeout", timeout, "a number of seconds, more than 0")
        limit = checks.whole(limit, "launch: limit", "a number of bytes", 0)
        checks.kind(env, Mapping | None, "launch: env", "a dict of variables and their texts")
        for name, value in (env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise checks.wrong(f"launch: env[{name!r}]", value, "a text, as environment variables do")
        try:
            choice = choose_ranks(ranks=ranks, gpus=gpus, devices=client.devices)
        except ValueError as error:
            raise type(error)(as_arguments(str(error))) from None
        call = Call(function, args, kwargs, PoolOptions.of(choice), output, dict(env or {}), timeout, limit)
        if choice.surprise:
            _surface().screen(output, call.options.ranks).notice(f"{call.options}: {as_arguments(choice.reason)}")
        values = call.run()
        for rank, why in call.stayed.items():
            raise CannotComeBack(f"what {name_of(function)} returned on rank {rank} cannot come back: {why}")
        return values


@contextlib.contextmanager
def shown_as_here() -> Iterator[None]:
    """An error that leaves the body is shown in a notebook with the user's frames only."""
    try:
        yield
    except BaseException as error:
        _surface().show_as_here(error)
        raise


def check_place(launcher: str, function: Any) -> None:
    """Raises where no ranks can be started, before anything is."""
    if (rank := inside_a_rank()) is not None:
        raise RuntimeError(
            f"{launcher} was called on rank {rank}: ranks start no ranks of their own. Call it from an ordinary cell "
            "or script, or call the function itself: every rank that is here runs it"
        )
    if not callable(function):
        raise TypeError(f"{launcher}({checks.short(function)}): takes a function, and what to call it with")


@dataclass
class Call:
    """One function, called once on ranks of its own.

    Attributes:
        options: how many ranks, on what; the runner is chosen here.
        keep_after_error: whether what rank 0 made before an error is put in place here.
        The others are the arguments of `launch`.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: PoolOptions
    output: str = "merged"
    env: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None
    limit: int = RETURN_LIMIT
    keep_after_error: bool = True
    stayed: dict[int, str] = field(default_factory=dict, init=False)

    def run(self) -> Values:
        """Every rank's value; the ranks have ended when this returns. Of what cannot leave its rank None is left here,
        and what it was is in `stayed`.
        """
        surface = _surface()
        options = replace(self.options, runner=surface.runner)
        pool = Pool(options, vars(sys.modules["__main__"]), lambda: client.supervisor(preload=[surface.runner]))
        screen, sources = surface.screen(self.output, options.ranks), surface.sources()
        request = Request(
            runs={"sources": sources, "globals": surface.settings()},
            files=tuple(dict.fromkeys([*sources, *_files_of(self.function)])),
            environment=self.env,
            timeout=self.timeout,
            extra=(self.function, tuple(self.args), dict(self.kwargs)),
            limit=self.limit,
            keep_after_error=self.keep_after_error,
        )
        try:
            check_free(options)
            settle(pool, screen)
            first = _conclude(run_cell(pool, request, screen), screen)
            values = [first, *(pool.peek(RESULT, range(1, pool.size)) if pool.size > 1 else ())]
            for rank, value in enumerate(values):
                if isinstance(value, RankedValue):
                    self.stayed[rank], values[rank] = _what_it_is(value), None
            return Values(values)
        finally:
            pool.end()


def _conclude(result: Result, screen: Screen) -> Any:
    if result.interrupted:
        for note in result.notes:
            screen.notice(note)
        there = "; what rank 0 had made until then is here" if result.arrival is not None else ""
        raise KeyboardInterrupt(f"stopped, and the ranks were ended{there}")
    name = missing_name(result.error)
    if name in result.left_out:
        say_why_missing(
            result.error,
            f"{name!r} is here, but it could not be sent: {result.left_out[name]}. Make it in the function",
        )
    return result.conclude(screen)


def _what_it_is(handle: RankedValue) -> str:
    facts = handle_facts(handle)
    size = f" of {in_words(facts.size)}" if facts.size is not None else ""
    return f"a {facts.type_name}{size}" + (f": {facts.reason}" if facts.reason else "")


def _surface() -> Surface:
    """A notebook's or a terminal IPython's, when this is one; IPython is not imported for the question."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return Plain() if shell is None else import_module(IN_A_NOTEBOOK).NotebookSurface(shell)


_OPTION = re.compile(r"(?<!\w)(-n|--cpus|--gpus)(?: (-?\d+(?:,\d+)+\b|\d+,(?=:)|-?\d+\b))?")


def as_arguments(text: str, count: str = "ranks") -> str:
    """What is said about options of the magic, as said about arguments; `count` is what `-n` is called."""
    names = {"-n": count, "--cpus": count, "--gpus": "gpus"}

    def argument(match: re.Match[str]) -> str:
        value = match[2]
        if value and "," in value:
            value = f"[{value.strip(',').replace(',', ', ')}]"
        return names[match[1]] + (f"={value}" if value else "")

    return _OPTION.sub(argument, text)


def name_of(function: Any) -> str:
    """What to call it in a message."""
    return getattr(function, "__qualname__", None) or repr(function)


def _files_of(function: Any) -> tuple[str, ...]:
    """The file whose lines are the user's: that of the function under its decorators and partials."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return (code.co_filename,) if code is not None else ()
