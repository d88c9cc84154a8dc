"""What a prepared loader carries: what feeds it, its seed, where it is, and what the ranks have agreed on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbdist import messages, state
from nbdist.data import own_order, randomness
from nbdist.data.cursor import Cursor, Position
from nbdist.data.dispatch import DispatchedRows, DispatchedStream
from nbdist.data.options import Options
from nbdist.data.resume import KINDS, Skipped
from nbdist.data.sharded import OwnData, is_sharded
from nbdist.data.source import Source
from nbdist.data.stream import StreamSource


class Feed(Protocol):
    """Where a prepared loader's batches come from."""

    kind: str  # what an epoch is made of
    sharded: bool  # by the user's DistributedSampler
    attributes: dict[str, Any]  # of the loader, in place of the user's

    @property
    def stride(self) -> int:
        """How much of an epoch a full step of all ranks takes."""

    def length(self) -> int | None:
        """How much an epoch has; None when that is not known."""

    def alike(self) -> dict[str, Any]:
        """What else must be the same on all ranks, by the name of DataLoader's argument."""

    def iterate(self, epoch: int, start: int, cursor: Cursor, begin: Any) -> Iterable[Any]:
        """The batches of an epoch from `start` on; `begin(seed)` starts the loader's own iterator."""


class Inside:
    """What a prepared loader carries: its original, where it is, and the stack of running iterators it reports to."""

    def __init__(
        self,
        original: DataLoader,
        options: Options,
        live: list[Cursor | None],
        position: Position,
        like: Inside | None = None,
    ) -> None:
        self.original, self.options, self.live, self.position = original, options, live, position
        self.cursor = Cursor(self.position)
        self.straight = type(original) is DataLoader  # nothing of the user's between what counts and what delivers
        self.unbatched = original.batch_size is None and original.batch_sampler is None
        # iterations that were begun and whose data were not asked for yet: (epoch, start, cursor)
        self.pending: list[tuple[int, int, Cursor]] = []
        self.given = generator(original)
        self._own = self._agreed = self._seeded()
        self.source: Feed = _feed(original, options, self.seed)
        self.lengths: list[int | None] = []  # of each rank
        if like is not None:
            self._own, self._agreed, self.lengths = like._own, like._agreed, like.lengths
            if isinstance(self.source, OwnData | DispatchedRows) and self.lengths:
                self.source.told(self.lengths[:: options.together])
        elif options.everyone > 1:
            self._agree()
        self.skipped: Skipped | None = None
        self.replaced = {"_nb", "_iterator", *self.source.attributes}  # what is not the user's; for streams torch's too
        self.replaced.add("_IterableDataset_len_called")

    def _agree(self) -> None:
        """All ranks prepare a loader alike: see that they do, before they wait for each other in the middle of an
        epoch.

        Raises:
            ValueError: their loaders are not of one kind, their datasets not of one length, or what each step takes of
                them differs; on all ranks.
        """
        source = self.source
        options = {"split_batches": self.options.split_batches, "dispatch_batches": self.options.dispatch}
        shared = type(source) in (Source, StreamSource) and not source.sharded  # of one order that all ranks have
        order = own_order.of(self.original) if shared else {}
        mine = self._own, self.position.number, source.kind, source.length(), options | source.alike(), order
        told = messages.agree("prepare a loader", (*mine, self._split_otherwise()))
        seeds, numbers, kinds, lengths, alike, orders, wrong = map(list, zip(*told, strict=True))
        if any(wrong):
            raise ValueError(next(filter(None, wrong)))
        # Ranks that were seeded or have counted differently would each shuffle in another order.
        self._agreed, self.position.number = seeds[0], numbers[0]
        if len(set(kinds)) > 1:
            listed = ", ".join(f"rank {rank} has {KINDS[kind]}" for rank, kind in enumerate(kinds))
            raise ValueError(f"the ranks prepare loaders of several kinds: {listed}. Prepare the same one on all ranks")
        _refuse_unlike(alike)
        self.lengths = lengths
        if isinstance(source, OwnData | DispatchedRows):
            source.told(lengths[:: self.options.together])
        elif not self.options.dispatch and len(set(lengths)) > 1:
            listed = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            raise ValueError(
                f"the ranks' datasets differ in length: {listed}. A dataset that is to be split must be the same on "
                "all ranks; for one that is split already, tell: prepare_data_loader(loader, already_sharded=True)"
            )
        own_order.compare(orders)

    def _split_otherwise(self) -> str:
        """What is wrong with a loader or dataset that is split already; "" where that is as the ranks share batches."""
        options, source = self.options, self.source
        by: Any = getattr(source, "distributed", None) if source.sharded else None
        if options.together == 1 or (by is None and not isinstance(source, OwnData)):
            return ""  # the user may have his reasons
        by = getattr(self.original.dataset, "_distributed", None) if by is None else by
        ways, part = getattr(by, "num_replicas", getattr(by, "world_size", None)), getattr(by, "rank", options.rank)
        if ways is None or (ways, part) == (options.ranks, options.rank):
            return ""
        return (
            f"this loader's samples are split {ways} ways already, of which a rank has part {part}; and here "
            f"{options.together} ranks together take part {options.rank} of {options.ranks} of a batch (tensor or "
            f"context parallel). Prepare it unsplit; or split it by accelerator.process_index // {options.together}"
        )

    def copied(self, original: DataLoader) -> Inside:
        """The same around a copy of the original, which all ranks have agreed on already."""
        again = Inside(original, self.options, self.live, copy.copy(self.position), self)
        if self.skipped is not None:
            again.skipped = self.skipped.copied(again.position)
        return again

    def seed(self) -> int:
        if self.position.seed is not None:
            return self.position.seed
        seed = self._seeded()
        return randomness.numbered(self._agreed if seed == self._own else seed, self.position.number)

    def _seeded(self) -> int:
        """What this rank has been told."""
        if self.given is not None:
            return self.given.initial_seed()
        return state.data_seed() if self.options.data_seed is None else self.options.data_seed

    def begin(self) -> tuple[int, int]:
        """A new iteration: its epoch and its first batch."""
        if self.skipped is not None:
            begun = self.skipped.begin(self.position)
            if begun is not None:
                return begun
        return self.position.begin()


