"""`notebook_launcher` and `debug_launcher`: Accelerate's signatures on the ranks of this package.

Accelerate forks the notebook's process, so it refuses once CUDA or an Accelerator is there, and nothing comes back.
These start fresh ranks that never were the notebook: what the function reads goes to them, and what rank 0 made of it
comes back in place, as with a cell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbdist import checks
from nbdist.config.detect import Choice, choose_ranks
from nbdist.launchers import client
from nbdist.launchers.devices import PoolOptions
from nbdist.launchers.errors import NotTakenOver, StartFailed
from nbdist.launchers.launch import Call, Values, as_arguments, check_place, name_of, shown_as_here
from nbdist.launchers.screen import MergedScreen
from nbdist.shipping import CannotShip

PRECISIONS = ("no", "fp16", "bf16", "fp8")

# What Accelerate hands to torchrun's agent, with its defaults. Ranks of one machine are started by nbdist's own
# supervisor, over sockets that it inherits: there is no agent, no port and no rendezvous to configure.
_AGENT: dict[str, Any] = {
    "use_port": "29500",
    "master_addr": "127.0.0.1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}
_said: set[str] = set()


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Values | None:
    """Call `function(*args)` on N fresh ranks; they end with the call.

    It does not matter what the notebook has done before: CUDA may be initialised, an Accelerator may exist, threads
    may run. The function may be a lambda or a closure, and what it and `args` hold is changed here as rank 0 changed
    it there.

    Args:
        function: what to run. It is called as `function(*args)`, without a rank.
        args: its arguments, a tuple.
        num_processes: how many ranks. Default: one for each GPU, else one for each physical core, at least 2.
        mixed_precision: "no", "fp16", "bf16" or "fp8", set on the ranks as ACCELERATE_MIXED_PRECISION.
        node_rank, num_nodes: only one machine; use torchrun for more.
        max_restarts: after an exception or the death of a rank it is run again, up to so many times, on new ranks and
            from what the notebook holds: what a failed attempt made is dropped, but for the last one's.
        use_port, master_addr, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, monitor_interval,
        log_line_prefix_template: accepted; there is nothing for them to configure, which is said once.

    Returns:
        None when the function returned None on every rank (Accelerate always returns None), else every rank's value,
        by rank. A value that cannot leave its rank is None there, and is named.

    Raises:
        What the first failing rank raised, with that rank's traceback, and what `nbdist.launch` raises.
    """
    given = locals()
    with shown_as_here():
        check_place("notebook_launcher", function)
        args = _checked_args(function, args)
        if mixed_precision is None or str(mixed_precision).lower() not in PRECISIONS:
            raise ValueError(f"mixed_precision={checks.short(mixed_precision)}: takes one of {', '.join(PRECISIONS)}")
        num_nodes = checks.whole(num_nodes, "notebook_launcher: num_nodes", "a number of machines", 1)
        node_rank = checks.whole(node_rank, "notebook_launcher: node_rank", "the number of a machine", 0)
        if num_nodes != 1 or node_rank != 0:
            raise NotImplementedError(
                f"num_nodes={num_nodes}, node_rank={node_rank}: notebook_launcher starts ranks on this machine only. "
                "For several machines put the function into a script and start it with "
                "`torchrun --nnodes N --nproc-per-node M script.py` on each: Accelerator() there joins their group"
            )
        checks.whole(max_restarts, "notebook_launcher: max_restarts", "a number, 0 or more", 0)
        _refuse_tpu()
        _say_unused({name: given[name] for name in _AGENT})
        try:
            choice = choose_ranks(ranks=num_processes, devices=client.devices)
        except ValueError as error:
            raise type(error)(as_arguments(str(error), count="num_processes")) from None
        reason = as_arguments(choice.reason, count="num_processes")
        print(f"Launching training on {_places(choice)} ({reason}).")
        env = {"ACCELERATE_MIXED_PRECISION": str(mixed_precision).lower()}
        return _with_restarts(Call(function, args, {}, PoolOptions.of(choice), env=env), max_restarts)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Values | None:
    """Call `function(*args)` on N fresh ranks on the CPU, whatever else there is.

    Returns and raises what `notebook_launcher` does; nothing is printed about the start.
    """
    with shown_as_here():
        check_place("debug_launcher", function)
        args = _checked_args(function, args)
        try:
            choice = choose_ranks(cpus=num_processes, devices=client.devices)
        except ValueError as error:
            raise type(error)(as_arguments(str(error), count="num_processes")) from None
        env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "yes"}
        return _told(Call(function, args, {}, PoolOptions.of(choice), env=env))


def _with_restarts(call: Call, restarts: int) -> Values | None:
    for attempt in range(restarts + 1):
        count = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
        last = attempt == restarts
        try:
            return _told(replace(call, env={**call.env, **count}, keep_after_error=last))
        except (CannotShip, NotTakenOver, StartFailed):
            raise  # nothing has run, and nothing would be different the next time
        except Exception as error:
            if last:
                raise
            notes = "; ".join(getattr(error, "__notes__", ()))
            _notice(
                f"restart {attempt + 1} of {restarts}, from what the notebook holds, after {type(error).__name__}: "
                f"{error}" + (f" ({notes})" if notes else "")
            )
    raise AssertionError("unreachable")


def _told(call: Call) -> Values | None:
    """Run it. Nothing, when there is nothing to tell: a notebook would show it as Out[n]."""
    values = call.run()
    for rank, why in call.stayed.items():
        _notice(f"what {name_of(call.function)} returned on rank {rank} cannot come back: {why}")
    return values if any(value is not None for value in values) else None


def _checked_args(function: Any, args: Any) -> tuple[Any, ...]:
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Sequence):
        raise TypeError(
            f"args={checks.short(args)}: takes a tuple of what {name_of(function)} is called with, such as args=(x,)"
        )
    return tuple(args)


def _refuse_tpu() -> None:
    """As Accelerate does, a TPU is looked for by what Colab and Kaggle set."""
    if os.environ.get("PJRT_DEVICE") == "TPU" or os.environ.get("TPU_NAME"):
        raise NotImplementedError(
            "this machine offers a TPU (PJRT_DEVICE or TPU_NAME is set), which this version of nbdist cannot use. To "
            "run on its CPU all the same, take the variable out of os.environ first"
        )


def _say_unused(given: Mapping[str, Any]) -> None:
    new = [name for name, value in given.items() if str(value) != str(_AGENT[name]) and name not in _said]
    _said.update(new)
    if new:
        _notice(
            f"{', '.join(new)}: accepted, and not needed: the ranks of one machine are started without an agent, a "
            "port or a rendezvous of their own"
        )


def _notice(line: str) -> None:
    MergedScreen().notice(line)


def _places(choice: Choice) -> str:
    what = "CPU" if choice.device == "cpu" else "GPU"
    return f"1 {what} rank" if choice.ranks == 1 else f"{choice.ranks} {what} ranks"
