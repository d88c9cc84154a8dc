"""Before ranks are ended: what they still do behind the cells, such as writing a checkpoint, is finished."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.launchers.pool import Pool

LIMIT = 30.0  # seconds for it
_ANSWER = 0.5  # seconds in which a rank says whether there is anything
_AGAIN = 0.05
_LINES = 0.3  # seconds in which what they have said about it is here and shown


def finish(pool: Pool, limit: float = LIMIT) -> bool:
    """Wait until these ranks have nothing left to finish; at once where they have nothing. KeyboardInterrupt gets
    through.

    Args:
        limit: at most so many seconds.

    Returns:
        Whether nothing is left. What ranks that do not answer have is not known.
    """
    end, waited = time.monotonic() + limit, False
    while True:
        pool.notice_ends()
        if not any(pool.ask_aside("unfinished", _ANSWER).values()):
            if waited:
                time.sleep(_LINES)
            return True
        waited = True
        if time.monotonic() > end:
            return False
        time.sleep(_AGAIN)
