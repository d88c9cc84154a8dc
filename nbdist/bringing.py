"""What every rank brings to a collective, told before anything moves: one small message.

So what does not fit together is the same exception on every rank, and never reaches the backend. In debug mode
(`PartialState.debug`) it lists all that each rank brings and from where, not only the first place where they differ.
"""

from __future__ import annotations

from typing import Any

import torch

from nbdist import messages, state
from nbdist.ends import CANNOT, Leaf
from nbdist.messages import DistributedOperationException


def meet(operation: str, ends: list[Leaf], carried: list[Any], same_shape: bool = False) -> list[Any]:
    """Tell each other what we bring. Returns each rank's (shapes, carried).

    Raises:
        DistributedOperationException: the nested values do not fit together; on every rank, with the ranks and what
            each brings.
    """
    state.current()  # under torchrun this may be the first look
    shapes = [tuple(end.value.shape) if isinstance(end.value, torch.Tensor) else None for end in ends]
    answers = messages.agree(operation, ([(end.path, end.kind) for end in ends], shapes, carried))
    first, first_shapes, _ = answers[0]
    for said, said_shapes, _ in answers[1:]:
        if said != first or (same_shape and said_shapes != first_shapes):
            raise DistributedOperationException(_mismatch(operation, answers))
    for path, kind in first:
        if kind.endswith(CANNOT):
            remedy = "it has no data" if " on meta" in kind else "make it dense first"
            what = kind.removesuffix(CANNOT)
            raise TypeError(f"{operation}: {place_of(path)}there is {what}, which cannot travel; {remedy}")
    return [(said_shapes, its) for _, said_shapes, its in answers]


def _mismatch(operation: str, answers: list[Any]) -> str:
    """The first place where the ranks differ."""

    def brings(answer: Any, index: int) -> tuple[str, str]:
        kinds, shapes, _ = answer
        if index >= len(kinds):
            return "", "nothing there"
        path, kind = kinds[index]
        return path, kind if shapes[index] is None else f"{kind}, shape {shapes[index]}"

    lines = listed(answers)
    for index in range(max(len(answer[0]) for answer in answers)):
        told = [brings(answer, index) for answer in answers]
        if len(set(told)) > 1:
            ranks = "; ".join(f"rank {rank} brings {what}" for rank, (_, what) in enumerate(told))
            place = place_of(next((path for path, _ in told if path), ""))
            return f"{operation}: {place}the ranks do not fit together: {ranks}{lines}"
    return f"{operation}: the ranks do not fit together{lines}"


def listed(answers: list[Any]) -> str:
    """In debug mode: all that each rank brings."""
    lines: list[str] = []
    if not state.debugging():
        return ""
    for rank, (kinds, shapes, _) in enumerate(answers):
        ends = [
            f"value{path}: {kind}" + ("" if shape is None else f", shape {shape}")
            for (path, kind), shape in zip(kinds, shapes, strict=True)
        ]
        lines.append(f"\n  rank {rank} brings " + "; ".join(ends))
    return "".join(lines)


def place_of(path: str) -> str:
    """Where in the value, in front of what is wrong there."""
    return f"at value{path}, " if path else ""
