"""One real kernel of some environment: run a cell within a limit, press Stop, kill it, find what is left of it.

Unlike the tests' notebook, a cell that never ends or fails is a result here, not an error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# In the environment of everything that a kernel starts, whoever its parent is later. Named so that a launcher that
# hands on only `TORCH*` hands this on as well.
MARK = "TORCH_BENCHMARK_MARK"
STARTING = 60.0  # seconds more that ranks have to begin what is to be stopped


@dataclass
class Shown:
    """What one cell did; seconds from the request to idle, and to the limit where it never got there."""

    seconds: float = 0.0
    finished: bool = False
    text: str = ""
    error: str = ""
    stop_seconds: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended badly; some tools print an error and end well."""
        return not self.finished or bool(self.error) or "Error" in self.text

    @property
    def words(self) -> str:
        """The line that says what went wrong."""
        if not self.finished:
            return f"still running after {self.seconds:.0f} s"
        if self.error and "Error" in self.error:
            return self.error
        lines = [line.strip() for line in self.text.splitlines() if re.search(r"\w*Error\b", line)]
        return lines[-1] if lines else (self.error or self.text.strip()[-200:] or "nothing shown")


@dataclass
class Kernel:
    """A kernel of the interpreter `python`, in a folder of its own; close it, and nothing of it is left."""

    python: str
    extra: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="peers-")
        self.mark = uuid.uuid4().hex
        self.began = time.perf_counter()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What the kernel sees: the environment's own `bin` first, one thread a process, loopback only."""
        paths = (str(Path(self.python).parent), os.environ.get("PATH", ""))
        own = {
            "PATH": os.pathsep.join(paths),
            "IPYTHONDIR": f"{self.folder}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{self.folder}/runtime",
            "JUPYTER_CONFIG_DIR": f"{self.folder}/config",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        return kept | own | self.extra

    def _start(self) -> None:
        self.manager = KernelManager(kernel_name="python3", connection_file=f"{self.folder}/kernel.json")
        self.manager.kernel_spec.argv = [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.manager.start_kernel(env=self.environment, cwd=self.folder, **silent)
        self.client: BlockingKernelClient = self.manager.client()
        self._connect()
        self.pid: int = self.manager.provisioner.process.pid

    def _connect(self) -> None:
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def press_stop(self) -> None:
        self.manager.interrupt_kernel()

    def run(self, code: str, limit: float = 60.0, stop_when: Callable[[], bool] | None = None) -> Shown:
        """Run a cell.

        Args:
            limit: seconds after which it is given up (and goes on running).
            stop_when: press Stop once this is true; `stop_seconds` then counts from there, and so does the limit.
        """
        shown, start = Shown(), time.perf_counter()
        message_id = self.client.execute(code, allow_stdin=False)
        pressed: float | None = None
        while True:
            now = time.perf_counter()
            if stop_when is not None and pressed is None and stop_when():
                pressed = time.perf_counter()
                self.press_stop()
            if now > (start + limit + STARTING if stop_when and not pressed else (pressed or start) + limit):
                break
            try:
                message = self.client.get_iopub_msg(timeout=0.02 if stop_when else 0.5)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                shown.finished = True
                break
            self._take(shown, kind, content)
        end = time.perf_counter()
        shown.seconds = end - start
        shown.stop_seconds = None if pressed is None else end - pressed
        if shown.finished:
            self._reply(shown, message_id)
        return shown

    def _reply(self, shown: Shown, message_id: str) -> None:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=1)
                if reply["parent_header"].get("msg_id") == message_id:
                    status = reply["content"]["status"]
                    if status == "error" and not shown.error:
                        shown.error = f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}"
                    elif status == "aborted":
                        shown.error = "AbortError: the kernel passed this cell over"
                    return

    @staticmethod
    def _take(shown: Shown, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            shown.text += content["text"]
        elif kind in ("execute_result", "display_data", "update_display_data"):
            shown.text += content["data"].get("text/plain", "") + "\n"
        elif kind == "error":
            shown.error = f"{content['ename']}: {_COLOURS.sub('', content['evalue'])}"

    def kill(self) -> None:
        """SIGKILL to the kernel alone."""
        os.kill(self.pid, signal.SIGKILL)
        self.manager.provisioner.process.wait()

    def alive(self) -> list[psutil.Process]:
        """Everything alive that this kernel has started and the kernel itself, zombies left out."""
        found, mark = [], f"{MARK}={self.mark}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    marked = mark in file.read()
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> list[psutil.Process]:
        """End the kernel, give what it started two seconds to follow, kill the rest; returns that rest."""
        client, manager = getattr(self, "client", None), getattr(self, "manager", None)
        if client is not None:
            client.stop_channels()
        if manager is not None and manager.has_kernel:
            with contextlib.suppress(Exception):
                manager.shutdown_kernel(now=False)
        self._shut()
        left = self.left_after(2.0)
        self.end_all()
        if manager is not None:
            manager.cleanup_resources()
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def _shut(self) -> None:
        """What else belongs to a kernel of this kind."""

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """What is still alive so long from now; returns at once when nothing is."""
        end = time.monotonic() + seconds
        while (alive := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        return alive

    def end_all(self) -> None:
        """Kill everything that carries this kernel's mark, until nothing does."""
        end = time.monotonic() + 10
        while (alive := self.alive()) and time.monotonic() < end:
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        assert not alive, f"processes that cannot be killed: {[process.pid for process in alive]}"
