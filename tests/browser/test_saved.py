"""A saved notebook, read again without a kernel: by its author, by somebody else, and as exported HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from tests.browser.opened import SHOTS
from tests.browser.server import Server

CELLS = [
    "%load_ext nbdist",
    """%%distributed -n 2
import time
import matplotlib.pyplot as plt
time.sleep(0.3 * rank)
print("loss on this rank:", 1.5 + rank)
plt.figure(figsize=(3, 2))
plt.plot([3, 1, 2])
plt.show()""",
    """%%distributed -n 2
import pandas as pd
pd.DataFrame({"epoch": [0, 1], "accuracy": [0.625, 0.875]})""",
    """%%distributed -n 2 --output tabs
print("in the tab of rank", "zero" if rank == 0 else "one")""",
    """%%distributed -n 2
missing = {}["a key"]""",
]


@pytest.fixture(scope="module")
def saved(server: Server, browser: Any) -> Iterator[Any]:
    """The notebook, run and saved in JupyterLab."""
    from tests.browser.opened import Opened, write

    write(server.root / "saved.ipynb", [nbformat.v4.new_markdown_cell("# Saved"), *CELLS])
    opened = Opened(server, browser, "lab", "saved.ipynb")
    for index in range(len(CELLS)):
        opened.run(index + 1)
    path = opened.save()
    opened.close()
    server.end_kernels()
    yield nbformat.read(path, as_version=4)


def check(shown: Any) -> None:
    """What a reader must find; `shown` is the part of a page that has the cells."""
    assert shown.get_by_text("loss on this rank: 1.5").is_visible()
    assert "[1] loss on this rank: 2.5" in shown.inner_text()
    image = shown.locator("img").first
    assert image.evaluate("image => image.naturalWidth") > 150
    assert shown.get_by_role("cell", name="0.875").is_visible()
    assert "KeyError: 'a key'" in shown.inner_text()
    assert shown.get_by_text("in the tab of rank zero").is_visible()
    other = shown.get_by_text("in the tab of rank one")
    assert not other.is_visible()
    shown.get_by_text("rank 1", exact=True).click()
    assert other.is_visible()


@pytest.mark.parametrize("front_end, trusted", [("lab", True), ("lab", False), ("notebook", False)])
def test_it_is_read_without_a_kernel(
    open_notebook: Callable[..., Any], server: Server, saved: Any, front_end: str, trusted: bool
) -> None:
    copy = nbformat.from_dict({**saved, "cells": [*saved.cells]})
    copy.metadata["kernelspec"] = {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}
    copy.metadata["language_info"] = {"name": "elsewhere"}  # no kernel for this is here: none is started
    whose = "mine" if trusted else "somebody's"
    copy.cells[0] = nbformat.v4.new_markdown_cell(f"# This is {whose}, read in {front_end}")
    path = server.root / f"{front_end}-{trusted}.ipynb"
    nbformat.write(copy, path)
    if trusted:
        NotebookNotary(data_dir=str(server.private["JUPYTER_DATA_DIR"])).sign(nbformat.read(path, as_version=4))
    notebook = open_notebook(front_end, path.name, kernel=False)
    notebook.answer("No Kernel")
    notebook.page.locator(".jp-Dialog").wait_for(state="detached")
    assert server.kernels() == []
    assert notebook.trusted() == [trusted] * len(CELLS)
    for index in range(len(CELLS) + 1):
        notebook.cell(index)
    shown = notebook.page.locator(".jp-Notebook")
    notebook.shot(f"saved-{'trusted' if trusted else 'untrusted'}")
    check(shown)


def test_it_is_read_as_html_without_scripts(saved: Any, browser: Any, tmp_path: Path) -> None:
    from nbconvert import HTMLExporter

    page_file = tmp_path / "saved.html"
    page_file.write_text(HTMLExporter().from_notebook_node(saved)[0])
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1000, "height": 1200})
    page = context.new_page()
    page.goto(page_file.as_uri())
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / "saved-html.png", full_page=True)
    check(page.locator("body"))
    context.close()
