"""How the suite is shared out when several workers run it (`make test`: pytest -n 2), and what holds for all of it."""

from __future__ import annotations

import faulthandler
import gc
import os
from typing import Any

import pytest

# The long ones first, so that no worker is left with one at the end; a file goes to one worker, and so do its fixtures.
_FIRST = ("tests/kernel/test_stop.py", "tests/browser/", "tests/kernel/", "tests/notebooks/")
_TOGETHER = ("tests/browser/", "tests/shipping/")  # a server and a browser, or ranks, for all files of the folder


def _worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _place(item: pytest.Item) -> int:
    return next((at for at, start in enumerate(_FIRST) if item.nodeid.startswith(start)), len(_FIRST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _worker(config):
        items.sort(key=_place)


def pytest_collection_finish() -> None:
    """What a test collects is then its own garbage, not looked for among torch, its libraries and all the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in _TOGETHER if file.startswith(folder)), file)

        def remove_node(self, node: Any) -> str | None:
            """A worker that has died (a test was over its time) is replaced; that test has failed, and xdist would
            run it again.
            """
            left = ((unit, test) for unit in self.assigned_work[node].values() for test in unit if not unit[test])
            unit, test = next(left, ({}, None))
            if test is not None:
                unit[test] = True
            super().remove_node(node)
            return test

    config.option.loadscopereorder = False
    return ByFile(config, log)


# What a test does that is over its time, pytest-timeout writes where a worker has nothing.


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if _worker(config) and capture is not None:
        with capture.global_and_fixture_disabled():
            config.stash[_STDERR] = os.dup(2)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    if _STDERR in item.config.stash:
        faulthandler.dump_traceback_later(max(settings.timeout - 0.5, 0.1), file=item.config.stash[_STDERR])


def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    if _STDERR in item.config.stash:
        faulthandler.cancel_dump_traceback_later()


_STDERR = pytest.StashKey[int]()
