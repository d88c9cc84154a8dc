"""torch.distributed in a rank: the default group is ours, and living with it must be what a script would see.

`destroy_process_group()` closes it for the rest of the cell (`is_initialized()` is False), `init_process_group()`
opens it again, and every
cell starts with it open: libraries end their runs by destroying the group, and the next cell would have none.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as registry


def _set_default(group: Any) -> None:
    """Have torch take this group, or none, for the default one."""
    update = getattr(registry, "_update_default_pg", None)
    if update is not None:
        update(group)
    else:  # what it does but for a prefix in torch's log
        registry.GroupMember.WORLD = group


class DefaultGroup:
    """The pool's default group, opened and closed."""

    def __init__(self) -> None:
        self._group: Any = None
        self._really_init = dist.init_process_group
        self._really_destroy = dist.destroy_process_group
        self._told: set[str] = set()

    def install(self) -> None:
        """Put our two functions where torch keeps its own. Called before the user's code can have imported them by
        name.
        """
        for module in (dist, registry):
            module.init_process_group = self.init_process_group
            module.destroy_process_group = self.destroy_process_group

    def adopt(self) -> None:
        """The group that is open now is the pool's."""
        self._group = registry.GroupMember.WORLD

    def reopen(self) -> None:
        """Every cell starts with the default group open."""
        if self._group is not None and registry.GroupMember.WORLD is not self._group:
            _set_default(self._group)
        self._told.clear()

    def destroy_process_group(self, group: Any = None) -> None:
        """`torch.distributed.destroy_process_group`; the default group is closed and not destroyed."""
        if self._group is None or group not in (None, self._group, registry.GroupMember.WORLD):
            return self._really_destroy(group)
        if registry.GroupMember.WORLD is None:
            raise ValueError("Invalid process group specified: the default group is closed already")
        _set_default(None)
        return None

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **others: Any,
    ) -> None:
        """`torch.distributed.init_process_group`; hands the pool's group out again.

        Raises:
            ValueError: the group is open already (as torch says it), or another rank or world size than the pool's
                is asked for.
        """
        if self._group is None:
            return self._really_init(
                backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id, **others
            )
        if registry.GroupMember.WORLD is not None:
            raise ValueError(
                "trying to initialize the default process group twice! A %%distributed cell starts with it open: "
                "leave init_process_group out, or call it only `if not torch.distributed.is_initialized()`"
            )
        mine, size = self._group.rank(), self._group.size()
        if (rank not in (-1, mine)) or (world_size not in (-1, size)):
            raise ValueError(
                f"init_process_group(rank={rank}, world_size={world_size}): this is rank {mine} of a pool of {size}; "
                f"leave both out, or start the cell with -n {world_size if world_size > 0 else size}"
            )
        _set_default(self._group)
        living = dist.get_backend(self._group)
        if backend is not None and backend.split(":")[-1].split(",")[0].lower() not in str(living).lower():
            self._say(f"init_process_group({backend!r}): the pool's group goes on with {living}")
        if timeout is not None:
            self._say("init_process_group(timeout=...): the pool's group keeps its own timeout")
        return None

    def _say(self, line: str) -> None:
        if line not in self._told and os.environ.get("RANK") == "0":
            self._told.add(line)
            print(f"nbdist: {line}", file=sys.stderr)
