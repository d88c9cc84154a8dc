"""Accelerate, imported beside nbdist into the same process, from a folder of its own. Nothing that nbdist uses comes
from there, since the folder is the last one on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / ".envs" / "beside"
HOW = "Accelerate is not measured: benchmarks/.envs/beside has none (`make bench` puts it there)"


def accelerate() -> Any:
    """The module; None when it is not installed there."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        import accelerate
    except ImportError:
        return None
    return accelerate