def generator(loader: DataLoader) -> torch.Generator | None:
    """The loader's own, wherever the user has put it."""
    batches = loader.batch_sampler
    return randomness.generator_of(loader.sampler, batches, getattr(batches, "sampler", None), loader)


def _refuse_unlike(alike: list[dict[str, Any]]) -> None:
    """Raise ValueError where the ranks' loaders differ, naming each rank's."""
    everywhere = set.intersection(*map(set, alike))
    names = [name for name in alike[0] if name in everywhere and any(one[name] != alike[0][name] for one in alike)]
    if names:
        listed = "; ".join(
            f"rank {rank} has {', '.join(f'{name}={_in_words(one[name])}' for name in names)}"
            for rank, one in enumerate(alike)
        )
        raise ValueError(f"the ranks' loaders differ: {listed}. Prepare the same one on all ranks")


def _in_words(value: Any) -> str:
    shuffles = {"RandomSampler": " (shuffle=True)", "SequentialSampler": " (shuffle=False)"}
    return f"{value}{shuffles.get(value, '')}" if isinstance(value, str) else repr(value)


def _feed(loader: DataLoader, options: Options, seed: Callable[[], int]) -> Feed:
    streamed = isinstance(loader.dataset, IterableDataset)
    dispatched = options.dispatch and options.everyone > 1
    if is_sharded(loader, options) and options.everyone > 1:
        if dispatched:
            raise ValueError(
                "dispatch_batches=True lets rank 0 read for all ranks, and this dataset is already split by rank, so "
                "it would read its own part only. Pass the dataset unsplit, or leave dispatch_batches out"
            )
        return OwnData(loader, options, seed)
    if streamed:
        return (DispatchedStream if dispatched else StreamSource)(loader, options, seed)
    source = Source(loader, options, seed)
    if source.sharded and options.everyone > 1:
        note = "this loader has a DistributedSampler, so it is sharded already: prepare() leaves its samples alone"
        warnings.warn(note, stacklevel=messages.depth())
    elif dispatched:
        return DispatchedRows(loader, options, seed)
    return source
