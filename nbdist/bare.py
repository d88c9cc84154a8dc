"""An optimizer that was not prepared does not know of windows: in the middle of one it would step on gradients that are
neither whole nor shared between the ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbdist.loose import trained_by

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation


def refuse_bare_steps(windows: Accumulation) -> None:
    """From now on, for as long as these windows live, such a step is an error. For windows of more than one."""
    known = weakref.ref(windows)

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        of = known()
        if of is not None and of.newest is not None and not of.newest.boundary:
            _look(of, optimizer)

    weakref.finalize(windows, register_optimizer_step_pre_hook(look).remove).atexit = False


def _look(windows: Accumulation, optimizer: Optimizer) -> None:
    """The newest window is not finished. Prepared optimizers do not get here: they wait."""
    window = windows.newest
    if window is None:
        return
    # Behind its block, its loop must be known to go on: what a loop has left open is in nobody's way.
    if window is not windows.inside and not (window.holds and window.has_a_loop() and not window.is_over()):
        return
    own = {id(one) for model in window.alive() for one in model.parameters()}
    if any(id(one) in own for one in trained_by(optimizer)):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was not prepared with this Accelerator, and steps in the middle of an "
            f"accumulation window (micro-batch {window.count} of {windows.steps}), on gradients that are not whole: "
            "call optimizer = accelerator.prepare(optimizer), and it waits for the window's end"
        )
