"""Run a notebook for real, in a kernel of this environment, and print what it shows.

    python notebooks/run.py notebooks/quickstart.ipynb

The executed notebook is written to build/; with --save its outputs are kept in the file itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def clean(notebook: Any) -> Any:
    """Without outputs, as if it had never run."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("execution", None)
    return notebook


def execute(path: Path, show: bool = False) -> Any:
    """Run every cell of a cleaned copy; returns the executed notebook.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = clean(nbformat.read(path, as_version=4))

    def shown(cell: Any, cell_index: int, execute_reply: Any = None, **rest: Any) -> None:
        if show:
            for output in cell.get("outputs", ()):
                text = output.get("text") or output.get("data", {}).get("text/plain") or ""
                if output.output_type == "error":  # one that belongs to the story
                    text = f"{output.ename}: {output.evalue}"
                print(text.rstrip(), flush=True)

    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_executed=shown,
        coalesce_streams=True,  # a bar that moved is saved as it ended
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this machine: noise in a diff
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--save", action="store_true", help="keep the outputs in the file itself")
    options = parser.parse_args()
    print(f"running {options.notebook}")
    try:
        notebook = execute(options.notebook, show=True)
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    target = options.notebook
    if not options.save:
        target = Path("build") / options.notebook.name
        target.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, target)
    print(f"done: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
