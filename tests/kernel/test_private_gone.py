"""Each private interface of nbdist/private.py taken away, in real ranks: the fallback is what the list says.

What torch itself needs cannot be deleted under it; there our own look at it is told that it is gone.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.kernel.notebook import Notebook
from tests.ranks import run_ranks

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

STUCK = "print('begun', 'ab'[rank])\nif rank == 0: dist.barrier()\nwhile True: pass"
ALL_HERE = "value = torch.ones(1)\ndist.all_reduce(value)\nassert value.item() == 2"


def taken_away(nb: Notebook, code: str) -> None:
    """Run on fresh ranks, before anything else."""
    nb.ranks(
        f"import torch, torch.distributed as dist\nfrom torch.distributed import distributed_c10d as c10d\n{code}",
        "-n 2 --fresh --no-return",
    )


def stopped_in_a_collective(nb: Notebook) -> str:
    """Stop, with one rank in a barrier; returns what the cell says."""
    nb.ok("import torch, torch.distributed as dist")
    cell = nb.run(f"%%distributed -n 2\n{STUCK}", stop_when=lambda cell: cell.stdout.count("begun") == 2)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt", cell.text
    assert cell.stop_seconds is not None and cell.stop_seconds < 10
    return cell.stderr


def test_without_the_flight_recorder(nb: Notebook) -> None:
    taken_away(nb, "from torch._C import _distributed_c10d\ndel _distributed_c10d._dump_fr_trace")
    nb.ok("import torch, torch.distributed as dist")
    cell = nb.run("%%distributed -n 2 --timeout 0.5\nif rank == 0: dist.barrier()\nwhile True: pass")
    assert cell.error is not None and "rank 0 is in barrier at cell line 2" in cell.error[1], cell.text
    stopped_in_a_collective(nb)
    nb.ranks(ALL_HERE)


def test_without_the_table_of_groups(nb: Notebook) -> None:
    taken_away(nb, "from nbdist.worker import groups\ngroups._world = lambda: None")
    stopped_in_a_collective(nb)
    assert "the process groups were made again" in nb.ranks(ALL_HERE).stderr


def test_without_the_setter_of_the_default_group(nb: Notebook) -> None:
    taken_away(nb, "del c10d._update_default_pg")
    nb.ranks("dist.destroy_process_group()\nassert not dist.is_initialized()\ndist.init_process_group()\n" + ALL_HERE)
    nb.ranks("dist.destroy_process_group()")
    nb.ranks(ALL_HERE)


TRAINS = """
from nbdist import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
accelerator.backward(model(torch.full((1, 1), 1.0 + 2 * rank)).mean())
assert model.module.weight.grad.item() == 2.0, model.module.weight.grad
"""


def test_without_arming_the_reducer(nb: Notebook) -> None:
    taken_away(nb, "from nbdist.strategies import ddp\nddp._ARMING = ('gone',)\n" + TRAINS)


def test_without_the_halves_of_ddps_forward(nb: Notebook) -> None:
    loss = TRAINS.replace("torch.nn.Linear(1, 1, bias=False)", "Counting(1, 1, bias=False)").replace(
        "model(", "model.twice("
    )
    taken_away(
        nb,
        "class Counting(torch.nn.Linear):\n    def twice(self, rows): return self(rows)\n"
        "from torch.nn.parallel import DistributedDataParallel\nway = DistributedDataParallel._post_forward\n"
        f"del DistributedDataParallel._post_forward\n{loss}\nDistributedDataParallel._post_forward = way",
    )


def test_without_repairing_ddp(nb: Notebook) -> None:
    taken_away(nb, TRAINS + "del torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data")
    nb.ok("import torch, torch.distributed as dist")
    assert "a DistributedDataParallel that was interrupted cannot be put right: make it" in stopped_in_a_collective(nb)
    nb.ranks(ALL_HERE)
    nb.ranks(TRAINS)


def test_without_the_bucketed_broadcast(nb: Notebook) -> None:
    taken_away(
        nb,
        TRAINS
        + "import torch.distributed.utils\ndel torch.distributed.utils._sync_module_states\n"
        + "with torch.no_grad(): model.module.weight.fill_(float(rank + 5))\n"
        + "again = Accelerator().prepare(model)\nassert again.module.weight.item() == 5.0, again.module.weight",
    )


def test_without_foreach(nb: Notebook) -> None:
    taken_away(
        nb,
        "from nbdist import strategies, state\nstrategy = strategies.create('ddp', state.current())\n"
        "model = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2)).sum().backward()\n"
        "del torch._foreach_mul_\nstrategy.scale_gradients(model.parameters(), 3.0)\n"
        "assert model.weight.grad.tolist() == [[3.0, 3.0]]",
    )


def test_without_pin_memory(nb: Notebook) -> None:
    taken_away(
        nb,
        "import sys\nfrom nbdist.data.stream import Tail\nsys.modules['torch.utils.data._utils.pin_memory'] = None\n"
        "tail = Tail([1], 1, 2)\nassert tail.pin_memory() is tail and tail.value == [1]",
    )


def test_without_the_class_of_compiled_modules(nb: Notebook) -> None:
    gone = (
        "from nbdist.shipping import exporters\nexporters._BY_NAME.pop('torch._dynamo.eval_frame.OptimizedModule')\n"
        "exporters._version[0] += 1\n"
    )
    taken_away(nb, gone)
    nb.ok(gone)
    nb.ranks("compiled = torch.compile(torch.nn.Linear(1, 1), backend='eager')\ninside = compiled._orig_mod")
    assert nb.value("type(inside).__name__") == "Linear"


def test_without_the_unpickler_in_python(nb: Notebook) -> None:
    nb.ok("from nbdist.shipping import unpacking\nreally = unpacking._PythonUnpickler")
    nb.ok("unpacking._PythonUnpickler = None")
    try:
        nb.ok(
            "import os\nhere = os.getpid()\nclass Only:\n    def __reduce__(self):\n        return check, (here,)\n"
            "def check(pid):\n    import os\n    if os.getpid() == pid: raise ValueError('not here')\n    return Only()"
        )
        nb.ranks("good, bad = [1], Only()\ncheck\nNone")
        assert nb.value("(type(good).__name__, type(bad).__name__)") == ("RankedValue", "RankedValue")
        assert "not here" in nb.value("repr(good)")
    finally:
        nb.ok("unpacking._PythonUnpickler = really")
    nb.ranks("good, bad = [1], Only()\ncheck\nNone")
    assert nb.value("(type(good).__name__, type(bad).__name__)") == ("list", "RankedValue")
    assert nb.ranks("1 + 1").results[0]["text/plain"] == "2"


def test_without_the_layout_of_lists(nb: Notebook) -> None:
    nb.ok("from nbdist.shipping import plain\nplain._ADDRESSES_CAN_BE_COMPARED = False\nmany = list(range(50_000))")
    nb.ranks("many[7] = -1")
    nb.ok("many[8] = -2")
    nb.ranks("total = many[7] + many[8]\nmany.append(total)")
    assert nb.value("(many[-1], many[:2])") == (-3, [0, 1])
    nb.ok("plain._ADDRESSES_CAN_BE_COMPARED = True")


def _cut_and_heal(rank: int, ranks: int, port: int) -> tuple[int, str, float]:
    import threading
    import time

    import torch
    import torch.distributed as dist

    from nbdist.worker import groups as module
    from nbdist.worker.groups import Groups

    dist.destroy_process_group()
    module._BELOW_ALL = "gone"
    groups = Groups({"rank": rank, "world_size": ranks, "port": port, "store_key": "key", "device": "cpu"})
    groups.open()
    both = dist.new_group([0, 1])
    cut: list[int] = []
    if rank == 0:
        threading.Timer(0.3, lambda: cut.append(groups.cut(store_too=False))).start()
        try:
            dist.all_reduce(torch.ones(1), group=both)
        except RuntimeError:
            pass
    else:
        time.sleep(0.6)
        groups.cut(store_too=False)
    how = groups.heal(1, sorted(group.name for group in groups.known()), groups.count())
    value = torch.ones(1)
    dist.all_reduce(value, group=both)
    return (cut or [0])[0], how, value.item()


def test_without_the_function_below_all_groups() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    told: list[Any] = run_ranks(_cut_and_heal, 2, store.port)
    assert told[0][0] > 0, "the sockets of new groups were noted, so there was something to cut"
    assert [(how, value) for _, how, value in told] == [("healed", 2.0)] * 2


def test_without_multiprocessings_pids() -> None:
    code = """
    import multiprocessing
    from multiprocessing import forkserver, resource_tracker
    from nbdist.launchers import supervisor

    forkserver.ensure_running()
    known = supervisor.own_children()
    del forkserver._forkserver._forkserver_pid
    guessed = supervisor.own_children()
    forkserver._forkserver._forkserver_pid = known[0]
    resource_tracker._resource_tracker._pid, tracker = None, resource_tracker._resource_tracker._pid
    also = supervisor.own_children()
    resource_tracker._resource_tracker._pid = tracker
    assert known == guessed == also, (known, guessed, also)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_without_the_shape_of_cloudpickles_classes() -> None:
    from nbdist.shipping.pickler import _with_slots

    class Slotted:
        __slots__ = ("_private",)

    for reduced in ((len, ("text",)), (len, (), None), (len, ("a", "b", "c", "d"), (1,))):
        assert _with_slots(Slotted, reduced) is reduced


