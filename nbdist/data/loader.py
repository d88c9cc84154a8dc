"""A prepared DataLoader: the user's own class and attributes, with only its index stream sharded.

The user's object is not touched. The prepared one is a shallow copy under a subclass of the user's class (public
names only: a copy made from constructor arguments could not know a subclass's own). While an iterator of it runs, a
`Cursor` tells how many rows of the batch in hand are real, here and on all ranks; the Accelerator weighs the loss with
it.

The seed rule. The order of an epoch is a function of (seed, number of the loader, epoch) and of nothing else: not of
the number of ranks or workers, nor of what has drawn random numbers before. The seed is that of the loader's own
generator, else `DataLoaderConfiguration.data_seed`, else that of `set_seed`, else 0; a state that was loaded brings its
own. Where the ranks are seeded differently when they prepare it, rank 0's counts. The number counts what one
Accelerator prepares (`numbers`), so that two loaders over as many samples have two orders. A worker of a map-style
loader draws (augmentation) from a function of these, the rank and the worker, so that each rank augments differently,
and each run alike; behind a resumed point it draws anew. Workers of a stream draw alike on all ranks, since all read
one stream. Persistent workers are seeded once, at their start, as torch does it. Without workers the dataset draws from
the process's own generators.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbdist import messages, state
from nbdist.data import randomness, resume
from nbdist.data.cursor import Cursor, Position
from nbdist.data.dispatch import DispatchedRows, DispatchedStream
from nbdist.data.move import send_to_device
from nbdist.data.numbers import Numbers
from nbdist.data.options import Options
from nbdist.data.sharded import OwnData, is_sharded
from nbdist.data.source import Planned, Source
from nbdist.data.stream import StreamSource
from nbdist.state import step_boundary


class Prepared:
    """What is put in front of the user's DataLoader class: it delivers. Its private attributes lie in the loader's
    `vars`.
    """

    __slots__ = ()  # an instance layout of its own would not go together with every user class
    _nb: Inside

    def __iter__(self) -> Iterator[Any]:
        inside = self._nb
        cursor = Cursor(inside.position)
        cursor.above = inside.live[-1]
        inside.pending.append((*inside.begin(), cursor))
        return _deliver(super().__iter__(), cursor, inside)  # type: ignore[misc]

    def __len__(self) -> int:
        left = self._nb.skipped.left if self._nb.skipped is not None else 0
        return max(super().__len__() - left, 0)  # type: ignore[misc]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch's. Without it, an iteration that ended or was trained on moves on by one.

        An epoch that was loaded from a state goes on where the state is.

        Raises:
            ValueError: it is not a whole number of at least 0.
        """
        position = self._nb.position
        try:
            number = operator.index(epoch)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"set_epoch: the epoch is {epoch!r}; it must be a whole number of at least 0")
        epoch = number
        if epoch != position.epoch or position.used:
            position.resume(epoch, 0)
        source: Any = self._nb.source
        if source.sharded:
            source.distributed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: plain numbers and words, the same on all ranks.

        What counts is the batches delivered, not those that workers have fetched ahead. Take it on each rank or on
        one, inside a loop or behind it; behind a loop that ended it is the start of the next epoch.
        """
        return resume.state_of(self._nb)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration delivers what the loader of this state had not delivered yet, in the same order, and the
        epochs after it are the same too. All ranks load the same state.

        The number of ranks, batch size and workers may be others where the samples that were delivered are a whole
        number of steps here; a stream with workers needs the same number of them.

        Raises:
            ValueError: the state is another loader's: of another kind, or over another number of samples. TypeError: it
                is no dict.
        """
        resume.load(self._nb, state_dict)

    def __copy__(self) -> Any:
        again = object.__new__(type(self))
        vars(again).update(vars(self))
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the user's loader, prepared alike and as far in its epochs. No collective."""
        old = self._nb
        again = memo[id(self)] = _made(copy.deepcopy(old.original, memo), old.copied)
        later = {name: value for name, value in vars(self).items() if name not in old.replaced}
        vars(again).update(copy.deepcopy(later, memo))
        return again

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a prepared DataLoader belongs to its rank; pickle the DataLoader that was prepared, or its state_dict()"
        )


