"""Writing a checkpoint: each rank its own parts, with no collective, then the manifest.

A rank writes its file of tensors, brings it to the disk, and then a small file that says it is done and what it has
written. The leader takes all of these into the manifest, which is written last. So a thread can do it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from nbdist import messages
from nbdist.checkpoint import blocks, contents, manifest, place


@dataclass
class Piece:
    """A part of a tensor that this rank writes.

    Attributes:
        tensor: its values; the run's own memory, until `Snapshot.stage`.
        offsets: which part of the whole it is.
        shape: of the whole.
    """

    key: str
    tensor: torch.Tensor
    offsets: list[int]
    shape: list[int]

    @property
    def name(self) -> str:
        """In the file."""
        sizes = list(self.tensor.shape)
        if sizes == self.shape:
            return self.key
        return f"{self.key}[{','.join(f'{at}:{at + size}' for at, size in zip(self.offsets, sizes, strict=True))}]"


@dataclass
class Snapshot:
    """All that one rank needs to write its part of a checkpoint.

    Attributes:
        path: the checkpoint's name; partial: the folder that is written into.
        rank, leader, group: this rank, the one that writes the manifest, and all that write into this folder.
        held: the manifest as far as it is known: on the leader it is the one that is written.
        own: what is this rank's own, as a tree.
        pieces: what it writes.
        after: what the leader does when the checkpoint has its name.
    """

    path: str
    partial: str
    rank: int
    leader: int
    group: list[int]
    held: manifest.Manifest
    own: Any
    pieces: list[Piece]
    after: Callable[[], None] = field(default=lambda: None)

    @property
    def bytes(self) -> int:
        return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)

    @property
    def leads(self) -> bool:
        return self.rank == self.leader


def plan(
    tensors: dict[str, torch.Tensor], rank: int, leader: int, group: list[int], own: frozenset[str]
) -> list[Piece]:
    """Which parts of which tensors this rank writes. A collective.

    What is whole on each rank is the leader's; of what is sharded each writes its shard, and of equal shards the first
    rank that has it.

    Args:
        tensors: all that this rank has.
        own: the keys that no other rank has.

    Raises:
        ValueError: the parts do not make whole tensors.
    """
    mine = {
        key: tensor for key, tensor in tensors.items() if rank == leader or key in own or contents.is_sharded(tensor)
    }
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    planner.set_up_planner(mine, is_coordinator=rank == leader)
    local = planner.create_local_plan()
    # An empty shard has the place of another one, or one behind the end.
    items = [item for item in local.items if item.tensor_data and item.tensor_data.chunk.sizes.numel()]
    empty = [item for item in local.items if item.tensor_data and not item.tensor_data.size.numel()]
    plans = messages.exchange(dataclasses.replace(local, items=[*items, *empty]))
    if len(plans) > 1:
        whole, _ = planner.create_global_plan([plans[one] for one in group])
        local = whole[group.index(rank)]
    else:
        local = plans[0]
    pieces = []
    for item in local.items:
        data: Any = item.tensor_data
        found: Any = planner.resolve_data(item)
        pieces.append(Piece(item.index.fqn, found.detach(), list(data.chunk.offsets), list(data.size)))
    return pieces


def write(snapshot: Snapshot, wrote: Callable[[int], Any] = lambda count: None) -> None:
    """This rank's part: its tensors on the disk, then the file that says so. No collective.

    Raises:
        OSError: it could not be written.
    """
    file = f"rank-{snapshot.rank:05}.safetensors"
    path = os.path.join(snapshot.partial, file)
    places = blocks.write(path, {piece.name: piece.tensor for piece in snapshot.pieces}, wrote)
    tensors: dict[str, Any] = {}
    for piece in snapshot.pieces:
        at, sums = places[piece.name]
        chunk = manifest.Chunk(piece.offsets, list(piece.tensor.shape), file, at, sums)
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        tensors.setdefault(piece.key, {"dtype": dtype, "shape": piece.shape, "chunks": []})["chunks"].append(
            dataclasses.asdict(chunk)
        )
    done = {"own": snapshot.own, "tensors": tensors, "files": {file: {"bytes": os.stat(path).st_size}}}
    place.write(_done(snapshot, snapshot.rank), json.dumps(done, separators=(",", ":")).encode())
    place.sync(snapshot.partial)


def _done(snapshot: Snapshot, rank: int) -> str:
    return os.path.join(snapshot.partial, f"rank-{rank:05}.done")


def _failed(snapshot: Snapshot, rank: int) -> str:
    return os.path.join(snapshot.partial, f"rank-{rank:05}.failed")


def tell_failure(snapshot: Snapshot, error: BaseException) -> None:
    """For the leader, where no collective can tell it: this rank could not write its part."""
    with contextlib.suppress(OSError):
        place.write(_failed(snapshot, snapshot.rank), f"{type(error).__name__}: {error}".encode())


def finish(snapshot: Snapshot, patience: float | None = None, lost: Callable[[int], bool] = lambda rank: False) -> None:
    """On the leader, when the ranks have written their parts: the manifest, and the checkpoint gets its name.

    Args:
        patience: how long to wait for the ranks' parts, in seconds; None: they are there.
        lost: whether a rank is known to have ended, so that waiting for it is of no use.

    Raises:
        RuntimeError: a rank has failed, or its part did not come. OSError: it could not be written.
    """
    parts = {rank: _part(snapshot, rank, patience, lost) for rank in snapshot.group}
    held = snapshot.held
    for rank, part in parts.items():
        held.files |= part["files"]
        for key, tensor in part["tensors"].items():
            chunks = [manifest.Chunk(**chunk) for chunk in tensor["chunks"]]
            known = held.tensors.setdefault(key, manifest.Tensor(tensor["dtype"], tensor["shape"], []))
            known.chunks += chunks
        os.unlink(_done(snapshot, rank))
    held.ranks = [parts[rank]["own"] if rank in parts else None for rank in range(held.world_size)]
    held.other = place.others(snapshot.partial, set(held.files))
    for name in held.other:
        place.sync(os.path.join(snapshot.partial, name))
    held.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    place.commit(snapshot.partial, snapshot.path, held)
    snapshot.after()


def _part(snapshot: Snapshot, rank: int, patience: float | None, lost: Callable[[int], bool]) -> Any:
    begun = time.monotonic()
    while True:
        gone = lost(rank)  # before it is looked for: what it has written till then counts
        try:
            with open(_done(snapshot, rank), "rb") as file:
                return json.loads(file.read())
        except FileNotFoundError:
            pass
        try:
            with open(_failed(snapshot, rank)) as file:
                raise RuntimeError(f"rank {rank} could not write its part of {snapshot.path}: {file.read()}")
        except FileNotFoundError:
            pass
        if gone:
            raise RuntimeError(f"rank {rank} has ended, and has not written its part of {snapshot.path}")
        if patience is None or time.monotonic() - begun > patience:
            raise RuntimeError(
                f"rank {rank} has not written its part of {snapshot.path}: rank {snapshot.leader} sees none in "
                f"{snapshot.partial}. All ranks must write to one disk"
            )
        time.sleep(0.02)


def keys_of(snapshot: Snapshot) -> Iterable[str]:
    return (piece.key for piece in snapshot.pieces)
