"""Who am I, seeds, helpers for the main process, and the agreed stop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from nbdist import PartialState, set_seed, state
from tests import training
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent


def test_one_process() -> None:
    me = PartialState()
    assert (me.process_index, me.local_process_index, me.num_processes) == (0, 0, 1)
    assert me.is_main_process and me.is_local_main_process and me.is_last_process and not me.use_distributed
    assert me.distributed_type == "NO" and me.backend is None
    assert state.current().device_reason and "one process" in state.current().backend_reason
    me.wait_for_everyone()
    assert str(me.device) in repr(me)


def test_the_worker_can_fix_the_device() -> None:
    state.use_device("meta", "a test wants it")
    try:
        assert state.current().device.type == "meta" and state.current().device_reason == "a test wants it"
        assert state.current(cpu=True).device.type == "cpu" and state.current().device.type == "meta"
    finally:
        state._told = state._known = None


def test_set_seed_seeds_everything() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    set_seed(5)
    first = draw()
    set_seed(5)
    assert draw() == first
    set_seed(6)
    assert draw() != first and state.data_seed() == 6
    for wrong in ("42", 4.0, None):
        before = draw()
        set_seed(7)
        with pytest.raises(TypeError, match=r"^set_seed: the seed is .*; it must be a whole number"):
            set_seed(wrong)  # type: ignore[arg-type]
        after = draw()
        set_seed(7)
        assert state.data_seed() == 7 and draw() == after != before, "a seed that is none has changed something"
    set_seed(numpy.int64(3))  # type: ignore[arg-type]
    assert type(state.data_seed()) is int
    set_seed(-1)
    set_seed(0)


def test_importing_state_leaves_torch_alone() -> None:
    code = "import sys, nbdist.state; assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _helpers(rank: int, ranks: int) -> dict[str, Any]:
    me, order = PartialState(), []

    def note(what: str) -> None:
        order.append((time.monotonic(), what))

    found: dict[str, Any] = {"who": (me.process_index, me.num_processes, me.is_main_process, me.is_last_process)}
    found["type"] = str(me.distributed_type)
    with me.main_process_first():
        if rank == 0:
            time.sleep(0.2)
        note("done")
    found["times"] = order[0][0]
    started = time.monotonic()
    try:
        with me.main_process_first():
            if me.is_main_process:
                raise RuntimeError("boom")
    except RuntimeError as error:
        found["error"] = str(error)
    found["quick"] = time.monotonic() - started < 5
    try:
        with me.local_main_process_first():
            if me.is_main_process:
                raise SystemExit(3)
    except BaseException as error:
        found["exit"] = (type(error).__name__, str(error))
    found["decorated"] = me.on_main_process(lambda: rank)(), me.on_last_process(lambda: rank)()
    try:
        if rank:
            me.wait_for_everyone()
        else:
            with me.main_process_first():
                pass
    except RuntimeError as error:
        found["apart"] = str(error)
    me.wait_for_everyone()
    set_seed(4, device_specific=True)
    found["drawn"], found["data seed"] = torch.rand(1).item(), state.data_seed()
    return found


@pytest.mark.ranks
def test_helpers_for_the_main_process() -> None:
    first, second = run_ranks(_helpers, 2)
    assert (first["who"], second["who"]) == ((0, 2, True, False), (1, 2, False, True))
    assert first["type"] == "MULTI_CPU"
    assert first["times"] < second["times"]
    assert (first["error"], second["error"]) == ("boom", "main process failed: boom")
    assert first["quick"] and second["quick"]
    assert (first["exit"], second["exit"]) == (("SystemExit", "3"), ("RuntimeError", "local main process failed: 3"))
    assert (first["decorated"], second["decorated"]) == ((0, None), (None, 1))
    assert first["apart"] == second["apart"]
    assert "rank 0 is in main process first" in first["apart"] and "rank 1 is in wait_for_everyone" in first["apart"]
    assert first["drawn"] != second["drawn"] and first["data seed"] == second["data seed"] == 4


def _stopped(rank: int, ranks: int) -> list[Any]:
    """A control thread per rank agrees on a step, as a pool's worker does; the ranks run at different speeds."""
    import torch.distributed as dist

    from nbdist import Accelerator

    store = dist.distributed_c10d._get_default_store()
    accelerator = Accelerator()
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    boundary, seen = state.step_boundary, []

    def agree(attempt: int) -> None:
        time.sleep(0.1)
        answer = boundary.freeze()
        store.set(f"{attempt}/{rank}", str(answer or 0))
        answers = [int(store.get(f"{attempt}/{other}")) for other in range(ranks)]
        boundary.release(max(answers) if all(answers) else None)

    for attempt in range(4):
        boundary.reset()
        control = threading.Thread(target=agree, args=(attempt,))
        control.start()
        try:
            while True:
                accelerator.backward(wrapped(torch.randn(2 + rank, 3)).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.002 * rank)
        except KeyboardInterrupt:
            control.join()
        seen.append((boundary.steps, training.flat(model)))
    return seen


@pytest.mark.ranks
def test_an_agreed_stop_leaves_steps_and_parameters_equal() -> None:
    first, second = run_ranks(_stopped, 2)
    assert first == second and all(steps > 1 for steps, _ in first)


SCRIPT = """
import os
import sys
import torch
from nbdist import Accelerator, utils
assert utils.gather(torch.ones(1)).sum() == int(os.environ.get("WORLD_SIZE", 1))
accelerator = Accelerator()
own = open(os.path.join(sys.argv[1], f"rank{accelerator.process_index}"), "w")  # the ranks' lines mix in one pipe
accelerator.print("printed by", accelerator.process_index, file=own)
rows = torch.ones(accelerator.process_index + 1)
who = f"rank={accelerator.process_index}/{accelerator.num_processes} {accelerator.device}"
print(who, accelerator.distributed_type, accelerator.gather(rows).tolist(), file=own)
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.backward(model(rows[:, None]).mean())
print("trained", file=own)
own.close()
accelerator.wait_for_everyone()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [0, 2], ids=["plain", "torchrun"])
def test_scripts(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's ranks too
    # The exit status is not looked at: gloo under torch's DDP can abort a process that is ending (plain torch's too).
    written = {file.name: file.read_text().splitlines() for file in tmp_path.glob("rank*")}
    if ranks:
        first, second = (f"rank={rank}/2 cpu MULTI_CPU [1.0, 1.0, 1.0]" for rank in range(2))
        right = {"rank0": ["printed by 0", first, "trained"], "rank1": [second, "trained"]}
    else:
        right = {"rank0": ["printed by 0", "rank=0/1 cpu NO [1.0]", "trained"]}
    assert written == right, output
