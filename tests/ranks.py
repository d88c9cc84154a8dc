"""Two real ranks for a test: `run_ranks(function, 2, *args)` gives what the function returned on each rank.

The function is a module-level one, called as function(rank, ranks, *args) in processes with a gloo group of their own.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Once, in the server, what each rank would import anew: an optimizer brings torch._dynamo, which takes over a second.
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "nbdist.accelerator"]


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, limit: float = 60.0) -> list[Any]:
    """Run the function on so many ranks; all of them are gone afterwards.

    Raises:
        AssertionError: a rank failed (the first one's traceback) or did not answer within `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, function, rank, ranks, str(Path(folder, "store")), args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        try:
            return _answers(ends, time.monotonic() + limit)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(ends: list[Any], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    waiting = dict(enumerate(ends))
    while waiting:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(left, 0))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting)} did not answer in time")
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            values[rank] = value
    return [values[rank] for rank in range(len(ends))]


def _rank(end: Any, function: Callable[..., Any], rank: int, ranks: int, store: str, args: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method(
        None, force=True
    )  # as in a pool: else every worker of a loader would need a server
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    gc.freeze()  # a collection is of what this test makes
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        end.send_bytes(pickle.dumps((True, function(rank, ranks, *args))))
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        end.close()
        os._exit(0)  # a rank whose peers are gone would wait in its goodbye
