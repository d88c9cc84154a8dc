from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .peers import Notebook, Remote


@pytest.fixture(scope="session")
def remotes() -> Iterator[list[Remote]]:
    started = [Remote(rank) for rank in range(3)]
    for remote in started:
        remote.ready()
    yield started
    for remote in started:
        remote.close()


@pytest.fixture
def nb(remotes: list[Remote], monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook with two ranks."""
    return _notebook(remotes[:2], monkeypatch)


@pytest.fixture
def nb3(remotes: list[Remote], monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook with three ranks."""
    return _notebook(remotes, monkeypatch)


def _notebook(remotes: list[Remote], monkeypatch: pytest.MonkeyPatch) -> Notebook:
    import types

    notebook = Notebook(remotes)
    module = types.ModuleType("__main__")
    module.__dict__.update(notebook.ns)
    # The notebook's namespace is __main__, as in a kernel: dataclasses, enum and pickling look there.
    notebook.ns = module.__dict__
    notebook.home.__init__(module.__dict__, len(remotes), fetch=notebook.fetch)  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "__main__", module)
    return notebook
