"""What listens, what does not, and the process group that a cell may close and open."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import HERE, all_here, magic, was_stopped, works

pytestmark = pytest.mark.kernel

RANKS = 3
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listeners(notebook: Notebook) -> list[tuple[psutil.Process, str, int]]:
    """What the processes below the kernel listen on: (process, address, port)."""
    found = []
    for process in notebook.processes():
        for connection in process.net_connections("inet"):
            if connection.type == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN:
                found.append((process, connection.laddr.ip, connection.laddr.port))
    return found


def test_only_loopback_and_no_commands(nb: Notebook) -> None:
    """Supervisor and ranks listen on loopback alone; whoever connects and talks, even the way that our own messages
    look, changes nothing.
    """
    code = "group = dist.new_group([0, 1])\nkept = 'as it was'"
    nb.ok(magic(code, RANKS))
    before = works(nb, RANKS)
    below = {process.pid for process in nb.processes()}
    found = listeners(nb)
    assert found, "the store listens"
    assert {address for _, address, _ in found} <= LOOPBACK, found
    small = pickle.dumps(("start", {"pool": "p", "specs": []}), protocol=5)
    framed = len(small).to_bytes(4, "little") + (0).to_bytes(8, "little") + (0).to_bytes(4, "little") + small
    garbage = [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), framed, b"\0" * 64, b""]
    for _, address, port in found:
        for data in garbage:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
                sock.settimeout(5)
                try:
                    sock.connect((address, port))
                    sock.sendall(data)
                except OSError:  # refused or reset: as good
                    continue
    nb.ok(magic("value = torch.ones(1)\ndist.all_reduce(value)\nassert kept == 'as it was'", RANKS))
    nb.ok(magic("dist.all_reduce(torch.ones(1), group=group) if rank < 2 else None\ndist.new_group([1, 2])", RANKS))
    assert works(nb, RANKS) == before
    assert {process.pid for process in nb.processes()} == below


def test_the_kernel_listens_only_as_jupyter_does(nb: Notebook) -> None:
    """The kernel's own process has Jupyter's sockets and none of ours, and has joined nothing."""
    works(nb, RANKS)
    with open(nb.manager.connection_file) as file:
        jupyters = {value for key, value in json.load(file).items() if key.endswith("_port")}
    kernel = psutil.Process(nb.pid)
    listening = [c for c in kernel.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    # ipykernel has sockets between its own threads, on loopback
    assert {c.laddr.ip for c in listening} <= LOOPBACK
    theirs = {port for _, _, port in listeners(nb)}
    assert not {c.raddr.port for c in kernel.net_connections("inet") if c.raddr} & theirs
    assert jupyters <= {c.laddr.port for c in listening}


def test_control_goes_over_inherited_pairs(nb: Notebook) -> None:
    """No named Unix socket either: there is no path under which anybody could reach a rank."""
    works(nb, RANKS)
    for process in nb.processes():
        for connection in process.net_connections("unix"):
            path = connection.laddr or ""
            assert not path or "pymp-" in path or path.startswith(("\0", "@")), (process, connection)


def test_two_notebooks_at_once(nb: Notebook, fresh: Notebook, tmp_path: Path) -> None:
    """Stop in one, and its end, do not disturb the other."""
    works(nb, 2)
    works(fresh, 2)
    enough = tmp_path / "enough"
    nb.ok(f"enough = {str(enough)!r}")
    code = """
value, step = torch.zeros(1), 0
while not value.item():
    value.fill_(float(rank == 0 and os.path.exists(enough)))
    dist.broadcast(value, 0)  # rank 0 decides for all: a file is not seen at the same step
    step += 1
    if step == 20: print("here", "abcdefgh"[rank])
print("ran through", step > 20)
"""
    running = nb.start(magic(code, 2))
    was_stopped(fresh.run(magic(HERE + "while True: dist.barrier()", 2), stop_after=0.2, stop_when=all_here(2)))
    works(fresh, 2)
    fresh.kill()
    end = time.monotonic() + 30
    while not all_here(2)(nb.late_output(running, 0.02)):
        assert time.monotonic() < end
    enough.touch()
    cell = nb.wait(running)
    assert cell.error is None, cell.text
    assert "ran through True" in nb.late[running].stdout + cell.stdout
    works(nb, 2)


# ---------------------------------------------------------------- the default group


def test_closed_in_one_cell_open_in_the_next(nb: Notebook) -> None:
    nb.ok(magic("dist.destroy_process_group()\nassert not dist.is_initialized()", RANKS))
    before = works(nb, RANKS)
    nb.ok(
        magic(
            "from torch.distributed import destroy_process_group as leave\nleave()\nassert not dist.is_initialized()",
            RANKS,
        )
    )
    assert works(nb, RANKS) == before


def test_opened_again_in_between(nb: Notebook) -> None:
    """A script's own begin and end, several times over, with what it made before still working."""
    code = """
early = dist.new_group([0, 1])
for _ in range(3):
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world_size
    dist.barrier()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
if rank < 2: dist.all_reduce(torch.ones(1), group=early)
"""
    nb.ok(magic(code, RANKS))
    works(nb, RANKS)


