"""What docs/security.md says of other users of the machine, tried as one; and that nothing stays in /tmp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel.notebook import Notebook, wait_gone

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

NOBODY = 65534
PUBLIC_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
TRIES = """
import os, socket, sys
for pid in map(int, sys.argv[1].split(",")):
    for what in ("environ", "maps", "mem"):
        try:
            open(f"/proc/{pid}/{what}", "rb").read(1)
            print("read", what)
        except OSError:
            pass
    try:
        os.listdir(f"/proc/{pid}/fd")
        print("listed fd")
    except OSError:
        pass
    try:
        os.kill(pid, 0)
        print("signalled")
    except OSError:
        pass
for path in sys.argv[2].split(","):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected to", path)
    except OSError:
        pass
with socket.create_connection(("127.0.0.1", int(sys.argv[3]))):
    print("the store's port is open")
"""


def folders() -> set[Path]:
    """multiprocessing's, with the socket of a fork server."""
    return set(Path(tempfile.gettempdir()).glob("pymp-*"))


def unix_listeners(pids: set[int]) -> list[tuple[int, str]]:
    return [
        (process.pid, connection.laddr)
        for process in map(psutil.Process, pids)
        for connection in process.net_connections("unix")
        if connection.laddr
    ]


@pytest.mark.skipif(os.getuid() != 0 or PUBLIC_PYTHON is None, reason="needs root, and a Python that others can run")
def test_another_user_can_reach_the_store_and_nothing_else(nb: Notebook) -> None:
    nb.ranks("1")
    below = {process.pid: process for process in nb.processes()}
    named = [path for _, path in unix_listeners(set(below))]
    assert named, "the fork server's socket has a name"
    ports = [c.laddr.port for process in below.values() for c in process.net_connections("tcp") if c.status == "LISTEN"]
    facts = (",".join(map(str, below)), ",".join(named), str(ports[0]))
    done = subprocess.run(
        [str(PUBLIC_PYTHON), "-I", "-c", TRIES, *facts],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "the store's port is open\n", done.stdout + done.stderr


def test_what_lies_in_files_is_for_this_user_alone(nb: Notebook) -> None:
    nb.ranks("1")
    for _, path in unix_listeners({process.pid for process in nb.processes()}):
        assert os.stat(path).st_mode & 0o077 == 0 or os.stat(os.path.dirname(path)).st_mode & 0o077 == 0, path


@pytest.mark.parametrize("how", ["%unload_ext nbdist", "shutdown", "kill"])
def test_no_folder_stays_in_tmp(how: str) -> None:
    with Notebook() as nb:
        nb.ok("%load_ext nbdist")
        nb.ranks("1")
        below = nb.processes()
        mine = {Path(path).parent for _, path in unix_listeners({process.pid for process in below})}
        assert mine and mine <= folders()
        if how.startswith("%"):
            nb.ok(how)
        elif how == "kill":
            nb.kill()
    wait_gone(below, 5.0)
    assert not mine & folders()


def test_no_folder_of_a_script_stays_in_tmp(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import nbdist
        print(nbdist.launch(max, 1, 2, ranks=2))
        """)
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, str(script)], check=True, timeout=60, env=environment, capture_output=True)
    end = time.monotonic() + 5
    while list(tmp_path.glob("pymp-*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(tmp_path.glob("pymp-*"))