def test_without_counting_by_nvml() -> None:
    """The count is then that of a child that asks CUDA."""
    code = """
    import os, torch
    from nbdist.config import gpus

    expected = torch.cuda.device_count()
    del torch.cuda._device_count_nvml, torch.cuda._device_count_amdsmi
    assert gpus._count(torch, os.environ) == expected and not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_without_the_class_of_parametrized_modules(fresh: Notebook) -> None:
    gone = (
        "from nbdist.shipping import classify, kinds_object\n"
        "classify.parametrized = kinds_object.parametrized = lambda cls: False\n"
    )
    make = "from torch.nn.utils import parametrize\nbent = torch.nn.Linear(1, 1)\nkept = [1]\n"
    bend = "parametrize.register_parametrization(bent, 'weight', torch.nn.Identity())\n"
    taken_away(fresh, gone)
    fresh.ok("import torch\n" + gone + make + bend)
    cell = fresh.run("%%distributed -n 2\nbent.weight")
    assert cell.error is not None and cell.error[0] == "CannotShip" and "'bent' (ParametrizedLinear)" in cell.error[1]
    fresh.ranks(make + bend + "kept.append(2)")
    assert fresh.value("(type(bent).__name__, kept)") == ("RankedValue", [1, 2])
    fresh.ranks("inside = bent.parametrizations.weight.original.numel()")
    assert fresh.value("inside") == 1


def test_without_the_state_of_handles_of_hooks(fresh: Notebook) -> None:
    gone = (
        "from torch.utils.hooks import RemovableHandle\n"
        "del RemovableHandle.__getstate__, RemovableHandle.__setstate__\n"
        "from nbdist.shipping import hooks\n"
        "hooks.hook_counter, hooks.raise_hook_counter = lambda: 0, lambda to: None\n"
    )
    taken_away(fresh, gone)
    fresh.ok("import torch\n" + gone + "model, kept = torch.nn.Linear(1, 1), [1]")
    fresh.ranks("handle = model.register_forward_pre_hook(print)\nkept.append(2)")
    assert fresh.value("(type(handle).__name__, kept, len(model._forward_pre_hooks))") == ("RankedValue", [1, 2], 1)
    fresh.ranks("handle.remove(); model")  # nothing leads from the handle to the model
    assert fresh.value("len(model._forward_pre_hooks)") == 0
    fresh.ok("mine = model.register_forward_pre_hook(print)")
    cell = fresh.run("%%distributed -n 2\nmine.remove()")
    assert cell.error is not None and cell.error[0] == "CannotShip" and "'mine'" in cell.error[1], cell.text
