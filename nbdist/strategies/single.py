"""One process: the model is used as it is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.strategies.base import Strategy


class Single(Strategy):
    """One process, one device, no communication."""

    name: ClassVar[str] = "single"

    def obstacle(self) -> str | None:
        if self.process.world_size > 1:
            count = self.process.world_size
            return f"there are {count} processes, and each would train a model of its own; 'ddp' trains one together"
        return super().obstacle()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model  # the user may have made one
