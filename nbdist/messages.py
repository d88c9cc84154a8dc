"""Small messages between the ranks: what collectives, barriers and main-process helpers agree on before anything
else moves.

Knows torch.distributed and nothing of this package; without a process group there is one rank.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any


def ranks() -> int:
    """How many ranks the default process group has; 1 without one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class DistributedOperationException(ValueError, RuntimeError):
    """The ranks do not fit together: in what they bring to a collective, or in which one they are. Raised on all of
    them, naming each.
    """


class Unsendable:
    """Travels in place of a value that cannot be pickled, so that every rank hears of it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def pack(value: Any) -> bytes:
    """Pickle, by value where by reference fails (a lambda); an `Unsendable` where nothing helps."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        import cloudpickle

        try:
            return cloudpickle.dumps(value)
        except Exception as error:
            return pickle.dumps(Unsendable(f"{type(error).__name__}: {error}"))


_GONE = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed")  # what gloo says of a peer
_MESSAGE = 512  # bytes of the one message that suffices for most exchanges; longer values take a second one


def exchange(value: Any) -> list[Any]:
    """Every rank's value, by rank. One small message when the values are small. A collective: all ranks call it.

    Raises:
        TypeError: a rank's value cannot be pickled; raised on all ranks, naming it.
    """
    world_size = ranks()
    if world_size == 1:
        return [value]
    payload = pack(value)
    device = message_device()
    first = bytearray(_MESSAGE)
    first[:8] = len(payload).to_bytes(8, "little")
    first[8 : 8 + len(payload[: _MESSAGE - 8])] = payload[: _MESSAGE - 8]
    parts = _all_bytes(first, world_size, device)
    sizes = [int.from_bytes(part[:8], "little") for part in parts]
    if max(sizes) > _MESSAGE - 8:
        longest = max(sizes)
        parts = _all_bytes(bytearray(payload).ljust(longest, b"\0"), world_size, device)
        return [unpack(part[:size], rank) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]
    return [unpack(part[8 : 8 + size], rank) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]


def unpack(data: bytes, rank: int) -> Any:
    """What a rank has packed.

    Raises:
        TypeError: it could not be pickled there, or cannot be unpickled here; names the rank.
    """
    try:
        value = pickle.loads(data)
    except Exception as error:
        raise TypeError(
            f"what rank {rank} has sent cannot be unpickled on this one: {type(error).__name__}: {error}. Its class, "
            "and what it needs, must be there on every rank"
        ) from error
    if type(value) is Unsendable:
        raise TypeError(f"what rank {rank} wants to send cannot be pickled: {value.reason}")
    return value


def all_gather(everyone: Any, own: Any, later: bool = False) -> Any:
    """Fill a flat tensor with the ranks' flat tensors, one behind the other.

    Args:
        later: do not wait: what is returned has `wait`.
    """
    import torch.distributed as dist

    # all_gather_into_tensor got a new name in torch 2.13 and warns since.
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(everyone, own, async_op=later)


def _all_bytes(mine: bytearray, world_size: int, device: Any) -> list[bytes]:
    import torch

    own = torch.frombuffer(mine, dtype=torch.uint8).to(device)
    everyone = torch.empty(world_size * len(mine), dtype=torch.uint8, device=device)
    with waiting():
        all_gather(everyone, own)
    raw = everyone.cpu().numpy().tobytes()
    return [raw[at : at + len(mine)] for at in range(0, len(raw), len(mine))]


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """What torch says in the body of a rank that is no more is said in words."""
    try:
        yield
    except RuntimeError as error:
        if (lost := of_a_lost_rank(error)) is not None:
            raise lost from None
        raise


def of_a_lost_rank(error: RuntimeError) -> Exception | None:
    """What to raise in the place of an error that says that another rank is no more; None: it says something else."""
    told = str(error)
    return echo(gone(told)) if any(text in told for text in _GONE) and not told.startswith(_LOST) else None


_LOST = "another rank has ended, or failed and left"


def gone(told: str) -> str:
    """What is said where a rank waits for one that is no more.

    Args:
        told: what torch says; its first sentence is shown.
    """
    first = re.sub(r"^\[[^\]]*\] ", "", told.splitlines()[0]).split(". ")[0]  # behind a line of gloo's own source
    return f"{_LOST}, while this one waited for it; what it says itself is the cause ({first})"


def message_device() -> Any:
    """Where small messages travel: the CPU, unless the process group has no backend for it."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in str(backend) else torch.device("cuda", torch.cuda.current_device())


def agree(operation: str, value: Any) -> list[Any]:
    """`exchange` that also checks that all ranks are in the same operation.

    Raises:
        DistributedOperationException: they are not; on every rank, naming each rank's operation and the line it was
            called from.
    """
    if ranks() == 1:
        return [value]
    answers = exchange((operation, _caller(), value))
    if any(answer[0] != operation for answer in answers):
        told = "; ".join(f"rank {rank} is in {answer[0]} ({answer[1]})" for rank, answer in enumerate(answers))
        raise DistributedOperationException(f"the ranks are not in the same operation: {told}")
    return [answer[2] for answer in answers]


# What the user knows a file by, where that is not its name: a notebook's cells are files for Python.
known_as: dict[str, str] = {}


def echo(text: str, kind: type[Exception] = RuntimeError) -> Exception:
    """The exception for a rank that has to stop because another one failed. A cell shows that one's own, whichever of
    the two came first.
    """
    error = kind(text)
    vars(error)["_nbdist_echo"] = True
    return error


def _caller() -> str:
    """File and line of the innermost frame outside this package."""
    frame = sys._getframe(depth() - 1)
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{known_as[file]}, line {line}" if file in known_as else f"{file}:{line}"


def depth() -> int:
    """How many frames above the caller the user's code is: the `stacklevel` of a warning."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("nbdist.", "contextlib")):
        frame, levels = frame.f_back, levels + 1
    return levels
