"""What users pass as `weight`, turned into what each rank's mean enters the joint mean with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from nbdist import checks, messages


class Weights:
    """Amounts of this rank, and their sums over all ranks.

    An amount is a float, or a 0-dim tensor where reading the number would wait for a device. A bad one (negative, NaN,
    infinite, of the wrong shape) is NaN from here on, so that the sum tells every rank: nobody raises before the ranks
    have exchanged, and so nobody waits for one that has raised. On a device, where the sum is not read, what is bad
    in it gives gradients of NaN.

    Args:
        ranks: how many ways a batch is split.
        device: that of this rank.
        together: how many ranks take the same part of a batch. Each brings an amount: equal ones where they compute
            the same, what its part of the sequence has where they share one.
    """

    __slots__ = ("_device", "_exact", "_together", "ranks")

    def __init__(self, ranks: int, device: torch.device, together: int = 1) -> None:
        self.ranks, self._device, self._together = ranks, device, together
        self._exact = torch.float32 if device.type == "mps" else torch.float64

    def amount(self, weight: Any, real: bool) -> tuple[Any, str]:
        """The weight as an amount, and what is wrong with it, "" if nothing is.

        Args:
            weight: a number or a tensor with one element.
            real: False for the stand-in batch of a rank with nothing left: it weighs 0, whatever the user says.
        """
        if not real:
            return 0.0, ""
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                return math.nan, f"weight has shape {tuple(weight.shape)}; it is one number"
            if weight.device.type != "cpu":
                with torch.no_grad():
                    value = weight.detach().to(self._exact).reshape(())
                    return torch.where(value >= 0, value, math.nan), ""
        try:
            if isinstance(weight, str | bytes | bool):  # Python would make a number of them
                raise TypeError
            number = float(weight)
        except (TypeError, ValueError):
            return math.nan, f"weight is {checks.short(weight)}; it is one number"
        if not 0 <= number < math.inf:
            return math.nan, f"weight is {number}; it is how many things the loss is the mean of, a number from 0 on"
        return number, ""

    def joint(self, amount: Any, wrong: str) -> Any:
        """The sum of the ranks' amounts: one tiny all-reduce. A tensor on a device where that is how it was made.

        Raises:
            ValueError: an amount is bad; on every rank that does not train on a device, and on the one it comes from.
        """
        total = amount
        if self.ranks > 1 or self._together > 1:
            with torch.no_grad():
                there = self._device if self._device.type != "cpu" else torch.device("cpu")
                total = torch.as_tensor(amount, dtype=self._exact).to(there, copy=True)
                try:
                    dist.all_reduce(total)
                except RuntimeError as error:
                    if (lost := messages.of_a_lost_rank(error)) is not None:
                        raise lost from None
                    raise
                if there.type == "cpu":
                    total = total.item()
                if self._together > 1:
                    total = total / self._together
        if wrong:
            raise ValueError(wrong)
        if isinstance(total, float) and not math.isfinite(total):
            told = "another rank has passed a weight that is no number from 0 on; its own error names it"
            raise messages.echo(told, ValueError)
        return total

    def correction(self, reference: Any, total: Any) -> Any:
        """What gradients whose parts came in as amount times `reference` must be multiplied by; 0 where all amounts
        are 0.
        """
        if isinstance(total, torch.Tensor):
            with torch.no_grad():
                return torch.where(total == 0, 0.0, self.ranks / (total * reference))
        return self.ranks / (total * reference) if total else 0.0

    def share(self, weight: Any, real: bool) -> Any:
        """The factor of this rank's loss when it is all that this step has: its weight over the mean weight."""
        amount, wrong = self.amount(weight, real)
        return times(amount, self.correction(1.0, self.joint(amount, wrong)))


def times(amount: Any, factor: Any) -> Any:
    """The product; an amount that is known to be 0 stays known, also where the factor is on a device."""
    return 0.0 if type(amount) is float and not amount else amount * factor
