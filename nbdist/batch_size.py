"""find_executable_batch_size: call again with less when memory runs out, on all ranks alike."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from nbdist import checks, messages, state
from nbdist.regroup import Meeting

_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, MPS
    "can't allocate memory",  # torch's CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",  # what cuDNN says when it finds no room to work in
)
_DONE, _MEMORY, _FREED, _FAILED = "done", "memory", "freed", "failed: "


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorator: the function is called with a batch size as its first argument, and again with a smaller one when
    memory runs out.

    All ranks call it, and all of them try again when it happens to one; those that wait for that one in a collective
    get out of it (with gloo at once; with NCCL when NCCL gives up: see `nbdist.regroup`). So make and prepare the
    model, the optimizer and the loaders inside the function, from nothing.

    Args:
        function: takes the batch size first, then what the decorated function is called with.
        starting_batch_size: the first to try. A later call starts from the one that worked last.
        reduce_batch_size_fn: gives the next batch size; called with the one that was too big if it takes an argument.
            Default: nine tenths of it.

    Raises:
        RuntimeError: 0 was reached, or another rank failed otherwise. TypeError: a batch size was passed in a call.
            TypeError, ValueError: an argument that is none.
    """
    wants = "the first batch size to try, a whole number of at least 1"
    starting_batch_size = checks.whole(starting_batch_size, "find_executable_batch_size: starting_batch_size", wants, 1)
    if reduce_batch_size_fn is not None:
        checks.called(reduce_batch_size_fn, "find_executable_batch_size: reduce_batch_size_fn")
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    checks.called(function, "find_executable_batch_size: function")
    name = getattr(function, "__name__", "the function")
    worked = starting_batch_size

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        nonlocal worked
        _refuse_batch_size(function, name, args)
        size = worked
        state.current()
        meeting = Meeting(f"find_executable_batch_size({name})") if messages.ranks() > 1 else None
        while True:
            if size < 1:
                raise RuntimeError(
                    f"{name}: memory ran out at every batch size from {worked} down. Make the model or the samples "
                    "smaller"
                )
            free_memory()
            good, result = (
                _alone(function, size, args, kwargs)
                if meeting is None
                else _together(meeting, function, size, args, kwargs)
            )
            if good:
                worked = size
                return result
            smaller = _next(reduce_batch_size_fn, size)
            smaller = smaller if meeting is None else meeting.share(smaller)
            if smaller >= size:
                raise ValueError(f"reduce_batch_size_fn gave {smaller} after {size}; it has to give less")
            size = smaller

    return decorated


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this, or what caused it, says that there was not memory enough, on whatever device."""
    import torch

    seen: set[int] = set()
    told: BaseException | None = error
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        if isinstance(told, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(told, RuntimeError) and any(text in str(told) for text in _TEXTS):
            return True
        told = told.__cause__
    return False


def free_memory() -> None:
    """Garbage goes, and what torch keeps of a device's memory for later."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def _alone(function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
    try:
        return True, function(size, *args, **kwargs)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        _let_go(error)
    return False, None


def _together(meeting: Meeting, function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
    meeting.begin()
    result = None
    try:
        result = function(size, *args, **kwargs)
        meeting.tell(_DONE)
    except Exception as error:
        if ran_out_of_memory(error):
            meeting.tell(_MEMORY)
            meeting.free()
        elif _was_cut(meeting):
            meeting.tell(_FREED)
        else:
            with contextlib.suppress(RuntimeError):  # nobody is there to hear; this rank's own error is what counts
                meeting.tell(_FAILED + f"{type(error).__name__}: {error}")
            raise
        _let_go(error)
    words = meeting.words()
    for rank, word in enumerate(words):
        if word.startswith(_FAILED):
            raise messages.echo(f"rank {rank} {word}")
    if all(word == _DONE for word in words):
        return True, result
    meeting.renew()
    return False, None


def _was_cut(meeting: Meeting) -> bool:
    """Whether another rank ran out of memory, and so a collective was cut under this one."""
    try:
        return meeting.said_so_far(_MEMORY)
    except RuntimeError:  # that one has ended
        return False


def _let_go(error: BaseException) -> None:
    """Nothing that the frames of an exception hold stays alive with it."""
    told: BaseException | None = error
    while told is not None:
        traceback.clear_frames(told.__traceback__)
        told.__traceback__ = None
        told = told.__cause__ or told.__context__


def _next(reduce: Callable[..., int] | None, size: int) -> int:
    if reduce is None:
        return int(size * 0.9)
    try:
        takes = bool(inspect.signature(reduce).parameters)
    except ValueError:
        takes = True
    return int(reduce(size) if takes else reduce())


def _refuse_batch_size(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> None:
    try:
        inspect.signature(function).bind_partial(None, *args)
    except TypeError:
        given, right = ", ".join(map(repr, args)), ", ".join(map(repr, args[1:]))
        raise TypeError(
            f"{name}({given}): the decorator gives the batch size, which is the first argument. Call {name}({right})"
        ) from None
