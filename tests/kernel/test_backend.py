"""`%%distributed --backend` in a real kernel, and a device mesh over Stop and over new ranks."""

from __future__ import annotations

from tests.kernel.notebook import Notebook

MAKE = """
accelerator = Accelerator()
told = repr(accelerator)[:-1].split("strategy ")[1]
kind, sharded = str(accelerator.distributed_type), accelerator.state.fsdp_plugin is not None
"""


def test_the_strategy_of_a_cell(fresh: Notebook) -> None:
    fresh.ok("from nbdist import Accelerator")
    fresh.ok(f"%%distributed -n 2 --backend fsdp\n{MAKE}")
    assert fresh.value("(told, kind, sharded)") == ("fsdp: the cell's --backend says so", "FSDP", True)
    fresh.ok(f"%%distributed -n 2\n{MAKE}")
    assert fresh.value("told").startswith("ddp: there are 2 processes") and fresh.value("sharded") is False
    fresh.ok("%%distributed -n 2 --backend fsdp\ntold = repr(Accelerator(strategy='ddp'))")
    assert "strategy ddp: it was asked for" in fresh.value("told")
    error = fresh.run("%%distributed -n 2 --backend fdsp\n1").error
    assert error is not None and error[1].endswith("takes one of ddp, fsdp, hybrid, single, tp; did you mean fsdp?")
    error = fresh.run(f"%%distributed -n 2 --backend single\n{MAKE}").error
    assert error is not None and "'single' cannot run here: there are 2 processes" in error[1]

    fresh.ok("%%distributed -n 2 --backend fsdp\naccelerator = Accelerator(); mesh = accelerator.torch_device_mesh")
    loop = "import torch, torch.distributed as dist\nprint('on', flush=True)\nwhile True:\n"
    loop += "    dist.all_reduce(torch.ones(1), group=mesh.get_group('dp_shard'))"
    stopped = fresh.run(f"%%distributed -n 2\n{loop}", stop_when=lambda cell: "on" in cell.stdout)
    assert stopped.error is not None and stopped.error[0] == "KeyboardInterrupt"
    again = "again = Accelerator().torch_device_mesh\ntotal = torch.ones(1)\n"
    again += "dist.all_reduce(total, group=again.get_group('dp_shard'))\n"
    fresh.ok(f"%%distributed -n 2 --backend fsdp\n{again}same, total = again is mesh, total.item()")
    assert fresh.value("(same, total)") == (True, 2.0)
    fresh.ok(f"%%distributed -n 2 --backend fsdp --fresh\nimport torch, torch.distributed as dist\n{again}")
    assert fresh.value("total.item()") == 2.0
