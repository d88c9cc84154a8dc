"""What surrounds a cell on a rank: environment, working folder, import path, arguments, threads, seeds.

Rebuilt at the start of each cell from the notebook's as they are now, so that nothing leaks from one cell into the
next: a library
that wrote `ACCELERATE_USE_DEEPSPEED` into os.environ would otherwise configure the next one.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from typing import Any

from nbdist import system

DEFAULT_TORCH_SEED = 67280421310721  # c10's default_rng_seed_val: what a fresh process starts with


def rank_variables(spec: dict[str, Any]) -> dict[str, str]:
    """What torchrun would have set, for this rank of a pool on one host.

    TORCHELASTIC_USE_AGENT_STORE makes `init_process_group("env://")` a client of our store on rank 0 as well;
    without it rank 0
    would try to bind the port. ACCELERATE_USE_CPU: without it Hugging Face Accelerate trains a copy on each rank,
        silently.
    """
    rank, size = str(spec["rank"]), str(spec["world_size"])
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": spec["pool"],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": system.loopback(),
        "TORCH_FR_BUFFER_SIZE": "128",  # torch's flight recorder, gloo included: who waits in what
        "TORCH_GLOO_LAZY_INIT": "0",  # a rank that waits until another one connects could not be cut free by Stop
        "OMP_NUM_THREADS": str(spec["threads"]),
    }
    if spec["device"] == "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    if spec.get("devices"):
        variables[spec["variable"]] = ",".join(spec["devices"])
    return variables


class Surroundings:
    """The notebook's surroundings as last told, put in place again and again."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._rank = rank_variables(spec)
        self.told(spec["surroundings"])

    def told(self, new: dict[str, Any] | None) -> None:
        """The notebook's are these from now on; None: as before."""
        if new is not None:
            self._notebook = new
            threads = new["environment"].get("OMP_NUM_THREADS")
            self._wanted = {**new["environment"], **self._rank, **({"OMP_NUM_THREADS": threads} if threads else {})}

    def restore(self, extra: dict[str, str]) -> str | None:
        """Put everything in place, `extra` (--env) on top. Returns what could not be, as a line for the user."""
        wanted = {**self._wanted, **extra} if extra else self._wanted
        if dict(os.environ) != wanted:
            for name in os.environ.keys() - wanted.keys():
                del os.environ[name]
            for name, value in wanted.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
        if sys.path != self._notebook["path"]:
            sys.path[:] = self._notebook["path"]
        sys.argv[:] = self._notebook["argv"]
        try:
            if os.getcwd() != self._notebook["folder"]:
                os.chdir(self._notebook["folder"])
        except OSError as error:
            try:
                os.chdir(self._notebook["folder"])
            except OSError:
                return f"cannot enter the notebook's folder {self._notebook['folder']!r}: {error}"
        return None


def seed_as_a_fresh_process() -> None:
    """As N fresh processes would: torch's default generator equal on all, Python's and numpy's different.

    A forked rank has the fork server's state: without this numpy would draw the same numbers on every rank and
    after every restart.
    """
    import torch

    torch.manual_seed(DEFAULT_TORCH_SEED)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def silence_false_alarms() -> None:
    """An optimizer that travels loses the mark that its scheduler set on `step`, and torch would warn once."""
    warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")


def set_threads(count: int) -> None:
    """OMP_NUM_THREADS comes too late for a forked torch."""
    import torch

    torch.set_num_threads(count)
