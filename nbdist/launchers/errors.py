"""What can go wrong with ranks, as the user meets it."""

from __future__ import annotations


class StartFailed(RuntimeError):
    """The ranks could not be started; the message names the rank and why."""


class RankLost(RuntimeError):
    """A rank's process ended while a cell ran: killed by a signal, or by its own os._exit."""


class RankExited(RuntimeError):
    """A rank called sys.exit (or raised SystemExit) in a cell. Raised in its place: SystemExit would end the
    notebook's own process.
    """


class CellTimeout(TimeoutError):
    """The cell ran longer than its --timeout; the message says where each rank was."""


class RanksWaitForEachOther(RuntimeError):
    """Ranks wait in different collectives, or for a rank that has finished the cell: this cannot end by itself."""


class NotTakenOver(RuntimeError):
    """A rank could not decode what the cell reads (a module that it cannot import, for example). Nothing has run."""


class CannotComeBack(TypeError):
    """What a launched function returned cannot leave its rank."""


class RanksBusy(RuntimeError):
    """Another thread runs a cell on these ranks."""


class RanksEnded(RuntimeError):
    """Another thread ended the ranks, by `%distributed stop` for example, while a cell ran on them or they started."""


class NotOnTheRanks(RuntimeError):
    """What the user asks for lives on ranks that are gone."""
