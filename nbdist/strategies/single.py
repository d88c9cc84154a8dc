"""One process: the model is used as it is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist import views
from nbdist.strategies.base import Strategy, Through, as_it_is


class Single(Strategy):
    """One process, one device, no communication."""

    name: ClassVar[str] = "single"

    def obstacle(self) -> str | None:
        if self.process.world_size > 1:
            count = self.process.world_size
            return f"there are {count} processes, and each would train a model of its own; 'ddp' trains one together"
        return super().obstacle()

    def wrap(self, model: torch.nn.Module, through: Through = as_it_is) -> torch.nn.Module:
        if isinstance(model, DistributedDataParallel):  # the user has made one: it stays, and what it calls is seen
            model.module = through(views.bare(model.module))
            return model
        return through(model)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return views.bare(model.module) if isinstance(model, DistributedDataParallel) else model  # the user's own
