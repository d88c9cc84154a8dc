"""Drives a real Jupyter kernel from outside: run cells, read what they show, press Stop, kill it."""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What one execution showed; seconds from the request to idle."""

    stdout: str = ""
    stderr: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[str, str, list[str]] | None = None
    status: str = ""
    seconds: float = 0.0
    stop_seconds: float | None = None
    events: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def traceback(self) -> str:
        return _COLOURS.sub("", "\n".join(self.error[2])) if self.error else ""

    @property
    def text(self) -> str:
        shown = "".join(data.get("text/plain", "") + "\n" for data in self.data)
        return (
            self.stdout
            + self.stderr
            + shown
            + (f"{self.error[0]}: {self.error[1]}\n{self.traceback}" if self.error else "")
        )


class Notebook:
    """A kernel of this environment. Use as a context manager; nothing of it is left afterwards."""

    def __init__(self, env: dict[str, str] | None = None, cwd: str | None = None) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, cwd=cwd)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid: int = self.manager.provisioner.process.pid
        self.late: dict[str, Cell] = {}

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        below = self.processes()
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        left = wait_gone(below, 5.0)
        for process in left:
            process.kill()
        assert not left, f"left behind after the kernel's end: {[(p.pid, p.name()) for p in left]}"

    def start(self, code: str) -> str:
        """Begin a cell and do not wait; returns the id of its message."""
        return self.client.execute(code, allow_stdin=False)

    def run(self, code: str, timeout: float = 60, stop_after: float | None = None) -> Cell:
        """Run one cell.

        Args:
            stop_after: seconds after which the stop button is pressed; the cell's `stop_seconds` then tells how
                long it took from there.
        """
        start = time.perf_counter()
        return self.wait(self.start(code), timeout, stop_after, start)

    def wait(
        self, message_id: str, timeout: float = 60, stop_after: float | None = None, start: float | None = None
    ) -> Cell:
        cell, start, pressed = Cell(), start or time.perf_counter(), None
        while True:
            now = time.perf_counter() - start
            if stop_after is not None and pressed is None and now > stop_after:
                self.manager.interrupt_kernel()
                pressed = time.perf_counter()
            if now > timeout:
                self.manager.interrupt_kernel()
                raise TimeoutError(f"still running after {timeout} s; so far: {cell.text[-2000:]}")
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            parent = message["parent_header"].get("msg_id")
            if parent != message_id:
                self._take(self.late.setdefault(parent, Cell()), kind, content)
                continue
            if kind == "status" and content["execution_state"] == "idle":
                break
            self._take(cell, kind, content)
        cell.seconds = time.perf_counter() - start
        if pressed is not None:
            cell.stop_seconds = time.perf_counter() - pressed
        while True:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == message_id:
                cell.status = reply["content"]["status"]
                return cell

    @staticmethod
    def _take(cell: Cell, kind: str, content: dict[str, Any]) -> None:
        cell.events.append((kind, content))
        if kind == "stream":
            setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
        elif kind in ("execute_result", "display_data", "update_display_data"):
            cell.data.append(content["data"])
            if kind == "execute_result":
                cell.results.append(content["data"])
        elif kind == "error":
            cell.error = (content["ename"], content["evalue"], content["traceback"])

    def late_output(self, message_id: str, seconds: float) -> Cell:
        """What arrives under an earlier cell within so many seconds."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            parent = message["parent_header"].get("msg_id")
            self._take(self.late.setdefault(parent, Cell()), message["msg_type"], message["content"])
        return self.late.get(message_id, Cell())

    def ok(self, code: str, timeout: float = 60) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(code, timeout)
        assert cell.error is None, cell.text
        return cell

    def value(self, expression: str) -> Any:
        """The value of an expression in the notebook, through its repr."""
        import ast

        cell = self.ok(f"print(repr({expression}))")
        return ast.literal_eval(cell.stdout.strip())

    def processes(self) -> list[psutil.Process]:
        """Everything below the kernel."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.manager.provisioner.process.wait()


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until these are gone; returns those that are not."""
    end = time.monotonic() + seconds
    while True:
        processes = [p for p in processes if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]
        if not processes or time.monotonic() > end:
            return processes
        time.sleep(0.02)


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE
