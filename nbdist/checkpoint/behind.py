"""save_state(async_save=True): the values are copied, and a thread on each rank writes them behind the training loop.

The threads use no collective: a rank's is done when its part is on the disk, the leader's when it has seen all parts
and the checkpoint has its name. The next call that all ranks make tells all what failed on one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import psutil

from nbdist import messages
from nbdist.checkpoint import place, writing
from nbdist.checkpoint.asynchronous import Background

_PATIENCE = 24 * 3600.0  # seconds for a part of a rank that lives, or that is on another machine


def begin(background: Background, snapshot: writing.Snapshot) -> None:
    """Copy what this rank writes, and begin to write it. A collective."""
    try:
        staged, events = background.stage({str(at): piece.tensor for at, piece in enumerate(snapshot.pieces)})
        for at, piece in enumerate(snapshot.pieces):
            piece.tensor = staged[str(at)]
        del staged
        lost = _watched(messages.exchange((socket.gethostname(), os.getpid(), psutil.Process().create_time())))
        background.start(_short(snapshot.path), lambda: _write(snapshot, events, lost), aloud=snapshot.leads)
    except BaseException as error:  # a Stop: others may have begun already, and must not wait for this rank
        _give_up(snapshot, error)
        raise


def wait(background: Background) -> None:
    """Wait for the save that was begun last, on all ranks. A collective.

    Raises:
        What it failed with, once; on each rank, where it is so on one.
    """
    what = background.what
    error = background.join()
    told = messages.agree("wait_for_checkpoint", None if error is None else f"{type(error).__name__}: {error}")
    failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
    if error is not None:
        raise error
    if failed:
        rank, text = failed[0]
        raise messages.echo(f"{what} was not saved: rank {rank} failed: {text}")


def _write(snapshot: writing.Snapshot, events: list[Any], lost: Callable[[int], bool]) -> None:
    try:
        for event in events:
            event.synchronize()
        writing.write(snapshot)
        if snapshot.leads:
            snapshot.pieces.clear()
            writing.finish(snapshot, _PATIENCE, lost)
    except BaseException as error:
        if not snapshot.leads and not os.path.isdir(snapshot.partial):
            raise RuntimeError(f"rank {snapshot.leader} has given it up") from None
        _give_up(snapshot, error)
        raise


def _give_up(snapshot: writing.Snapshot, error: BaseException) -> None:
    if snapshot.leads:
        place.discard(snapshot.partial)
    else:
        writing.tell_failure(snapshot, error)


def _watched(ranks: list[tuple[str, int, float]]) -> Callable[[int], bool]:
    """Whether a rank is known to have ended."""
    here = socket.gethostname()

    def lost(rank: int) -> bool:
        host, pid, began = ranks[rank]
        if host != here:
            return False
        try:
            process = psutil.Process(pid)
            return process.create_time() != began or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    return lost


def _short(path: str) -> str:
    """As one would name it here."""
    inside = os.path.relpath(path)
    return path if inside.startswith(os.pardir) else inside
