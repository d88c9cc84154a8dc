"""What can go wrong with ranks, as the user meets it."""

from __future__ import annotations

import re


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


def missing_name(error: BaseException | None) -> str | None:
    """The name that a NameError is about."""
    found = re.search(r"^name '(\w+)' is not defined", str(error)) if isinstance(error, NameError) else None
    return None if found is None else found[1]


def say_why_missing(error: BaseException | None, why: str) -> None:
    """Say in an error's own text why a rank does not have the name: a note under a long traceback is read last."""
    if isinstance(error, NameError):
        error.args = (f"{error}: {why}", *error.args[1:])
    elif error is not None:  # a KeyError's argument is the key
        error.add_note(why)
