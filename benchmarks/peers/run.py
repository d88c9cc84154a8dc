"""Runs the tools in turns and writes every single figure down: round by round, and within a round cell by cell."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from . import environments
from .kernel import Kernel, Shown
from .rows import AFTER, KEEP, ROWS, STOPS, Row, busy
from .tools import Tool

Record = dict[str, Any]
LIMIT = 60.0  # seconds for a cell that should end
STOP_LIMIT = 35.0  # seconds after which Stop has not worked
ORPHAN_SECONDS = 3.0
PATIENCE_WITH_SLOW = 15.0  # seconds a round, tool and row after which a slow one is not repeated


@dataclass
class Bench:
    """Kernels of the chosen tools, and what was measured so far."""

    tools: Sequence[Tool]
    repetitions: int
    say: Callable[[str], None] = print
    python: Callable[[str], str] = environments.python
    records: list[Record] = field(default_factory=list)
    round: int = 0
    live: dict[str, Kernel] = field(default_factory=dict)

    def note(self, tool: Tool, row: str, ok: bool, seconds: float | None, words: str = "", **more: Any) -> None:
        taken = None if seconds is None else round(seconds, 5)
        record = {"round": self.round, "tool": tool.name, "row": row, "ok": ok, "seconds": taken, "words": words}
        self.records.append(record | more)

    def one_round(self, rows: Sequence[str]) -> None:
        """All rows once, each with the tools in turns. The order of the tools moves on with each round."""
        at = self.round % len(self.tools)
        order = [*self.tools[at:], *self.tools[:at]]
        try:
            for tool in order:
                self.cold(tool)
                self.say(f"round {self.round}: {tool.name} up")
            if "warm" in rows:
                self.warm(order)
                self.say(f"round {self.round}: warm cells done")
            for tool in order:
                if "stop" in rows:
                    for row, (_, code) in STOPS.items():
                        self.stop(tool, row, code)
                if "orphans" in rows:
                    self.orphans(tool)
                self.say(f"round {self.round}: {tool.name} done")
        finally:
            for tool in order:
                self.drop(tool)
        self.round += 1

    def drop(self, tool: Tool) -> None:
        if (kernel := self.live.pop(tool.name, None)) is not None:
            kernel.close()

    def kernel(self, tool: Tool) -> Kernel:
        """The tool's kernel with ranks up; a new one where the last was lost."""
        if tool.name not in self.live:
            self._start(tool)
        return self.live[tool.name]

    def _start(self, tool: Tool, patience: bool = True) -> tuple[float, str]:
        """A new kernel to the first result: seconds, and the words of a first cell that failed."""
        kernel = self.live[tool.name] = tool.kernel(self.python(tool.name))
        for cell in tool.start():
            shown = kernel.run(cell, LIMIT)
        if patience:
            time.sleep(tool.patience)
        words = ""
        for _ in range(3):
            shown = [kernel.run(cell, LIMIT) for cell in tool.first()][-1]
            if "sum 3" in shown.text:
                return time.perf_counter() - kernel.began, words
            words = shown.words
        raise RuntimeError(f"{tool.name} shows no all_reduce: {words}")

    def cold(self, tool: Tool) -> None:
        self.drop(tool)
        if tool.patience and self.round == 0:
            seconds, words = self._start(tool, patience=False)
            self.note(tool, "cold at once", not words, seconds, words)
            self.drop(tool)
        seconds, words = self._start(tool)
        self.note(tool, "cold", True, seconds, f"the first cell is lost: {words}" if words else "")

    def warm(self, order: Sequence[Tool]) -> None:
        spent: dict[tuple[str, str], float] = {}
        over: set[tuple[str, str]] = set()
        for k in range(self.repetitions):
            for row in ROWS:
                for tool in order:
                    key = tool.name, row.key
                    if k % row.every or key in over or spent.get(key, 0.0) > PATIENCE_WITH_SLOW:
                        continue
                    start = time.perf_counter()
                    if not self._repeat(tool, row, k):
                        over.add(key)
                    spent[key] = spent.get(key, 0.0) + time.perf_counter() - start

    def _repeat(self, tool: Tool, row: Row, k: int) -> bool:
        """One repetition of a row; whether it did what the row says."""
        kernel, cells = self.kernel(tool), row.cells(tool, 1 + self.round * self.repetitions + k)
        if not cells.timed:
            return False
        for cell in cells.before:
            kernel.run(cell, LIMIT)
        shown = [kernel.run(cell, LIMIT) for cell in cells.timed]
        bad = next((s for s in shown if s.failed), None)
        if any(not s.finished for s in shown):
            self.drop(tool)
        seen = "" if bad else "".join(f"{s.text}{s.error}" for s in (kernel.run(cell, LIMIT) for cell in cells.check))
        ok = bad is None and cells.expect in seen
        words = "" if ok else (bad.words if bad else f"{row.if_not} ({_telling(seen, cells.expect)})")
        copy = "own object False" in seen
        self.note(tool, row.key, ok, sum(s.seconds for s in shown), words, copy=copy, cells=len(cells.timed))
        return ok

    def _busy(self, tool: Tool, kernel: Kernel, code: str) -> tuple[str, Callable[[], bool]]:
        """A cell that does not end, and what is true half a second after all ranks are in it."""
        files = [Path(kernel.folder) / f"busy-{rank}" for rank in range(2)]
        for file in files:
            file.unlink(missing_ok=True)
        began: list[float] = []

        def ready() -> bool:
            if not began and all(file.exists() for file in files):
                began.append(time.monotonic())
            return bool(began) and time.monotonic() > began[0] + 0.5

        return tool.on_ranks(busy(kernel.folder, code))[-1], ready

    def stop(self, tool: Tool, row: str, code: str) -> None:
        kernel = self.kernel(tool)
        if tool.keeps:
            for cell in tool.on_ranks(KEEP):
                kernel.run(cell, LIMIT)
        for _ in range(2):  # a launch can fail by itself
            cell, ready = self._busy(tool, kernel, code)
            shown = kernel.run(cell, STOP_LIMIT, ready)
            if shown.stop_seconds is not None:
                break
        else:
            self.note(tool, row, False, None, f"it did not begin: {shown.words}")
            self.drop(tool)
            return
        if not shown.finished:
            self.note(tool, row, False, None, f"never: still running after {STOP_LIMIT:.0f} s")
            self.drop(tool)
            return
        after = self._after(tool, kernel)
        gone = "" if not after.failed else after.words
        self.note(tool, row, True, shown.stop_seconds, gone, usable=not after.failed)
        if after.failed:
            self.drop(tool)

    def _after(self, tool: Tool, kernel: Kernel) -> Shown:
        """The next cell: a collective, and what an earlier cell left on the ranks."""
        body = f"{AFTER}\nassert kept == 42" if tool.keeps else AFTER
        return [kernel.run(cell, STOP_LIMIT) for cell in tool.on_ranks(body)][-1]

    def orphans(self, tool: Tool) -> None:
        kernel = self.kernel(tool)
        cell, ready = self._busy(tool, kernel, STOPS["stop loop"][1])
        kernel.client.execute(cell, allow_stdin=False)
        end = time.monotonic() + LIMIT
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        kernel.kill()
        start = time.perf_counter()
        left = kernel.left_after(ORPHAN_SECONDS)
        seconds = time.perf_counter() - start
        cpu = 0.0
        with contextlib.suppress(psutil.Error):
            cpu = sum(process.cpu_percent(0.1) for process in left)
        self.note(tool, "orphans", not left, seconds, f"{len(left)} left", left=len(left), cpu=round(cpu))
        kernel.end_all()
        self.drop(tool)


