"""Many mixed cells in one kernel: right all along, and nothing grows. The long form is `python benchmarks/soak.py`."""

from __future__ import annotations

import pytest

from benchmarks.soak import BOUNDS, Soak
from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

CELLS, WARM = 150, 60


def test_nothing_grows() -> None:
    with Notebook() as notebook:
        soak = Soak(notebook)
        soak.run(CELLS)
        assert soak.grown(WARM) == [], soak.samples
        assert len([sample for sample in soak.samples if sample["cells"] >= WARM]) >= 3


@pytest.mark.parametrize("name", BOUNDS)
def test_growth_is_found(name: str) -> None:
    """In a thousand cells, one more of anything a deck of 31 is seen."""
    soak = object.__new__(Soak)
    soak.samples = [{**dict.fromkeys(BOUNDS, 100.0), "cells": 31.0 * n} for n in range(1, 33)]
    assert soak.grown() == []
    for number, sample in enumerate(soak.samples):
        sample[name] += number
    assert len(soak.grown()) == 1
    assert soak.grown()[0].startswith(name)
