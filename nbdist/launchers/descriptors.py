"""Whether the ranks of a pool find open files (descriptors) enough, asked before anything is made."""

from __future__ import annotations

import contextlib
import os
import resource

from nbdist.launchers.devices import PoolOptions
from nbdist.launchers.errors import StartFailed
from nbdist.shipping.wire import FILES_A_RANK

HERE = 2 * FILES_A_RANK - 1  # a rank, while it starts: both ends of all its files, of which the black box has one
IN_SUPERVISOR = FILES_A_RANK + 2  # a rank: its files on their way, and what multiprocessing keeps of a child
SPARE = 20  # of a process, besides what it has for ranks
# Every rank is forked with the files of all and 4 of multiprocessing's own, in one message: Linux takes 253 at most.
MOST_RANKS = (253 - 4) // FILES_A_RANK


def open_here() -> int:
    """How many this process has; 0 where that cannot be told."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0


def check_descriptors(options: PoolOptions) -> None:
    """Raises:
    StartFailed: more ranks than descriptors suffice for; the message has the limit, what is needed, the way out.
    """
    ranks = options.ranks
    if ranks > MOST_RANKS:
        raise StartFailed(
            f"cannot start {options}: {MOST_RANKS} are the most of one pool, since every rank is started with open "
            f"files for all; take {MOST_RANKS} or fewer"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    held = open_here()
    needed = max(held + HERE * ranks, IN_SUPERVISOR * ranks) + SPARE
    if needed > limit:
        fit = min((limit - SPARE - held) // HERE, (limit - SPARE) // IN_SUPERVISOR)
        smaller = f"at most {fit} ranks, or " if fit >= 1 else ""
        raise StartFailed(
            f"cannot start {options}: that needs about {needed} open files, of which this process has {held}, and "
            f"its limit is {limit}. Take {smaller}a higher limit: `ulimit -n {max(4096, needed)}` in the shell that "
            "starts Jupyter"
        )
