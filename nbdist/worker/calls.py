"""The runner of `nbdist.launch`: calls one function, and keeps what it returned for the asking."""

from __future__ import annotations

from typing import Any

from nbdist import state
from nbdist.shipping.wire import RESULT
from nbdist.worker.output import Output


def call(extra: Any) -> Any:
    """The function's value. Its ranks end behind it, so what it has left going on (a checkpoint that is written) is a
    part of it: what that prints is shown, and Stop ends it.
    """
    function, args, kwargs = extra
    value = function(*args, **kwargs)
    for one in list(state.unfinished):
        one.finish()
    return value


class CallRunner:
    injected: frozenset[str] = frozenset()

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def prepare(self, cell: dict[str, Any]) -> None:
        self._namespace.pop(RESULT, None)

    def run(self, cell: dict[str, Any], extra: Any) -> Any:
        return call(extra)

    def settings(self) -> dict[str, Any]:
        return {}

    def finish(self, value: Any) -> None:
        self._namespace[RESULT] = value


def make_runner(namespace: dict[str, Any], spec: dict[str, Any], output: Output) -> CallRunner:
    return CallRunner(namespace)