def _telling(text: str, expected: str) -> str:
    """The line that tells most: an error, else the one that should have been another."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if "Error" in line]
    other = [line for line in lines if line.startswith(expected.split()[0])]
    return (errors or other or ["nothing shown"])[-1]


def machine() -> Record:
    """Where and when."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{os.uname().sysname} {os.uname().release.split('-')[0]}",
    }


def _lines(result: Record) -> str:
    """As JSON with a line for each single figure."""
    records = ",\n".join(json.dumps(record, separators=(",", ":")) for record in result["records"])
    return f'{{"about": {json.dumps(result["about"])},\n"records": [\n{records}\n]}}\n'


def measure(tools: Sequence[Tool], rounds: int, repetitions: int, rows: Sequence[str], raw: Path) -> Record:
    """Everything, as one value; `raw` gets it as JSON whenever a part is done, so that a run cut short is not lost."""
    about = machine() | {"versions": {tool.name: environments.versions(tool.name) for tool in tools}, "loads": []}
    bench = Bench(tools, repetitions)
    result = {"about": about, "records": bench.records}

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
        raw.write_text(_lines(result))

    bench.say = say
    for _ in range(rounds):
        about["loads"].append(round(os.getloadavg()[0], 1))
        bench.one_round(rows)
    about["loads"].append(round(os.getloadavg()[0], 1))
    say("done")
    return result