@pytest.mark.parametrize(
    "arguments",
    ["'gloo'", "'gloo', rank=rank, world_size=world_size", "init_method='env://'", "backend=None", "'nccl'"],
)
def test_ways_to_open_it(nb: Notebook, arguments: str) -> None:
    """However a script opens the group, it gets the pool's."""
    code = f"dist.destroy_process_group()\ndist.init_process_group({arguments})\nvalue = torch.ones(1)\n"
    code += "dist.all_reduce(value)\nprint('sum', value.item())"
    cell = nb.ok(magic(code, RANKS))
    assert cell.stdout == "sum 3.0\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("'gloo', rank=0, world_size=1", "world_size=1"),
        ("'gloo', world_size=5, rank=rank", "-n 5"),
        ("'gloo', rank=(rank + 1) % world_size, world_size=world_size", "this is rank"),
    ],
)
def test_another_rank_or_size_is_refused(nb: Notebook, arguments: str, words: str) -> None:
    """Each rank training alone would be the silent alternative."""
    cell = nb.run(magic(f"dist.destroy_process_group()\ndist.init_process_group({arguments})", RANKS))
    assert cell.error is not None
    assert cell.error[0] == "ValueError"
    assert words in cell.error[1]
    assert "of a pool of 3" in cell.error[1]
    works(nb, RANKS)


def test_twice_is_refused_with_the_way_out(nb: Notebook) -> None:
    cell = nb.run(magic("dist.init_process_group('gloo')", RANKS))
    assert cell.error is not None
    assert cell.error[0] == "ValueError"
    assert "is_initialized()" in cell.error[1]
    works(nb, RANKS)


def test_a_group_of_ones_own_is_really_destroyed(nb: Notebook) -> None:
    code = """
mine = dist.new_group([0, 1, 2])
groups = dist.distributed_c10d._world.pg_map
assert mine in groups
dist.destroy_process_group(mine)
assert mine not in groups and dist.is_initialized()
"""
    nb.ok(magic(code, RANKS, "--no-return"))
    works(nb, RANKS)


def test_stop_while_the_group_is_closed(nb: Notebook) -> None:
    before = works(nb, RANKS)
    code = "dist.destroy_process_group()\n" + HERE + "time.sleep(60)"
    was_stopped(nb.run(magic(code, RANKS), stop_after=0.1, stop_when=all_here(RANKS)))
    assert works(nb, RANKS) == before


def test_environment_is_rebuilt_for_each_cell(nb: Notebook) -> None:
    """What a library writes into os.environ, sys.path or the working folder does not configure the next cell."""
    leak = """
import sys
os.environ['LEAK'] = '1'
os.environ['RANK'] = '77'
os.environ.pop('MASTER_PORT')
sys.path.insert(0, '/leak')
sys.argv.append('leak')
os.chdir('/')
"""
    nb.ok(magic(leak, RANKS))
    nb.ok("import os, sys\nos.environ['FROM_THE_NOTEBOOK'] = 'yes'\nhere = os.getcwd()")
    check = """
import sys
assert 'LEAK' not in os.environ and os.environ['RANK'] == str(rank) and int(os.environ['MASTER_PORT']) > 0
assert os.environ['FROM_THE_NOTEBOOK'] == 'yes'
assert '/leak' not in sys.path and 'leak' not in sys.argv and os.getcwd() == here
assert os.environ['WORLD_SIZE'] == '3' and os.environ['LOCAL_RANK'] == str(rank)
"""
    nb.ok(magic(check, RANKS))
    nb.ok(magic("assert os.environ['ONLY_HERE'] == 'a=b'", RANKS, "--env ONLY_HERE=a=b"))
    nb.ok(magic("assert 'ONLY_HERE' not in os.environ", RANKS))
