"""Rows that are fetched a batch at once, so that what a slow dataset costs does not hide what a loop does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    """So many random rows of so many numbers."""

    def __init__(self, rows: int, width: int) -> None:
        self.data = torch.randn(rows, width)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.data[indices]


def as_it_is(batch: Any) -> Any:
    """The collate function of such rows."""
    return batch
