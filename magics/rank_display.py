"""What a rank displays, on its way to the notebook as records."""

from __future__ import annotations

import datetime
import numbers
import pathlib
import sys
import traceback
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from nbdist.worker.output import Output

WIDGET = "application/vnd.jupyter.widget-view+json"


class RankDisplayPublisher(DisplayPublisher):
    """Sends what JSON can hold; what it cannot is left out, and that is said."""

    output: Output
    rank = 0

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        kind: str = "display_data",
        **rest: Any,
    ) -> None:
        left_out: list[str] = []
        parts = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        message = {name: _sendable(name, part, left_out) for name, part in parts.items()}
        # A widget lives in the kernel, and here is none: without this the front end says that it has lost a model.
        message["data"].pop(WIDGET, None)
        if left_out:
            print(
                f"nbdist: rank {self.rank}: a display is shown without what cannot be sent: {'; '.join(left_out)}",
                file=sys.stderr,
            )
        self.output.display({"msg_type": "update_display_data" if update else kind, **message})

    def clear_output(self, wait: bool = False) -> None:
        self.output.display({"msg_type": "clear_output", "wait": wait})


def show_last(shell: Any, value: Any, source: str, how: str) -> None:
    """What a cell's last expression gave on this rank; the notebook itself shows rank 0's as `Out[n]`.

    Args:
        how: the cell's `--output`: "merged" (only compared with rank 0's, and shown where it differs), "all", "tabs";
            any other shows nothing.
    """
    if value is None or how not in ("merged", "all", "tabs") or _ends_with_semicolon(source):
        return
    compared = how == "merged"
    if compared and callable(getattr(type(value), "_ipython_display_", None)):
        return  # it shows itself, and what that is cannot be compared
    shell.told_by_the_notebook = compared  # what is wrong with its repr
    try:
        data, metadata = shell.display_formatter.format(value)
    finally:
        shell.told_by_the_notebook = False
    if data:
        shell.display_pub.publish(data, metadata, kind="execute_result")


def _ends_with_semicolon(source: str) -> bool:
    ends = getattr(DisplayHook, "semicolon_at_end_of_expression", None)
    return ends is not None and ends(source)


class RankDisplayHook(DisplayHook):
    """A value that a cell inside the cell leaves (`get_ipython().run_cell`): shown, and no `Out` is kept of it."""

    def __call__(self, result: Any = None) -> None:
        if result is not None and not self.quiet():
            data, metadata = self.compute_format_data(result)
            self.shell.display_pub.publish(data, metadata)


def _sendable(name: str, part: dict[Any, Any], left_out: list[str]) -> dict[Any, Any]:
    kept = {}
    for key, value in part.items():
        try:
            kept[key] = _plain(value)
        except (TypeError, RecursionError) as error:
            left_out.append(f"{name}[{key!r}] ({error})")
    return kept


def _plain(value: Any) -> Any:
    """The value in types that every Python has; as jupyter_client would write it into JSON.

    Raises:
        TypeError: with the type that has no place there.
    """
    if value is None or type(value) in (str, bytes, int, float, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, datetime.date | pathlib.PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__name__}")


def what_was_shown(error_traceback: Any) -> str | None:
    """The type of the object whose display raised, by the frames of the exception; None when it was no display."""
    found = None
    for frame, _ in traceback.walk_tb(error_traceback):
        if frame.f_globals.get("__name__") == "IPython.core.formatters" and "obj" in frame.f_locals:
            found = type(frame.f_locals["obj"]).__name__
    return found
