"""A checkpoint in the middle of an accumulation window: no gradients are saved, so the window's batches come again."""

from __future__ import annotations

from typing import Any

from nbdist import state


def rewind(accelerator: Any, loaders: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put the saved positions of loaders before the batches of windows that are open.

    Args:
        loaders: the prepared ones, by name.
        saved: their part of the contents.
    """
    for window in list(accelerator._windows.made.values()):
        count, position, one_each = window.unfinished()
        if not count:
            continue
        name = next((name for name, one in loaders.items() if one._nb.position is position), None)
        held = None if name is None else saved[name]["state"]
        if held is not None and one_each and held["delivered"] >= count:
            held["delivered"] -= count
            held.pop("stream", None)  # where the dataset was: it is read up to there instead
            state.note_once(
                f"save_state in the middle of an accumulation window: its gradients are not saved. The checkpoint has "
                f"the loader {name!r} where the window began, {count} batch{'es' if count > 1 else ''} back, so that "
                "they come again. Where accelerator.sync_gradients is True and the optimizer has stepped, nothing is "
                "done twice"
            )
        else:
            state.note_once(
                f"save_state in the middle of an accumulation window: the gradients of its {count} micro-batch"
                f"{'es' if count > 1 else ''} are not saved, and a run that is resumed from here does without them. "
                "Save where accelerator.sync_gradients is True and the optimizer has stepped"
            )
