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
        self.output.display({"msg_type": "update_display_data" if update else "display_data", **message})

    def clear_output(self, wait: bool = False) -> None:
        self.output.display({"msg_type": "clear_output", "wait": wait})


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
