"""A notebook opened in JupyterLab or Notebook 7 in a real browser: cells run, outputs read, buttons pressed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page

from tests.browser.server import Server

START, ACT = 90_000, 40_000  # ms; what takes 3 s and 0.3 s on an idle machine
SHOTS = Path(os.environ.get("NBDIST_SHOTS", "build/screenshots"))
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# What the two front-ends say on their own, with nothing of ours in the page.
_UPSTREAM = (
    "Failed to load resource: the server responded with a status of 404",  # /lsp/status
    "Menu entry",
    "Command 'filebrowser:open-path' not registered",
    "[yjs#509] Not same Y.Doc",
    "Cannot read properties of undefined (reading 'schema')",
)

_READY = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return !!session?.isReady && session.session?.kernel?.status === 'idle';
}"""

_ADD = """source => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.model.sharedModel.addCell({cell_type: 'code', source, metadata: {trusted: true}});
    return notebook.model.cells.length - 1;
}"""

# The promise of the command ends with the cell; it is kept aside, so that the page can be used meanwhile.
_START = """index => {
    const app = window.jupyterapp, notebook = app.shell.currentWidget.content;
    notebook.deselectAll();
    notebook.activeCellIndex = index;
    window.running ??= {};
    const before = notebook.widgets[index].model.executionCount;
    const run = {ended: false, before};
    window.running[index] = run;
    app.commands.execute('notebook:run-cell').finally(() => { run.ended = true; });
}"""

_OUTPUTS = """index => {
    const model = window.jupyterapp.shell.currentWidget.content.widgets[index].model;
    return model.outputs ? model.outputs.toJSON() : [];
}"""

# A cell that is out of view may not be in the page; its element gets a name by which it is found again.
_SHOW = """async index => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    await notebook.scrollToItem(index, 'center');
    notebook.widgets[index].node.dataset.testCell = String(index);
}"""


@dataclass
class Output:
    """What the notebook's model holds for a cell, as it is saved."""

    outputs: list[dict[str, Any]]

    def stream(self, name: str = "stdout") -> str:
        return "".join(_text(o["text"]) for o in self.outputs if o["output_type"] == "stream" and o["name"] == name)

    @property
    def data(self) -> list[dict[str, Any]]:
        return [o["data"] for o in self.outputs if "data" in o]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((o for o in self.outputs if o["output_type"] == "error"), None)

    @property
    def traceback(self) -> str:
        return _COLOURS.sub("", "\n".join(self.error["traceback"])) if self.error else ""


def _text(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def write(path: Path, cells: list[Any]) -> Path:
    """A notebook file; a cell is its code, or a notebook cell."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.cells = [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(notebook, path)
    return path


class Opened:
    """One notebook in a page of its own.

    Args:
        front_end: "lab" or "notebook".
        path: of the file, below the server's root.
        kernel: wait until its kernel is idle.
    """

    def __init__(self, server: Server, browser: Browser, front_end: str, path: str, kernel: bool = True) -> None:
        self.server, self.front_end, self.path = server, front_end, path
        self.outside: list[str] = []
        self.console: list[str] = []
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        self.context.set_default_timeout(ACT)
        self.page: Page = self.context.new_page()
        ours = (server.base, server.base.replace("http", "ws"), "data:", "blob:")
        self.page.on("request", lambda r: None if r.url.startswith(ours) else self.outside.append(r.url))
        self.page.on("console", lambda m: self.console.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        where = f"lab/tree/{path}?reset&" if front_end == "lab" else f"notebooks/{path}?"
        self.page.goto(f"{server.base}/{where}token={server.token}", wait_until="domcontentloaded", timeout=START)
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=START)
        if kernel:
            self.wait_kernel()

    def wait_kernel(self) -> None:
        self.page.wait_for_function(_READY, timeout=START)

    def close(self) -> None:
        """And see that nothing was asked of the world, and that the page reported no error."""
        self.context.close()
        assert not self.outside, f"asked outside of the machine: {self.outside}"
        own = [line for line in self.console if not any(known in line for known in _UPSTREAM)]
        assert not own, f"errors in the page: {own}"

    # cells

    def add(self, code: str) -> int:
        """A code cell at the end; its index."""
        return int(self.page.evaluate(_ADD, code.strip()))

    def start(self, cell: int | str) -> int:
        """Begin a cell and do not wait: code is added first. Its index."""
        index = self.add(cell) if isinstance(cell, str) else cell
        self.page.evaluate(_START, index)
        return index

    def wait(self, index: int, timeout: float = 60.0) -> Output:
        """Until a started cell has ended, and the notebook has what it showed."""
        self.page.wait_for_function("index => window.running[index].ended", arg=index, timeout=timeout * 1000)
        return self.output(index)

    def ended(self, index: int) -> bool:
        return bool(self.page.evaluate("index => window.running[index].ended", index))

    def run(self, cell: int | str, timeout: float = 60.0) -> tuple[int, Output]:
        """Run a cell, which may fail."""
        index = self.start(cell)
        return index, self.wait(index, timeout)

    def ok(self, cell: int | str, timeout: float = 60.0) -> tuple[int, Output]:
        """Run a cell that must not fail."""
        index, output = self.run(cell, timeout)
        assert output.error is None, output.traceback
        return index, output

    def value(self, expression: str) -> str:
        """What the kernel prints for an expression."""
        return self.ok(f"print({expression})")[1].stream().strip()

    def output(self, index: int) -> Output:
        return Output(self.page.evaluate(_OUTPUTS, index))

    def until(self, index: int, text: str, timeout: float = 60.0) -> None:
        """Wait until what the cell shows on the screen has this text."""
        self.shown(index).get_by_text(text).first.wait_for(timeout=timeout * 1000)

    def cell(self, index: int) -> Locator:
        """A cell, scrolled into view."""
        self.page.evaluate(_SHOW, index)
        found = self.page.locator(f"[data-test-cell='{index}']")
        found.wait_for()
        return found

    def shown(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputArea")

    def trusted(self) -> list[bool]:
        """For each code cell, whether the front-end shows its outputs as those of the reader's own."""
        code = "window.jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.model.type === 'code')"
        return list(self.page.evaluate(f"() => {code}.map(cell => cell.model.trusted)"))

    # the user's hands

    def press(self, command: str) -> None:
        """Click a button of the notebook's toolbar, like "interrupt-kernel"."""
        self.page.locator(f".jp-NotebookPanel-toolbar [data-command='notebook:{command}']").click()

    def answer(self, button: str) -> None:
        """Click a button, by what stands on it, in the dialog that came up."""
        self.page.locator(".jp-Dialog button").filter(has_text=re.compile(f"^{re.escape(button)}$")).click()

    def save(self) -> Path:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return self.server.root / self.path

    def shot(self, name: str, index: int | None = None) -> Path:
        """A picture for people, of one cell or of the page; under build/screenshots or $NBDIST_SHOTS."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}-{self.front_end}.png"
        (self.page if index is None else self.cell(index)).screenshot(path=path)
        return path
