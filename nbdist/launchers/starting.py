"""What ranks need in order to start: their descriptors, what they are told, and the wait until all are ready."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from nbdist import system
from nbdist.launchers.errors import StartFailed
from nbdist.shipping.link import Link

if TYPE_CHECKING:
    from nbdist.launchers.pool import Pool

START_LIMIT = 60.0  # seconds for every rank to say that it is ready


def surroundings() -> dict[str, Any]:
    """What a cell finds around it in this process."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = os.sep
    return {"environment": dict(os.environ), "folder": folder, "path": list(sys.path), "argv": list(sys.argv)}


def specs_of(pool: Pool, port: int, around: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank is told when it is forked.

    Args:
        port: of the store at which they meet.
        around: from `surroundings`.
    """
    return [
        {
            "rank": rank,
            "world_size": pool.size,
            "pool": pool.name,
            "port": port,
            "device": pool.options.device,
            "devices": pool.options.devices,
            "variable": pool.options.variable,
            "why": f"rank {rank} of {pool.options}",
            "threads": pool.threads,
            "runner": pool.options.runner,
            "surroundings": around,
            "notebook": os.getpid(),
        }
        for rank in range(pool.size)
    ]


def make_files(
    size: int, ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[list[Link], list[tuple[int, int, int]], list[int], list[int]]:
    """(links, pipes, black boxes) that stay here, and the ranks' ends of all; each is closed by its stack."""
    links: list[Link] = []
    pipes: list[tuple[int, int, int]] = []
    boxes: list[int] = []
    files: list[int] = []
    for _ in range(size):
        here, there = socket.socketpair()
        ours.callback(here.close)
        theirs.callback(there.close)
        links.append(Link(here))
        files.append(there.fileno())
        readers = []
        for _ in range(3):
            reader, writer = os.pipe()
            ours.callback(os.close, reader)
            theirs.callback(os.close, writer)
            readers.append(reader)
            files.append(writer)
        pipes.append((readers[0], readers[1], readers[2]))
        box = system.memory_file("nbdist-place")
        ours.callback(os.close, box)
        boxes.append(box)
        files.append(box)
    return links, pipes, boxes, files


def wait_for_ready(pool: Pool) -> None:
    """Until each rank has said hello and joined the group.

    Raises:
        StartFailed: one could not; the message names it.
    """
    assert pool.reader is not None
    said: dict[int, str] = dict.fromkeys(range(pool.size), "nothing")
    words: dict[int, bytes] = {}
    end = time.monotonic() + START_LIMIT
    pool.reader.listening = True
    try:
        while any(word != "ready" for word in said.values()):
            event = pool.next_event(end - time.monotonic())
            if event is None:
                missing = {rank: word for rank, word in said.items() if word != "ready"}
                raise StartFailed(
                    f"not ready within {START_LIMIT:.0f} s: "
                    + "; ".join(f"rank {rank} has said {word}" for rank, word in missing.items())
                )
            if event.what == "control" and event.value.kind in ("hello", "ready"):
                said[event.rank] = event.value.kind
            elif event.what == "control" and event.value.kind == "failed":
                raise StartFailed(f"rank {event.rank} could not start: {event.value['error']}")
            elif event.what == "text":
                words[event.rank] = (words.get(event.rank, b"") + event.value)[-2000:]
            elif event.what == "closed" and event.value == "control":
                last = words.get(event.rank, b"").decode("utf-8", "replace").strip()
                raise StartFailed(
                    f"rank {event.rank} ended while starting" + (f"; its last words: {last}" if last else "")
                )
    finally:
        if pool.reader is not None:
            pool.reader.listening = False
