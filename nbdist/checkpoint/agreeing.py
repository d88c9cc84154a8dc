"""All ranks of one mind: what one could not do, none has done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist import messages


def together(operation: str, act: Callable[[], Any]) -> list[Any]:
    """Do something on each rank; returns what each gave. A collective.

    Raises:
        On every rank, where it failed on one: there its own exception, on the others one that names it.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = act()
    except Exception as caught:
        error = caught
    told = messages.agree(operation, (None if error is None else f"{type(error).__name__}: {error}", value))
    if error is not None:
        raise error
    failed = [(rank, text) for rank, (text, _) in enumerate(told) if text is not None]
    if failed:
        rank, text = failed[0]
        raise messages.echo(f"{operation}: rank {rank} failed, so nothing was done on any: {text}")
    return [value for _, value in told]
