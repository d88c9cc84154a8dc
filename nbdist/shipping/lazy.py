"""torch and numpy, if the process has them: shipping never imports either by itself.

A notebook that has not imported torch cannot hold a tensor, so nothing is lost by looking in `sys.modules` only. A
received value imports what it needs when it is rebuilt.
"""

from __future__ import annotations

import sys
from typing import Any


def torch_if_loaded() -> Any:
    """The torch module when this process has imported it (all of it), else None."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "Tensor") and hasattr(module, "nn") else None


def numpy_if_loaded() -> Any:
    """The numpy module when this process has imported it, else None."""
    module = sys.modules.get("numpy")
    return module if hasattr(module, "ndarray") else None
