"""What a cell on a pool is asked for, where its output goes, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.launchers import failures
from nbdist.shipping import Arrival

if TYPE_CHECKING:
    from nbdist.launchers.stopping import Stop

RETURN_LIMIT = 4 << 30  # bytes that come back from one cell
STALL_LIMIT = 30.0  # seconds of waiting for each other after which the cell says who is where


class Screen(Protocol):
    """Where a cell's output goes."""

    def text(self, rank: int, stream: str, data: bytes) -> None: ...
    def display(self, rank: int, message: dict[str, Any]) -> None: ...
    def notice(self, line: str) -> None: ...
    def tick(self) -> None: ...
    def finish(self) -> None: ...
    @property
    def ahead(self) -> frozenset[int]:
        """Ranks that are far ahead of others that write the same: their text had better wait."""


@dataclass
class Request:
    """What is to run.

    Attributes:
        runs: what the runner in the rank reads (source, file name, flags ...).
        reads, maybe, stores, deletes: names, see nbdist.shipping.Names.
        files: names of the files whose lines are the user's.
        ranks: those that run it; None for all.
        only: names that may come back (None: all; empty: none).
        environment: variables for this cell alone.
        timeout: seconds after which the cell is stopped.
        extra: an object that travels along, in one graph with the names.
        keep_after_error: whether what was made up to an error is put in place here.
    """

    runs: dict[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()
    deletes: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    only: frozenset[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    extra: Any = None
    limit: int = RETURN_LIMIT
    stall_limit: float = STALL_LIMIT
    keep_after_error: bool = True


@dataclass
class Result:
    """How it went. `error` is what to raise; `stop` is set when the user pressed Stop (KeyboardInterrupt is then to
    be raised).
    """

    arrival: Arrival | None
    error: BaseException | None
    failure: failures.Failure | None
    stop: Stop | None
    notes: list[str]
    left_out: dict[str, str]
    interrupted: bool
    settings: dict[str, Any] = field(default_factory=dict)  # global ones of libraries, as the lead rank has set them
    had_ended: bool = False  # Stop came when the cell had run to its end
    left_there: bool = False  # ... and while what it had made was on its way
    handled: bool = False  # ... the cell's own code handled it, on every rank: an ordinary end

    @property
    def value(self) -> Any:
        return self.arrival.extra if self.arrival is not None else None

    def conclude(self, screen: Screen) -> Any:
        """Show the notes; raise what ended the cell, or return its value."""
        for note in self.notes:
            screen.notice(note)
        if self.interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error
        return self.value
