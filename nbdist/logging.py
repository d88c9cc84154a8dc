"""A logger that speaks once and not once a rank: `from nbdist.logging import get_logger`."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from nbdist import checks, state


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose calls take two more arguments.

    `main_process_only` (default True): only the main process speaks. `in_order` (default False; it takes the other's
    place): all speak, one after the other by rank; then all of them must make the call.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, {} if extra is None else extra)
        self._said: set[Any] = set()

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line is the user's, not this one
        me = state.current()
        if in_order and me.world_size > 1:
            # Whether the level is on does not matter: a rank with another level must not leave the others waiting.
            for rank in range(me.world_size):
                if rank == me.rank:
                    self._say(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif me.rank == 0 or not main_process_only or in_order:
            self._say(level, msg, args, kwargs)

    def _say(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]) -> None:
        if self.isEnabledFor(level):
            kwargs["stacklevel"] += 1
            msg, kwargs = self.process(msg, dict(kwargs))
            self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """`warning`, the first time that this message comes with these arguments."""
        key = (str(msg), tuple(map(repr, args)))
        if key not in self._said:
            self._said.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for code that runs on several processes.

    Args:
        name: as for logging.getLogger.
        log_level: its level by name. Default: `ACCELERATE_LOG_LEVEL`, else what logging has.

    Raises:
        ValueError: no such level.
    """
    checks.kind(name, str | None, "get_logger: name", "the name of a logger")
    checks.kind(log_level, str | None, "get_logger: log_level", "the name of a level, such as 'INFO'")
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger)
