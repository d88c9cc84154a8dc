"""Drives a real Jupyter kernel from outside: run cells, read what they show, press Stop, kill it."""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# in the environment of everything that a notebook starts: finds it, whoever its parent is
MARK = "NBDIST_TEST_NOTEBOOK"


@dataclass
class Cell:
    """What one execution showed; seconds from the request to idle."""

    stdout: str = ""
    stderr: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[str, str, list[str]] | None = None
    status: str = ""
    payload: list[dict[str, Any]] = field(default_factory=list)
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
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        marked = dict([self.mark.split("=")])
        self.manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1", **marked, **(env or {})}, cwd=cwd)
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
        left = wait_gone([*below, *self.marked()], 5.0)
        for process in left:
            process.kill()
        self.manager.cleanup_resources()
        assert not left, f"left behind after the kernel's end: {[(p.pid, p.name()) for p in left]}"

    def start(self, code: str) -> str:
        """Begin a cell and do not wait; returns the id of its message."""
        return self.client.execute(code, allow_stdin=False)

    def run(
        self,
        code: str,
        timeout: float = 60,
        stop_after: float | Sequence[float] | None = None,
        stop_when: Callable[[Cell], bool] | None = None,
    ) -> Cell:
        """Run one cell.

        Args:
            stop_after: seconds after which the stop button is pressed, or several, for an impatient user; the cell's
                `stop_seconds` then tells how long it took from the first.
            stop_when: those seconds count from the moment at which what the cell has shown meets this.
        """
        start = time.perf_counter()
        return self.wait(self.start(code), timeout, stop_after, start, stop_when)

    def wait(
        self,
        message_id: str,
        timeout: float = 60,
        stop_after: float | Sequence[float] | None = None,
        start: float | None = None,
        stop_when: Callable[[Cell], bool] | None = None,
    ) -> Cell:
        cell, start = Cell(), start or time.perf_counter()
        if stop_after is None:
            stop_after = [] if stop_when is None else [0.0]
        presses = sorted([stop_after] if isinstance(stop_after, int | float) else stop_after)
        # A SIGINT that meets ipykernel before the cell has begun is its own to handle, and it loses the reply: press
        # later.
        count_from: float | None = None
        began: float | None = None
        pressed: float | None = None
        while True:
            now = time.perf_counter() - start
            if began is None and any(kind == "execute_input" for kind, _ in cell.events):
                began = time.perf_counter() + 0.02
            if count_from is None and began is not None and time.perf_counter() > began:
                if stop_when is None:
                    count_from = start
                elif stop_when(cell):
                    count_from = time.perf_counter()
            while presses and count_from is not None and time.perf_counter() - count_from > presses[0]:
                presses.pop(0)
                pressed = pressed or time.perf_counter()
                self.manager.interrupt_kernel()
            if now > timeout:
                self.manager.interrupt_kernel()
                raise TimeoutError(f"still running after {timeout} s; so far: {cell.text[-2000:]}")
            try:
                message = self.client.get_iopub_msg(timeout=0.05 if began else 0.01)
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
                cell.payload = reply["content"].get("payload", [])
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

    def converse(self, code: str, answers: Sequence[str | tuple[str, float]], timeout: float = 60) -> tuple[str, int]:
        """Run a cell that asks (`input()`, a debugger).

        Args:
            answers: one for each question; with seconds, the stop button is pressed so long after it.

        Returns all that was shown, and how many answers were not asked for.
        """
        message_id, left, shown = self.client.execute(code, allow_stdin=True), list(answers), ""
        end, running = time.monotonic() + timeout, True

        def take(seconds: float) -> bool:
            nonlocal shown, running
            try:
                message = self.client.get_iopub_msg(timeout=seconds)
            except queue.Empty:
                return False
            if message["parent_header"].get("msg_id") == message_id:
                kind, content = message["msg_type"], message["content"]
                if kind == "stream":
                    shown += _COLOURS.sub("", content["text"])
                elif kind == "error":
                    shown += _COLOURS.sub("", "\n".join(content["traceback"])) + "\n"
                elif kind == "status":
                    running = content["execution_state"] != "idle"
            return True

        while running:
            assert time.monotonic() < end, f"still running after {timeout} s; so far: {shown}"
            take(0.01)
            try:
                asked = self.client.get_stdin_msg(timeout=0.01)
            except queue.Empty:
                continue
            while take(0.05):  # what was shown before the question, on a channel of its own
                pass
            answer = left.pop(0)
            shown += asked["content"]["prompt"]
            self.client.input(answer if isinstance(answer, str) else answer[0])
            if not isinstance(answer, str):
                time.sleep(answer[1])
                self.manager.interrupt_kernel()
        while self.client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != message_id:
            pass
        return shown, len(left)

    def late_output(self, message_id: str, seconds: float, until: Callable[[Cell], bool] | None = None) -> Cell:
        """What arrives under an earlier cell within so many seconds, or before it meets `until`."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and not (until is not None and until(self.late.setdefault(message_id, Cell()))):
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

    def ranks(self, code: str, options: str = "-n 2", timeout: float = 60) -> Cell:
        """Run a cell on ranks; it must not fail."""
        return self.ok(f"%%distributed {options}\n{code}", timeout)

    def fails(self, code: str, options: str = "-n 2", timeout: float = 60) -> Cell:
        """Run a cell on ranks that must end with an error."""
        cell = self.run(f"%%distributed {options}\n{code}", timeout)
        assert cell.status == "error", f"no error: {cell.text}"
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

    def marked(self) -> list[psutil.Process]:
        """Everything alive that this notebook has started, also what now belongs to another parent."""
        return [process for process in marked_with(self.mark) if process.pid != self.pid]

    def kill(self) -> None:
        """SIGKILL to the kernel alone."""
        os.kill(self.pid, signal.SIGKILL)
        self.manager.provisioner.process.wait()


def marked_with(mark: str) -> list[psutil.Process]:
    """Everything alive that has this in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                if mark.encode() in file.read():
                    found.append(process)
        except OSError:
            continue
    return found


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until these are gone; returns those that are not."""
    end = time.monotonic() + seconds
    while True:
        processes = [p for p in processes if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]
        if not processes or time.monotonic() > end:
            return processes
        time.sleep(0.02)


def _status(process: psutil.Process) -> str:
    """A process whose first thread has ended while others still do is not gone: its sockets are open."""
    try:
        status = process.status()
        if status == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{process.pid}/task")) > 1:
            return psutil.STATUS_RUNNING
        return status
    except (psutil.NoSuchProcess, OSError):
        return psutil.STATUS_ZOMBIE