class Counted(DataLoader):
    """Put between the user's class and DataLoader: starts the epoch's plan, and tells the cursor what each batch holds.

    It lies below the user's class, so that an `__iter__` there may drop or change batches and still sees what it
    expects.
    """

    _nb: Inside

    def __iter__(self) -> Iterator[Any]:  # no generator function: workers start at iter(), as they do in torch
        inside = self._nb
        if inside.pending:
            epoch, start, cursor = inside.pending.pop(0)
        else:  # the user's __iter__ goes through the data once more
            inside.position.epoch += 1
            epoch, start, cursor = inside.position.epoch, 0, inside.cursor
        inside.cursor = cursor
        torchs: Any = super()

        def begin(seed: int) -> Iterator[Any]:
            # For this moment only: `loader.generator` is the user's, and nothing draws from the process's own.
            own = self.__dict__
            theirs = own.get("generator")
            own["generator"] = torch.Generator().manual_seed(seed)
            try:
                return torchs.__iter__()
            finally:
                own["generator"] = theirs

        batches = inside.source.iterate(epoch, start, cursor, begin)
        return batches if inside.straight else iter(batches)  # type: ignore[return-value]


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
        # iterations that were begun and whose data were not asked for yet: (epoch, start, cursor)
        self.pending: list[tuple[int, int, Cursor]] = []
        self.given = _generator(original)
        self._own = self._agreed = self._seeded()
        self.source: Feed = _feed(original, options, self.seed)
        self.lengths: list[int | None] = []  # of each rank
        if like is not None:
            self._own, self._agreed, self.lengths = like._own, like._agreed, like.lengths
            if isinstance(self.source, OwnData | DispatchedRows) and self.lengths:
                self.source.told(self.lengths)
        elif options.ranks > 1:
            self._agree()
        self.skipped: resume.Skipped | None = None
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
        mine = self._own, self.position.number, source.kind, source.length(), options | source.alike()
        told = messages.agree("prepare a loader", mine)
        seeds, numbers, kinds, lengths, alike = map(list, zip(*told, strict=True))
        # Ranks that were seeded or have counted differently would each shuffle in another order.
        self._agreed, self.position.number = seeds[0], numbers[0]
        if len(set(kinds)) > 1:
            listed = ", ".join(f"rank {rank} has {resume.KINDS[kind]}" for rank, kind in enumerate(kinds))
            raise ValueError(f"the ranks prepare loaders of several kinds: {listed}. Prepare the same one on all ranks")
        _refuse_unlike(alike)
        self.lengths = lengths
        if isinstance(source, OwnData | DispatchedRows):
            source.told(lengths)
        elif not self.options.dispatch and len(set(lengths)) > 1:
            listed = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            raise ValueError(
                f"the ranks' datasets differ in length: {listed}. A dataset that is to be split must be the same on "
                "all ranks; for one that is split already, tell: prepare_data_loader(loader, already_sharded=True)"
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


def _generator(loader: DataLoader) -> torch.Generator | None:
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
    dispatched = options.dispatch and options.ranks > 1
    if is_sharded(loader, options) and options.ranks > 1:
        if dispatched:
            raise ValueError(
                "dispatch_batches=True lets rank 0 read for all ranks, and this dataset is already split by rank, so "
                "it would read its own part only. Pass the dataset unsplit, or leave dispatch_batches out"
            )
        return OwnData(loader, options, seed)
    if streamed:
        return (DispatchedStream if dispatched else StreamSource)(loader, options, seed)
    source = Source(loader, options, seed)
    if source.sharded and options.ranks > 1:
        note = "this loader has a DistributedSampler, so it is sharded already: prepare() leaves its samples alone"
        warnings.warn(note, stacklevel=5)
    elif dispatched:
        return DispatchedRows(loader, options, seed)
    return source


def _deliver(inner: Iterable[Any], cursor: Cursor, inside: Inside) -> Iterator[Any]:
    """The outermost layer. The newest iterator that delivered is the last in `live`; it leaves as soon as nobody
    holds it.
    """
    position, live = cursor.position, inside.live
    device = inside.options.device
    pinned = inside.original.pin_memory and device is not None and device.type == "cuda"
    non_blocking = inside.options.non_blocking or pinned
    boundary = step_boundary
    try:
        if device is None and isinstance(inner, Planned):  # both layers in one, as most loaders have nothing between
            ragged, count = inner.ragged, inner.count
            for step, batch in enumerate(inner.batches, inner.start):
                cursor.step = step
                position.delivered = step + 1
                if step >= ragged:
                    count(step)
                if live[-1] is not cursor:
                    _put_in_front(live, cursor)
                yield batch
                if boundary.pending:  # trained on, and all that goes with it
                    boundary.passed()
        else:
            for batch in inner:
                position.delivered += 1
                if live[-1] is not cursor:
                    _put_in_front(live, cursor)
                yield batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)
                if boundary.pending:
                    boundary.passed()
        position.end()
    finally:
        if cursor in live:
            live.remove(cursor)


