"""What a loss reaches: the tensors that its backward gives a gradient, and a backward that gives them none.

A micro-batch of weight 0 says nothing, so its loss may be 0/0. Its backward runs all the same, for every engine's
collectives wait for it on the other ranks; and a gradient seeded with 0 that comes through 0/0 is NaN. So zeros are put
in its place where it arrives, before anything is added or shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def reaches(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the loss reaches one of these; or may, by ways that are not in its graph."""
    wanted = set(map(id, parameters))
    return any(leaf is None or id(leaf) in wanted for leaf in _leaves(loss))


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """The leaf tensors of the loss's graph, each once, the nearest first; None for a reentrant checkpoint, of which the
    graph does not tell what is in it.
    """
    if loss.grad_fn is None:
        if loss.requires_grad:
            yield loss
        return
    found: Any = loss.grad_fn
    seen, pending = {found}, [found]
    for node in pending:
        leaf = getattr(node, "variable", None)  # the node at which a gradient is added to its leaf
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif node.name() == "CheckpointFunctionBackward":
            yield None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


@contextmanager
def weightless(loss: torch.Tensor, models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """A backward of this loss in this block adds exact zeros, whatever it computes.

    Args:
        loss: of weight 0.
        models: those it may reach by ways that are not in its graph.
    """
    reached = {id(leaf): leaf for leaf in _leaves(loss) if leaf is not None}
    for model in models:
        reached.update((id(one), one) for one in model.parameters() if one.requires_grad)
    runs, handles = [True], []

    def silent(gradient: torch.Tensor) -> torch.Tensor | None:
        return _zeros(gradient) if runs else None

    try:
        for leaf in reached.values():
            handles.append(leaf.register_hook(silent))
        yield
    finally:
        runs.clear()  # should an interrupt come between here and the last line, nothing is silenced any more
        for handle in handles:
            handle.remove()


def _zeros(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.sparse_coo:  # the same rows, for they may be exchanged
        rows = gradient.coalesce()
        values = torch.zeros_like(rows.values())
        return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, check_invariants=False)
    return torch.zeros_like(gradient)
