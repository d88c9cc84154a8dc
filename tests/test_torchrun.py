"""The runtime under torchrun: this package starts the process group, and an error ends the script on all ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from nbdist import Accelerator, InitProcessGroupKwargs, state
from tests.ranks import run_ranks

SCRIPT = """
import json, sys, time, warnings, torch
from datetime import timedelta
import torch.distributed as dist
from nbdist import Accelerator, InitProcessGroupKwargs, find_executable_batch_size
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=41))])
warnings.simplefilter("error")
Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=41))])  # the same again: no note
warnings.simplefilter("default")
rank, tried = accelerator.process_index, []
told = {"timeout": dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()}

@find_executable_batch_size(starting_batch_size=4)
def train(batch_size):
    tried.append(batch_size)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loss = model(torch.full((batch_size, 1), 1.0 + rank)).mean()
    if rank == 1 and batch_size > 2:
        torch.empty(10**15)
    accelerator.backward(loss)
    return model.module.weight.grad.item()

told["gradient"], told["tried"] = train(), tried
told["timeout after"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
accelerator.wait_for_everyone()
try:
    if rank == 1:
        time.sleep(1)
        raise KeyError("boom")
    accelerator.gather(torch.ones(1))
except Exception as error:
    told["error"], told["at"] = f"{type(error).__name__}: {error}", time.time()
    raise
finally:
    json.dump(told, open(f"{sys.argv[1]}/{rank}", "w"))
"""

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.ranks
def test_torchrun(tmp_path: Path) -> None:
    """Options of the group; a rank out of memory while the other waits for it; an exception that ends all ranks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen(
        [sys.executable, *LAUNCHER, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's ranks too
    ended = time.time()
    assert process.returncode != 0 and "boom" in output, output
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    for told in (first, second):
        assert told["timeout"] == told["timeout after"] == 41
        assert told["tried"] == [4, 3, 2] and told["gradient"] == 1.5
    assert second["error"] == "KeyError: 'boom'" and "another rank has ended" in first["error"]
    assert first["at"] - second["at"] < 5 and ended - second["at"] < 15  # the figure is 2 s; this machine may be busy


def _too_late(rank: int, ranks: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    return [str(one.message) for one in caught]


@pytest.mark.ranks
def test_a_group_that_is_there_goes_on_as_it_is() -> None:
    note = "timeout=datetime.timedelta(seconds=5): the process group is there already, and goes on as it is"
    assert run_ranks(_too_late, 2) == [[note], []]
    assert torch.distributed.is_available() and state.pool_groups is None