def _put_in_front(live: list[Cursor | None], cursor: Cursor) -> None:
    if cursor in live:
        live.remove(cursor)
    live.append(cursor)


_ALONE = Options()


def prepare_loader(
    loader: DataLoader,
    live: list[Cursor | None],
    options: Options = _ALONE,
    position: Position | None = None,
    numbers: Numbers | None = None,
) -> Any:
    """The user's loader with its samples split over the ranks; see the top of this module.

    Args:
        loader: any DataLoader. One that is prepared already and reports to `live` comes back as it is; one that reports
            elsewhere gives a new one over the user's own loader, which goes on where the old one is.
        live: the stack of running iterators, None at its bottom.
        options: how it is prepared.
        position: where it is. Default: at its start, or where the prepared loader is.
        numbers: of the loaders that report to `live`. Default: it has the number 0.

    Raises:
        ValueError: its batches cannot be split as the options ask, or not be dispatched.
    """
    later: dict[str, Any] = {}
    if isinstance(loader, Prepared):
        old = loader._nb
        if old.live is live and position is None:
            return loader
        later = {name: value for name, value in vars(loader).items() if name not in old.replaced}
        position, loader = old.position, old.original
        if numbers is not None:
            numbers.take(loader, old.given, position.number)
    at = position or Position(0 if numbers is None else numbers.of(loader, _generator(loader)))
    prepared = _made(loader, lambda original: Inside(original, options, live, at), later)
    if not getattr(loader, "in_order", True):
        warnings.warn(
            "in_order=False has no effect on a prepared loader: the ranks take each step together, so its batches "
            "come in their order",
            stacklevel=3,
        )
    return prepared


def _made(loader: DataLoader, put: Callable[[DataLoader], Inside], later: Mapping[str, Any] = {}) -> Any:
    """The loader's shallow copy of the prepared class.

    Args:
        put: makes what it carries.
        later: attributes that the user has set on a prepared one.
    """
    user = type(loader)
    bases = (Prepared, Counted) if user is DataLoader else (Prepared, user, Counted)
    if _goes_alone(user):
        bases = (Prepared, Counted, user)
    prepared: Any = object.__new__(type(user.__name__, bases, {"__module__": user.__module__, "__doc__": user.__doc__}))
    own = vars(prepared)
    own.update(vars(loader))
    own.update(later)
    own["_iterator"] = None  # persistent workers stay the user's
    inside = own["_nb"] = put(loader)
    own.update(inside.source.attributes)
    if not getattr(loader, "in_order", True):
        own["in_order"] = True
    return prepared


def _goes_alone(user: type) -> bool:
    """Whether the class has an `__iter__` that calls no other (torchdata's StatefulDataLoader): what it gives is then
    counted as it comes, a batch for each of the sampler's.
    """
    for one in user.__mro__[: user.__mro__.index(DataLoader)]:
        code = getattr(vars(one).get("__iter__"), "__code__", None)
        if code is not None:
            return "__iter__" not in code.co_names
    return False


def user_loader(prepared: Any) -> DataLoader:
    """The very loader that the user prepared."""
    return prepared._nb.original
