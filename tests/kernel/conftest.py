"""Kernels for tests: one a module, with the extension loaded, and nothing of it left afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.notebook import Notebook


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    """A kernel that has loaded nbdist, shared by the tests of a module: each takes names of its own."""
    with Notebook() as notebook:
        notebook.ok("%load_ext nbdist")
        yield notebook


@pytest.fixture
def fresh() -> Iterator[Notebook]:
    """A kernel of its own for a test that changes more than names."""
    with Notebook() as notebook:
        notebook.ok("%load_ext nbdist")
        yield notebook
