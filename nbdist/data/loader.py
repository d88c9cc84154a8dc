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
and each run alike; behind a resumed point it draws anew. Persistent workers are seeded once, at their start, as torch
does it. Without workers a map-style dataset draws from the process's own generators. A stream draws
from generators of its own, seeded with these, with and without workers: the same on all ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdist import messages
from nbdist.data import resume
from nbdist.data.cursor import Cursor, Position
from nbdist.data.delivering import delivered
from nbdist.data.inside import Inside, generator
from nbdist.data.numbers import Numbers
from nbdist.data.options import Options, whole_number
from nbdist.shipping.errors import article


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
        return delivered(super().__iter__(), cursor, inside)  # type: ignore[misc]

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
        epoch = whole_number(epoch, "set_epoch: the epoch is")
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
        ValueError: its batches cannot be split as the options ask, or not be dispatched. TypeError: it is none.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader takes a torch DataLoader; this is {article(type(loader).__name__)}: "
            f"{loader!r:.200}. Put it into one: DataLoader(data, batch_size=...)"
        )
    later: dict[str, Any] = {}
    if isinstance(loader, Prepared):
        old = loader._nb
        if old.live is live and position is None:
            return loader
        later = {name: value for name, value in vars(loader).items() if name not in old.replaced}
        position, loader = old.position, old.original
        if numbers is not None:
            numbers.take(loader, old.given, position.number)
    at = position or Position(0 if numbers is None else numbers.of(loader, generator(loader)))
    prepared = _made(loader, lambda original: Inside(original, options, live, at), later)
    if not getattr(loader, "in_order", True):
        warnings.warn(
            "in_order=False has no effect on a prepared loader: the ranks take each step together, so its batches "
            "come in their order",
            stacklevel=messages.depth(),
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
