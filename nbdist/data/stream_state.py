"""Streams of Hugging Face `datasets` know where they are: resuming one reads nothing twice.

Only where that is exact: a shuffle buffer is not in their state, and with workers the state is in the worker. Other
streams are read up to where they were.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


class StreamState:
    """The state of a loader's stream, in step with the batch in hand.

    Args:
        dataset: one of `datasets.IterableDataset`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._held: Any = None  # the state at the batch in hand, when the stream was read further than that
        self._loaded: tuple[int, int, Any] | None = None

    @classmethod
    def of(cls, loader: DataLoader) -> StreamState | None:
        """None where resuming by it would not be exact."""
        dataset: Any = loader.dataset
        if not type(dataset).__module__.startswith("datasets.") or loader.num_workers:
            return None
        return cls(dataset) if is_exact(getattr(dataset, "_ex_iterable", None)) else None

    def begin(self, epoch: int, start: int) -> bool:
        """An iteration starts. Returns whether the stream begins at `start` by itself."""
        loaded = self._loaded is not None and self._loaded[:2] == (epoch, start) and start > 0
        # None: from the start. It would else begin there whenever this epoch is iterated.
        self._dataset.load_state_dict(self._loaded[2] if loaded and self._loaded is not None else None)
        self._held = None
        return loaded

    def hold(self) -> None:
        """The stream is about to be read further than the batch in hand."""
        self._held = self._dataset.state_dict()

    def now(self) -> Any:
        return self._dataset.state_dict() if self._held is None else self._held

    def load(self, epoch: int, delivered: int, state: Any) -> None:
        self._loaded, self._held = (epoch, delivered, state), state


def is_exact(source: Any) -> bool:
    """Whether no part of this pipeline holds samples back."""
    if source is None or hasattr(source, "buffer_size"):
        return False
    inner = [*getattr(source, "ex_iterables", ()), *([source.ex_iterable] if hasattr(source, "ex_iterable") else [])]
    return all(map(is_exact, inner))
