"""Loose parameters: prepared optimizers train them, and no wrapper averages their gradients over the ranks.

The temperature of a contrastive loss, a criterion that was not prepared, a model that was forgotten in `prepare`, one
that was frozen when it was prepared and thawed later. Left alone, each rank would train its own. So they are made equal
to rank 0's when they are first seen, and when a backward completes a window their gradients are averaged, in one
all-reduce for each dtype and device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist import messages
from nbdist.state import interrupt_hooks
from nbdist.strategies import Strategy

if TYPE_CHECKING:
    from nbdist.strategies.optimizer import PreparedOptimizer
    from nbdist.window import Window

_AT_ONCE = 2**26  # numbers in one message: what is copied at a time
_is_trained = attrgetter("requires_grad")


class Loose:
    """Those of one Accelerator.

    Args:
        strategy: knows what it averages itself.
        optimizers: the prepared ones that are alive, by a number that is the same on all ranks.

    Attributes:
        parameters: what all ranks know to be loose.
        backwards: how many backward calls the Accelerator has made since there were any.
        sync: what `no_sync` and `trigger_sync_in_backward` say; None outside of both.
    """

    def __init__(self, strategy: Strategy, optimizers: Mapping[int, PreparedOptimizer]) -> None:
        self._strategy, self._optimizers = strategy, optimizers
        self._ranks = strategy.process.world_size
        self.parameters: list[torch.Tensor] = []
        self._known: set[int] = set()
        self.backwards = 0
        self.sync: bool | None = None
        self._doubtful = False
        self._buckets: tuple[list[bool], list[list[torch.Tensor]]] = [], []
        self._on_interrupt = self._drop  # kept alive: the hooks are held weakly
        interrupt_hooks.add(self._on_interrupt)

    def doubt(self) -> None:
        """Optimizers or models have changed, alike on all ranks: look again before the next use."""
        self._doubtful = True

    def look(self, where: str) -> None:
        """Agree with the other ranks on what is loose, if that may have changed. A collective.

        Args:
            where: the user's call that this is in.

        Raises:
            DistributedOperationException: the ranks' optimizers train other parameters each; on all ranks.
        """
        if not self._doubtful:
            return
        self._doubtful = False
        averaged = {id(parameter) for parameter in self._strategy.averaged()}
        mine = {
            number: {at: one for at, one in enumerate(trained_by(optimizer)) if _is_loose(one, averaged)}
            for number, optimizer in list(self._optimizers.items())
        }
        told = {number: {at: _kind(one) for at, one in found.items()} for number, found in mine.items()}
        everyone = messages.agree(where, told)
        # An optimizer that the user has let go of may be gone on one rank and not yet on another.
        agreed: dict[int, torch.Tensor] = {}
        for number, found in mine.items():
            if any(number not in one for one in everyone):
                continue
            for at in sorted(set().union(*(one[number] for one in everyone))):
                kinds = [one[number].get(at) for one in everyone]
                if any(kind != kinds[0] for kind in kinds):
                    raise messages.DistributedOperationException(self._differ(self._optimizers[number], at, kinds))
                agreed[id(found[at])] = found[at]
        before, self._known = self._known, set(agreed)
        self.parameters, self._buckets = list(agreed.values()), ([], [])
        for key, one in agreed.items():
            if key not in before:
                _from_first(one)
        for optimizer in list(self._optimizers.values()):
            optimizer.look_again(self.backwards)

    def _differ(self, optimizer: PreparedOptimizer, at: int, kinds: list[Any]) -> str:
        each = ["none" if kind is None else f"{kind[0]} of {kind[1]}" for kind in kinds]
        told = "; ".join(f"rank {rank} has {one}" for rank, one in enumerate(each))
        return (
            f"parameter {at} of this {type(optimizer.optimizer).__name__} belongs to no prepared model, and is another "
            f"one on each rank: {told}. Ranks train the same parameters: prepare the model with them, the same on all; "
            "or leave an optimizer unprepared whose parameters are each rank's own"
        )

    def trains(self, optimizer: PreparedOptimizer) -> bool:
        """Whether some of this optimizer's parameters are loose."""
        return any(id(one) in self._known for one in trained_by(optimizer))

    def share(self, window: Window | None) -> None:
        """A backward of the Accelerator is done: average the gradients, if they are those of a whole window.

        Args:
            window: the one it was in; None: it was outside of all.
        """
        self.look("backward")
        self.backwards += 1
        if self.sync if self.sync is not None else (window is None or window.boundary):
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Every gradient becomes the mean over the ranks, one that a rank has not counts as zero there. What no rank
        has stays None. A collective.
        """
        trained = [*map(_is_trained, self.parameters)]
        if trained != self._buckets[0]:
            self._buckets = trained, list(_buckets([one for one in self.parameters if one.requires_grad]))
        for bucket in self._buckets[1]:
            self._average(bucket)

    def _average(self, bucket: list[torch.Tensor]) -> None:
        first, gradients = bucket[0], [one.grad for one in bucket]
        sparse = [gradient is not None and gradient.layout is not torch.strided for gradient in gradients]
        parts = [
            torch.zeros(one.numel(), dtype=one.dtype, device=one.device)
            if gradient is None
            else (gradient.to_dense() if gradient.layout is not torch.strided else gradient).reshape(-1).to(one.dtype)
            for one, gradient in zip(bucket, gradients, strict=True)
        ]
        here = [gradient is not None for gradient in gradients]
        parts.append(torch.tensor([*here, *sparse], dtype=first.dtype, device=first.device))
        joint = torch.cat(parts).div_(self._ranks)
        dist.all_reduce(joint)
        *means, flags = joint.split([one.numel() for one in bucket] + [2 * len(bucket)])
        if any(sparse) or not all(here):  # only then is it waited for
            found = (flags != 0).tolist()
            here, sparse = found[: len(bucket)], found[len(bucket) :]
        for one, mean, gradient, there, thin in zip(bucket, means, gradients, here, sparse, strict=True):
            if not there:
                continue
            if thin:
                one.grad = mean.view(one.shape).to_sparse(1)
            elif gradient is None or gradient.layout is not torch.strided:
                one.grad = mean.view(one.shape).clone()
            else:
                gradient.copy_(mean.view(one.shape))

    def check(self, optimizer: PreparedOptimizer, wiped: int) -> None:
        """It is about to step, and had no gradients when there had been `wiped` backward calls.

        Raises:
            RuntimeError: there are gradients now, and no backward of the Accelerator since then has shared them.
        """
        if wiped != self.backwards:
            return
        if any(one.grad is not None for one in trained_by(optimizer) if id(one) in self._known):
            raise RuntimeError(
                f"this {type(optimizer.optimizer).__name__} trains parameters that belong to no prepared model, and "
                "their gradients were not shared between the ranks: loss.backward() is each rank's own. Call "
                "accelerator.backward(loss)"
            )

    def forget(self) -> None:
        """There are no optimizers any more."""
        self.parameters, self._known, self._doubtful, self._buckets = [], set(), False, ([], [])

    def _drop(self) -> None:
        """After an interrupt some may be averaged and some not."""
        for one in self.parameters:
            one.grad = None


def trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_loose(one: torch.Tensor, averaged: set[int]) -> bool:
    # What another library spreads over the ranks (a DTensor, a part of a flat parameter) it shares itself.
    whole = type(one.data) is torch.Tensor and not getattr(one, "_fsdp_flattened", False)
    return whole and id(one) not in averaged and not torch.nn.parameter.is_lazy(one)


def _kind(one: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(one.shape), str(one.dtype)


def _from_first(one: torch.Tensor) -> None:
    """Rank 0's value. Autograd is not to see it: a forward may have gone through it already."""
    value = one.data.contiguous()
    dist.broadcast(value, src=0)
    if value.data_ptr() != one.data.data_ptr():
        one.data.copy_(value)


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What goes into one message: of one dtype, on one device, and not too much at once."""
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for one in parameters:
        by_kind.setdefault((one.dtype, one.device), []).append(one)
    for alike in by_kind.values():
        bucket: list[torch.Tensor] = []
        numbers = 0
        for one in alike:
            if bucket and numbers + one.numel() > _AT_ONCE:
                yield bucket
                bucket, numbers = [], 0
            bucket.append(one)
            numbers += one.numel()
        yield bucket
