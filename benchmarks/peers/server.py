"""A kernel behind a real Jupyter server whose extension turns it into two processes (jupyter-distributed)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient

from .kernel import Kernel

TOKEN = "benchmark"


class ServerKernel(Kernel):
    """The kernel of a notebook in that server, restarted with Processes set to 2, as its toolbar does."""

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            self.python, "-m", "jupyter_server", "--no-browser", "--allow-root", f"--port={self.port}",
            "--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.folder}",
        ]  # fmt: skip
        self.server = subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_for_server()
        self.kernel_id: str = self._ask("/api/kernels", {"name": "python3"})["id"]
        self.began = time.perf_counter()  # the notebook was open: what counts is the restart on two processes
        self._ask(f"/jupyter-distributed/kernels/{self.kernel_id}", {"action": "set", "world_size": 2})
        file = Path(self.folder) / "runtime" / f"kernel-{self.kernel_id}.json"
        self.client = BlockingKernelClient(connection_file=str(file))
        self.client.load_connection_file()
        self._connect()
        self.pid = next(p.pid for p in psutil.Process(self.server.pid).children() if _is_proxy(p))

    def _wait_for_server(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                self._ask("/api")
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end or self.server.poll() is not None:
                    raise
                time.sleep(0.1)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def press_stop(self) -> None:
        self._ask(f"/api/kernels/{self.kernel_id}/interrupt", {})

    def kill(self) -> None:
        # The server stays: it is what ends the ranks of a kernel that has died.
        os.kill(self.pid, signal.SIGKILL)

    def left_after(self, seconds: float) -> list[psutil.Process]:
        end = time.monotonic() + seconds
        while (alive := self._of_the_kernel()) and time.monotonic() < end:
            time.sleep(0.05)
        return alive

    def _of_the_kernel(self) -> list[psutil.Process]:
        """Everything but the server; it starts the kernel again when that dies: the new one does not count."""
        new = set()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.server.pid).children():
                if child.pid != self.pid and _is_proxy(child):
                    new |= {child.pid, *(below.pid for below in child.children(recursive=True))}
        return [process for process in self.alive() if process.pid not in new | {self.server.pid}]

    def _shut(self) -> None:
        if (server := getattr(self, "server", None)) is not None:
            with contextlib.suppress(OSError):
                self._ask("/api/shutdown", {})
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()
            server.wait()


def _is_proxy(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "jupyter_distributed.kernel" in process.cmdline()
    return False
