"""Going on where a loader was: its state as plain numbers, and passes that leave the first batches out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from nbdist.data.cursor import Position
from nbdist.data.options import whole_number
from nbdist.shipping.errors import article

if TYPE_CHECKING:
    from nbdist.data.inside import Inside

KINDS = {
    "samples": "a dataset with indices",
    "batches": "a batch sampler of the user's own",
    "stream": "a stream",
    "sharded stream": "streams that are already split by rank",
    "sharded samples": "datasets that are already split by rank",
}


def state_of(inside: Inside) -> dict[str, Any]:
    """The state of a prepared loader: see `Prepared.state_dict`."""
    source, position = inside.source, inside.position
    state: dict[str, Any] = {
        "epoch": position.epoch,
        "delivered": position.delivered,
        "seed": inside.seed(),
        "kind": source.kind,
        "rows": _rows(inside),
        "stride": source.stride,
    }
    if "stream" in source.kind:
        state["num_workers"] = inside.original.num_workers
    if source.kind.startswith("sharded"):
        state["ranks"] = inside.options.ranks
    own = getattr(source, "own_state", None)
    if own is not None and position.delivered:
        state["stream"] = own.now()
    if source.sharded:
        state["sampler_epoch"] = getattr(source, "distributed").epoch  # noqa: B009
    return state


def load(inside: Inside, state: dict[str, Any]) -> None:
    """Put a prepared loader where the state is: see `Prepared.load_state_dict`."""
    source = inside.source
    if not isinstance(state, Mapping):
        raise TypeError(
            f"this is no state of a prepared loader: {state!r}. Load what state_dict() of a prepared loader returned"
        )
    absent = [name for name in ("epoch", "delivered", "seed", "kind", "rows", "stride") if name not in state]
    if absent:
        raise ValueError(
            f"this is no state of a prepared loader: it has no {', '.join(absent)} (it has: "
            f"{', '.join(map(str, state)) or 'nothing'}). Load what state_dict() of a prepared loader returned"
        )
    for name in ("epoch", "delivered"):
        whole_number(state[name], f"this is no state of a prepared loader: its {name!r} is")
    if state["kind"] != source.kind:
        theirs, ours = (KINDS.get(kind, kind) for kind in (state["kind"], source.kind))
        raise ValueError(f"this state is of a loader over {theirs}; this one is over {ours}. Load it into its own kind")
    if state.get("ranks", inside.options.ranks) != inside.options.ranks and state["delivered"]:
        raise ValueError(
            f"this state is of a dataset that came split over {state['ranks']} ranks, and here are "
            f"{inside.options.ranks}: which samples were delivered cannot be known. Resume on {state['ranks']} ranks, "
            "or from a state of an epoch's start"
        )
    rows = _rows(inside)
    if state["rows"] != rows and None not in (state["rows"], rows):
        what = "batches" if source.kind == "batches" else "samples"
        raise ValueError(
            f"this state is of a loader over {state['rows']} {what}; this one has {rows}, and their order would be "
            "another one. Load it into a loader over the same dataset"
        )
    if rows is not None and state["delivered"] > (steps := -(-rows // state["stride"])):
        raise ValueError(
            f"this state is {state['delivered']} batches into its epoch, and of {rows} in steps of {state['stride']} "
            f"there are {steps}. Load what state_dict() of a prepared loader returned"
        )
    delivered = _delivered(inside, state)
    inside.position.resume(state["epoch"], delivered)
    own = getattr(source, "own_state", None)
    if own is not None and delivered and "stream" in state:
        own.load(state["epoch"], delivered, state["stream"])
    inside.position.seed = state["seed"]
    if source.sharded and "sampler_epoch" in state:
        getattr(source, "distributed").set_epoch(state["sampler_epoch"])  # noqa: B009


def _delivered(inside: Inside, state: dict[str, Any]) -> int:
    """The batches of the state in steps of this loader."""
    theirs, ours, workers = state["stride"], inside.source.stride, inside.original.num_workers
    parts = "stream" in inside.source.kind and max(state["num_workers"], workers) > 0 and state["delivered"] > 0
    if parts and (theirs, state["num_workers"]) != (ours, workers):
        # Each worker has a part of the stream: which samples share a step depends on all of these.
        raise ValueError(
            f"this state is of a stream read by {state['num_workers']} workers in steps of {theirs} samples; here "
            f"there are {workers} workers and steps of {ours}, which would give other samples. Use the same "
            "num_workers, batch size and number of ranks, or load a state of an epoch's start"
        )
    done = state["delivered"] * theirs
    if state["delivered"] and theirs != ours:
        rows = _rows(inside)
        if rows is not None and done >= rows:  # the last step, which may be short
            return -(-rows // ours)
        if done % ours:
            raise ValueError(
                f"this state is {done} {'batches' if inside.source.kind == 'batches' else 'samples'} into its epoch, "
                f"and a step of this loader takes {ours} of all ranks together, so it cannot start there. Use the "
                "same batch size and number of ranks, or ones that divide it"
            )
    return done // ours


def _rows(inside: Inside) -> int | None:
    """The length of an epoch; a dataset of one rank only has none that all ranks know."""
    return None if inside.source.kind.startswith("sharded") else inside.source.length()


class Skipped:
    """One pass over the epoch in progress that leaves its first batches out.

    Args:
        position: that of the loader.
        batches: how many are left out, counted from the epoch's start.
    """

    def __init__(self, position: Position, batches: int) -> None:
        self._batches, self._position = batches, position
        self._epoch: int | None = position.epoch
        self._begun = False

    def copied(self, position: Position) -> Skipped:
        """The same for a loader that was copied with its position."""
        again = copy.copy(self)
        again._position = position
        return again

    @property
    def left(self) -> int:
        """What is left out of the next iteration; 0 after the one pass."""
        if self._begun and (self._position.used or self._position.epoch != self._epoch):
            self._epoch = None
        return self._batches if self._position.epoch == self._epoch else 0

    def begin(self, position: Position) -> tuple[int, int] | None:
        """The epoch and first batch of the pass; None when it is over."""
        if not self.left:
            return None
        self._begun = True
        position.delivered, position.used = self._batches, False
        return position.epoch, self._batches


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The same loader for one pass that leaves the first batches of its epoch out, without fetching them where it has
    indices. The loader itself is untouched; for the rest of a loader whose state was saved, `load_state_dict` does
    more.

    Args:
        dataloader: a prepared loader: the pass is over the epoch that it is in, and ends that epoch. Or a plain one.
            All ranks do it alike.
        num_batches: how many are left out (of a prepared loader: on each rank), counted from the epoch's start.

    Raises:
        TypeError: it is no DataLoader. ValueError: the number is not a whole one of at least 0.

    Returns:
        A loader of the same class. Its second pass leaves nothing out.
    """
    from nbdist.data.loader import Prepared, prepare_loader

    num_batches = whole_number(num_batches, "skip_first_batches: num_batches is")
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"skip_first_batches takes a DataLoader, prepared or plain; this is {article(type(dataloader).__name__)}: "
            f"{dataloader!r:.200}. Of anything else, itertools.islice(batches, {num_batches}, None) leaves them out"
        )
    if isinstance(dataloader, Prepared):
        old = dataloader._nb
        again = prepare_loader(dataloader, old.live, old.options, old.position)
        again._nb.skipped = Skipped(old.position, num_batches)
        return again
    user = type(dataloader)
    again = object.__new__(
        type(user.__name__, (_Short, user), {"__module__": user.__module__, "__doc__": user.__doc__})
    )
    own: Any = vars(again)
    own.update(vars(dataloader), _iterator=None, _left_out=num_batches)
    if not isinstance(dataloader.dataset, IterableDataset):
        name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        own[name] = _From(getattr(dataloader, name), own)
    return again


class _Short:
    """Put in front of a plain loader's class: its first pass is shorter."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        own = vars(self)
        streamed = isinstance(own["dataset"], IterableDataset)
        batches = super().__iter__()  # type: ignore[misc]
        if streamed and own["_left_out"]:
            batches = itertools.islice(batches, own["_left_out"], None)
            own["_left_out"] = 0
        return batches

    def __len__(self) -> int:
        return max(super().__len__() - vars(self)["_left_out"], 0)  # type: ignore[misc]


class _From:
    """A sampler that leaves its first items out, once; its attributes are seen through."""

    def __init__(self, sampler: Any, own: dict[str, Any]) -> None:
        self._sampler, self._own = sampler, own

    def __iter__(self) -> Iterator[Any]:
        # At the first item: a loader with workers makes an iterator that it never asks, and then another.
        left_out, self._own["_left_out"] = self._own["_left_out"], 0
        yield from itertools.islice(self._sampler, left_out, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)
