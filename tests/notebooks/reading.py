"""The notebooks that are in the repository, run and read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from run import clean, execute  # noqa: E402

__all__ = ["NOTEBOOKS", "clean", "execute", "shown_by", "text_of"]


def text_of(notebook: Any) -> str:
    """All text that a notebook's cells show."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)


def shown_by(notebook: Any, code: str) -> Any:
    """The outputs of the one cell that has this in its source."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    return cell.outputs
