"""Hook ids of torch are a counter of each process: no id may be given out on both sides.

Where torch has no such counter any more, its ids are left alone.
"""

from __future__ import annotations

import sys


def hook_counter() -> int:
    """The next id that this process would give to a hook; 0 without torch."""
    hooks = sys.modules.get("torch.utils.hooks")
    return int(getattr(hooks.RemovableHandle, "next_id", 0)) if hooks is not None else 0


def raise_hook_counter(to: int) -> None:
    """Give out no id below this from now on."""
    hooks = sys.modules.get("torch.utils.hooks")
    if hooks is not None and hasattr(hooks.RemovableHandle, "next_id"):
        hooks.RemovableHandle.next_id = max(hooks.RemovableHandle.next_id, to)
