"""How a loader is prepared: what the Accelerator has been told, and which part of the samples is this rank's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def never() -> bool:
    return False


def whole_number(value: Any, told: str) -> int:
    """The value as an int.

    Args:
        told: how the error begins, up to the value.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{told} {value!r}; it must be a whole number of at least 0")
    return number


@dataclass(frozen=True)
class Options:
    """What holds for one prepared loader.

    Attributes:
        rank, ranks: which part is ours, of how many.
        together: so many processes in a row take the same part.
        device: where batches are brought; None leaves them where they are.
        non_blocking: bring them there beside the computation.
        split_batches: the loader's batch size is that of all ranks together.
        dispatch: rank 0 reads, and sends each rank its part.
        already_sharded: each rank's dataset has other samples; None: as the dataset says (`sharded_by_rank`).
        data_seed: the seed of a loader without a generator; None: that of `set_seed`.
        shared_by: so many ranks share a batch of `split_batches`; 0: `ranks`.
        accumulates: whether windows of several batches are asked for, so that the last batch must be known as such.
    """

    rank: int = 0
    ranks: int = 1
    together: int = 1
    device: Any = None
    non_blocking: bool = False
    split_batches: bool = False
    dispatch: bool = False
    already_sharded: bool | None = None
    data_seed: int | None = None
    shared_by: int = 0
    accumulates: Callable[[], bool] = never

    @property
    def everyone(self) -> int:
        """How many processes there are."""
        return self.ranks * self.together

    def each(self, batch: int | None, whole: bool = False) -> int:
        """Samples that a rank takes of a full step, from the loader's batch size.

        Args:
            batch: the loader's; None: it makes no batches.
            whole: leave it as it is.

        Raises:
            ValueError: it cannot be split over the ranks.
        """
        if not self.split_batches or whole:
            return batch or 1
        if batch is None:
            raise ValueError(
                "split_batches=True splits a loader's batches over the ranks, and this loader has batch_size=None: it "
                "makes none. Give it a batch size"
            )
        ranks = self.shared_by or self.ranks
        if batch % ranks:
            raise ValueError(
                f"split_batches=True: batch_size is that of all ranks together, and {batch} cannot be split evenly "
                f"over {ranks} ranks. Take a multiple of {ranks}, or split_batches=False for {batch} a rank"
            )
        return batch // ranks
