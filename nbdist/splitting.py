"""split_between_processes: a rank's contiguous part of a list, a dict of them, a tensor, an array, a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from nbdist import ends, messages, state


class Split:
    """This rank's part of some inputs: a context manager that gives it.

    ::

        with (part := accelerator.split_between_processes(prompts, apply_padding=True)) as mine:
            results = [model(prompt) for prompt in mine]
        everything = part.gather(results)

    Args:
        inputs: what is split, the same on all ranks: sizes differ by one at most, low ranks first.
        rank, ranks: which part is ours, of how many.
        apply_padding: repeat the last item on ranks that have less than rank 0.
        together: so many processes in a row have the same part.

    Attributes:
        start: the index of this rank's first item.
        real: how many of this rank's items are real; behind them comes padding.
        total: how many there are on all ranks together.

    Raises:
        TypeError: something that cannot be split by items. ValueError: a dict whose values differ in length.
    """

    def __init__(self, inputs: Any, rank: int, ranks: int, apply_padding: bool = False, together: int = 1) -> None:
        self._inputs, self._together = inputs, together
        lengths = dict(_lengths(inputs, ""))
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(f"the values to split have different lengths: {told}. Split them one by one")
        self.total = next(iter(lengths.values()), 0)
        base, more = divmod(self.total, ranks)
        self.start = rank * base + min(rank, more)
        self.real = base + (rank < more)
        size = base + bool(more) if apply_padding else self.real
        self._padding = size - self.real if self.total else 0
        self._whole = ranks == 1

    def __enter__(self) -> Any:
        return self._inputs if self._whole else _mapped(self._inputs, self._take)

    def __exit__(self, *error: object) -> None:
        """Nothing was opened."""

    def gather(self, results: Any) -> list[Any]:
        """All ranks' results in the order of the inputs, without those of padding; on every rank. All ranks call it.

        Args:
            results: one for each of this rank's items, in order: anything that can be iterated. Or the same number for
                each item, on all ranks; then all of them.

        Raises:
            TypeError: they cannot be iterated, or have no order. DistributedOperationException: they are more or fewer
                than that. Both on all ranks.
        """
        state.current()
        error, mine = None, []
        try:
            mine = _listed(results)
        except Exception as raised:  # what computes them as they are taken may fail too; the others wait for them
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        answers = messages.agree("gather of a split", (told, mine, self.real, self.real + self._padding))
        if error is not None:
            raise error
        failed = [(rank, told) for rank, (told, *_) in enumerate(answers) if told is not None]
        if failed:
            raise messages.echo("rank {} has no results: {}".format(*failed[0]))
        counts = [(len(some), real, size) for _, some, real, size in answers]
        each = _each(counts)
        if each is None:
            listed = "; ".join(
                f"rank {rank} has {_many(given, 'result')} for {_many(real, 'item')}"
                for rank, (given, real, _) in enumerate(counts)
            )
            raise messages.DistributedOperationException(
                f"gather of a split takes one result for each item, or the same number for each: {listed}. For any "
                "number of them, use nbdist.utils.gather_object(results)"
            )
        return [one for _, some, real, _ in answers[:: self._together] for one in some[: real * each]]

    def _take(self, values: Any) -> Any:
        end = self.start + self.real
        rows = [*range(self.start, end), *[self.total - 1] * self._padding]
        if hasattr(values, "select") and hasattr(values, "column_names"):  # a Hugging Face dataset
            return values.select(rows)
        if hasattr(values, "iloc"):  # pandas
            return values.iloc[rows]
        if not _slices(values):  # a map-style dataset
            from torch.utils.data import Subset

            return Subset(values, rows)
        part = values[self.start : end]
        return _padded(part, values[-1:], self._padding) if self._padding else part


def _listed(results: Any) -> list[Any]:
    if isinstance(results, str | bytes | Mapping | set | frozenset):
        told = "its items are no results, one for each item of the inputs, in order"
    elif not hasattr(results, "__iter__") and not hasattr(results, "__getitem__"):
        told = "it cannot be iterated"
    else:
        return list(results)
    raise TypeError(f"gather of a split takes this process's results in a list; this is {results!r:.200}: {told}")


def _each(counts: list[tuple[int, int, int]]) -> int | None:
    """How many results there are for each item; None when they do not fit.

    Args:
        counts: of each rank, its results, its real items, and all its items.
    """
    for sizes in ([size for _, _, size in counts], [real for _, real, _ in counts]):  # with those of padding, without
        each = max((given // size for (given, _, _), size in zip(counts, sizes, strict=True) if size), default=1)
        if all(given == each * size for (given, _, _), size in zip(counts, sizes, strict=True)):
            return each
    return None


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _padded(part: Any, last: Any, times: int) -> Any:
    import torch

    if isinstance(part, torch.Tensor):
        return torch.cat([part, *[last] * times])
    if hasattr(part, "dtype"):
        import numpy

        return numpy.concatenate([part, *[last] * times])
    if isinstance(part, range):
        return [*part, *list(last) * times]
    return part + last * times


def _slices(values: Any) -> bool:
    return isinstance(values, list | tuple | range) or hasattr(values, "dtype")


def _is_record(values: Any) -> bool:
    return isinstance(values, tuple) and hasattr(values, "_fields")


def _lengths(values: Any, path: str) -> Iterator[tuple[str, int]]:
    """The length of everything that is split, by where it is."""
    if isinstance(values, Mapping):
        for key, one in values.items():
            yield from _lengths(one, f"{path}[{key!r}]")
    elif _is_record(values):
        for name, one in zip(values._fields, values, strict=True):
            yield from _lengths(one, f"{path}.{name}")
    else:
        why = _unsplittable(values)
        if why:
            raise TypeError(f"inputs{path} cannot be split between processes: {why}")
        yield f"inputs{path}", len(values)


def _unsplittable(values: Any) -> str:
    from nbdist.shipping.errors import article

    kind = article(type(values).__name__)
    if isinstance(values, str | bytes):
        return f"it is {kind}; put it into a list, or leave it out and use it on every process"
    if getattr(values, "ndim", 1) == 0:
        return "it has no dimension"
    if isinstance(values, set | frozenset):
        return "a set has no order that is the same everywhere; pass sorted(...)"
    if not isinstance(values, Sized):
        return f"{kind} has no length; pass list(...)"
    if not hasattr(values, "__getitem__"):
        return f"{kind} has no items by index; pass list(...)"
    return ""


def _mapped(values: Any, take: Callable[[Any], Any]) -> Any:
    if isinstance(values, Mapping):
        items = {key: _mapped(one, take) for key, one in values.items()}
        return items if type(values) is dict else ends.like(values, items)
    if _is_record(values):
        return type(values)(*(_mapped(one, take) for one in values))
    return take(values)
