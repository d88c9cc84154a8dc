"""Modules that `fully_shard` has sharded in a rank, whoever called it: put right after an interrupt, and in shards
when a cell is over.
"""

from __future__ import annotations

import sys

from nbdist import state


def _is_used() -> bool:
    return "torch.distributed.fsdp" in sys.modules


def _repair() -> None:
    if _is_used():
        from nbdist.strategies import fsdp_repair

        fsdp_repair.repair_all()


def _let_go() -> None:
    if _is_used():
        from nbdist.strategies import fsdp_repair

        fsdp_repair.let_go()


def install() -> None:
    """From now on."""
    state.interrupt_hooks.add(_repair)
    state.cell_hooks.add(_let_go)
