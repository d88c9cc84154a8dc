"""DistributedDataParallel in a rank, whoever made it: repaired after an interrupt, and seen as its bare module by
the notebook.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from nbdist.strategies import repair  # registers the exporter too


def install() -> None:
    """Keep track of every wrapper that is made from now on."""
    really = DistributedDataParallel.__init__

    @functools.wraps(really)
    def tracked(self: Any, *args: Any, **kwargs: Any) -> None:
        really(self, *args, **kwargs)
        repair.track(self)

    DistributedDataParallel.__init__ = tracked
