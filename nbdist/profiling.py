"""torch's profiler as a context manager, with one trace file a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbdist import checks, state
from nbdist.kwargs import ProfileKwargs

_TRACE = "profile_{rank}.json"


def profiler(options: ProfileKwargs) -> Any:
    """The torch.profiler.profile that the options describe.

    Raises:
        ValueError: an activity that torch does not know. TypeError: no schedule comes of its arguments.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    planned = options.schedule_option
    try:
        plan = None if planned is None else schedule(**planned)
    except (TypeError, AssertionError) as error:
        raise TypeError(
            f"ProfileKwargs.schedule_option is {checks.short(planned)}; it takes the arguments of "
            f"torch.profiler.schedule, which says: {error}"
        ) from None
    activities = None
    if options.activities is not None:
        known = {name.lower(): one for name, one in ProfilerActivity.__members__.items()}
        unknown = [name for name in options.activities if str(name).lower() not in known]
        if unknown:
            raise ValueError(f"ProfileKwargs.activities has {unknown[0]!r}; there are {', '.join(map(repr, known))}")
        activities = [known[name.lower()] for name in options.activities]
    return profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )


@contextmanager
def profiling(options: ProfileKwargs) -> Iterator[Any]:
    """Run the body under the profiler; with `output_trace_dir` write this rank's trace there, and wait for the other
    ranks' files.
    """
    with profiler(options) as running:
        yield running
    if options.output_trace_dir is None:
        return
    folder = os.path.expanduser(options.output_trace_dir)
    os.makedirs(folder, exist_ok=True)
    try:
        running.export_chrome_trace(os.path.join(folder, _TRACE.format(rank=state.current().rank)))
    except (RuntimeError, AssertionError) as error:
        if options.schedule_option is None:
            raise
        state.note_once(f"no trace was written: the schedule {options.schedule_option} ended without one ({error})")
    state.wait_for_everyone()
