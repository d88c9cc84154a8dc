"""gather_for_metrics: what all ranks have of the batch in hand, without what was no sample of it.

A rank for which nothing was left of a short last step computes on rank 0's samples (see `nbdist.data.plan`). So a
rank's rows are real all together or not at all, and dropping what was not real needs no look at shapes: such a rank
brings nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from nbdist import checks, collectives, messages, state
from nbdist.data.cursor import Cursor
from nbdist.ends import Leaf, leaves, number_dtype, rebuilt


def gather_for_metrics(
    value: Any,
    cursor: Cursor | None,
    use_gather_object: bool = False,
    stand_ins: tuple[int, int] | None = None,
    copies: int = 1,
) -> Any:
    """`gather` of what is real.

    Args:
        value: a nested value, as for `gather`.
        cursor: the batch in hand; None when no prepared loader runs: all of the value is real then.
        use_gather_object: gather it as one object, as `gather_object` does.
        stand_ins: see `Live`: for a note where the value seems to have been collected in a loop that has ended.

        copies: so many ranks in a row have the same, of which the first one's counts.

    Returns:
        As `gather`, but from a rank without real rows comes nothing; and while a loader runs a single float (a number
        or a 0-dim tensor), which is taken for a mean of the batch's rows, comes once for each of them, so that the
        mean over what is gathered is the mean over the samples. A single integer is a count, and comes once a rank.
    """
    use_gather_object = checks.flag(use_gather_object, "gather_for_metrics: use_gather_object")
    if cursor is None:
        if stand_ins is not None and any(_rows(end) == stand_ins[0] for end in collectives.leaves(value)):
            seen, real = stand_ins
            warnings.warn(
                f"gather_for_metrics behind the loop: of the {seen} rows that this process has seen in it, {real} were "
                "its own; the rest repeats rank 0's last batch and is counted again. Call it in the loop, for each "
                "batch, and collect what it returns",
                stacklevel=messages.depth(),
            )
        return collectives.gather_object(value, copies) if use_gather_object else collectives.gather(value, copies)
    rows = cursor.local
    if use_gather_object:
        return _objects(value, rows > 0, copies)
    size = getattr(cursor.plan, "batch", None)  # of full steps; None where they differ anyway
    ends = (_real(end, rows, size) for end in leaves(value))
    return collectives.gather(rebuilt(value, ends), copies)


def _rows(end: collectives.Leaf) -> int | None:
    if end.role == "tensor":
        return len(end.value) if end.value.dim() else None
    return len(end.value) if end.role == "list" else None


def _objects(value: Any, real: bool, copies: int) -> list[Any]:
    state.current()
    answers = messages.agree("gather_for_metrics(use_gather_object=True)", (real, value if real else None))
    values = [one for was_real, one in answers[::copies] if was_real]
    if values and all(isinstance(one, list) for one in values):
        return [item for one in values for item in one]
    return values


def _real(end: Leaf, rows: int, size: int | None) -> Any:
    """What of one end of the value is sent: all of it, or nothing of it when the rank has no real rows."""
    value = end.value
    if end.role == "tensor":
        if value.dim():
            if value.dim() == 1 and rows < len(value) == size and len(value.unique()) == 1:
                return value[:rows]  # a mean repeated for each row of a full batch: `loss.repeat(batch_size)`
            return value if rows else value[:0]
        value = value.detach()
        return value.expand(_times(value.is_floating_point() or value.is_complex(), rows))
    if end.role == "number":
        times = _times(isinstance(value, float | complex), rows)
        return torch.tensor([value] * times, dtype=number_dtype(value))
    if end.role == "list":
        return value if rows else []
    if end.role == "object":
        return [value] if rows else []
    return value


def _times(is_mean: bool, rows: int) -> int:
    if is_mean and rows > 1:
        state.note_once(
            "gather_for_metrics takes a single float for the mean of its batch: it comes once for each row, so that "
            "averaging what is gathered is right. For a sum, use reduce(value, 'sum')"
        )
    return rows if is_mean else min(rows, 1)
