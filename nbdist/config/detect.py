"""How many ranks, on what, and why. Nothing is initialised by asking."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist import checks
from nbdist.config.cores import cores
from nbdist.config.gpus import Devices, how_many


class NotEnoughDevices(ValueError):
    """Devices were asked for that are not there; the message says which there are and what to do."""


_rank: int | None = None


def note_rank(rank: int) -> None:
    """Said by the worker: this process is a rank of a pool, and so is whatever it forks."""
    global _rank
    _rank = rank


def inside_a_rank() -> int | None:
    """The rank of a pool that this process is, else None. A process under torchrun is none of ours."""
    return _rank


@dataclass(frozen=True)
class Choice:
    """What a cell runs on.

    Attributes:
        ranks: how many.
        device: "cpu", "cuda" (one GPU each) or "mps".
        reason: why.
        devices: the id of each rank's GPU, as `variable` takes it.
        surprise: the user may have expected something else, and should be told the reason.
    """

    ranks: int
    device: str
    reason: str
    devices: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"
    surprise: bool = False


TAKES_GPUS = "a number of GPUs (2), or which ones (0,2 or 0-3; one alone: 3, with its comma, or cuda:3)"


def parse_gpus(text: str) -> int | tuple[int, ...]:
    """ "2" is a number of GPUs; "0,2", "0-3", "3," and "cuda:3" are indices into the visible ones, in that order.

    Raises:
        ValueError: it is neither, or has one twice.
    """
    if re.fullmatch(r"\s*\d+\s*", text):
        if int(text) == 0:
            raise ValueError("--gpus 0: takes a number of GPUs, 1 or more; GPU 0 alone is `--gpus 0,`")
        return int(text)
    chosen: list[int] = []
    parts = text.split(",")
    for part in parts[:-1] if len(parts) > 1 and not parts[-1].strip() else parts:
        match = re.fullmatch(r"\s*(?:cuda:)?(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"--gpus {text}: takes {TAKES_GPUS}")
        chosen.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return check_gpus(chosen, text)


def check_gpus(chosen: Sequence[int], text: str) -> tuple[int, ...]:
    """The same indices, in order.

    Raises:
        ValueError: none, a negative one, or one twice: a GPU serves one rank.
    """
    if not chosen or any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in chosen):
        raise ValueError(f"--gpus {text}: takes {TAKES_GPUS}")
    twice = [index for index in chosen if list(chosen).count(index) > 1]
    if twice:
        raise ValueError(f"--gpus {text}: GPU {twice[0]} is there twice, and a GPU serves one rank")
    return tuple(chosen)


def choose_ranks(
    *,
    ranks: int | None = None,
    cpus: int | None = None,
    gpus: int | Sequence[int] | None = None,
    devices: Callable[[], Devices],
) -> Choice:
    """How many ranks, on what, and why.

    Args:
        ranks: `-n`: that many, on GPUs when there are enough of them, else on the CPU.
        cpus: `--cpus`: that many on the CPU, whatever else there is.
        gpus: `--gpus`: that many, one GPU each; or these, rank i on the i-th.
        devices: asked only when it matters.

    Raises:
        NotEnoughDevices: GPUs that are not there.
        ValueError: a count below 1, or no whole number; a GPU twice; two of the three.
    """
    given = {name: value for name, value in (("-n", ranks), ("--cpus", cpus), ("--gpus", gpus)) if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
    for name, value in given.items():
        if name == "--gpus" and isinstance(value, list | tuple | range):
            check_gpus(value, ",".join(map(str, value)))
        elif isinstance(value, bool) or not isinstance(value, int):
            takes = "a number of GPUs, or a list of which ones" if name == "--gpus" else "a number of ranks"
            raise ValueError(f"{name} is {checks.short(value)}; it takes {takes}")
        elif value < 1:
            raise ValueError(f"{name} {value}: takes a number of {'GPUs' if name == '--gpus' else 'ranks'}, 1 or more")
    if cpus is not None:
        return Choice(cpus, "cpu", "--cpus")
    there = devices()
    if gpus is not None:
        return _on_gpus(gpus, there)
    if ranks is not None:
        return _as_many(ranks, there)
    if there.kind == "mps":
        return Choice(1, "mps", there.why, there.ids, surprise=True)
    if there.count:
        return Choice(there.count, "cuda", f"one rank a GPU; {there.why}", there.ids, there.variable)
    here = cores()
    return Choice(max(2, here.usable), "cpu", f"{there.why}; {here.why}, and at least 2 ranks")


def _on_gpus(wanted: int | Sequence[int], there: Devices) -> Choice:
    indices = range(wanted) if isinstance(wanted, int) else wanted
    text = str(wanted) if isinstance(wanted, int) else ",".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
    wrong = [index for index in indices if index >= there.count]
    if wrong:
        cpus = f"--cpus {len(indices)} to run {len(indices)} ranks on the CPU".replace(" 1 ranks", " 1 rank")
        if not there.count:
            raise NotEnoughDevices(f"--gpus {text}: {there.why}. Use {cpus}")
        if isinstance(wanted, int):
            raise NotEnoughDevices(f"--gpus {text}: {_has(there)}. Use --gpus {there.count}, or {cpus}")
        these = "the one here is GPU 0" if there.count == 1 else f"these are GPUs 0 to {there.count - 1}"
        raise NotEnoughDevices(f"--gpus {text}: there is no GPU {wrong[0]}; {these} ({there.why}). Or use {cpus}")
    chosen = tuple(there.ids[index] for index in indices)
    return Choice(len(chosen), there.kind, f"--gpus {text}; {there.why}", chosen, there.variable)


def _has(there: Devices) -> str:
    return there.why if there.why.startswith("this machine has ") else f"{how_many(there.count)} here: {there.why}"


def _as_many(ranks: int, there: Devices) -> Choice:
    if there.count >= ranks:
        reason = f"-n {ranks}; {there.why}"
        return Choice(ranks, there.kind, reason, there.ids[:ranks], there.variable)
    if there.kind == "mps" or not there.count:
        return Choice(ranks, "cpu", f"-n {ranks}; {there.why}", surprise=bool(there.count))
    few = f"this machine has only {how_many(there.count)}"
    if _has(there) != there.why:
        few = f"only {_has(there)}"
    return Choice(ranks, "cpu", f"-n {ranks}, and {few}", surprise=True)
