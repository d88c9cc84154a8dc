"""The quickstart, executed for real after its outputs were deleted; and what is saved in the file."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest

from tests.notebooks.reading import NOTEBOOKS, clean, execute, text_of

QUICKSTART = NOTEBOOKS / "quickstart.ipynb"


def accuracy_in(text: str) -> float:
    found = re.search(r"never seen: ([\d.]+)%", text)
    assert found is not None, text
    return float(found[1])


@pytest.fixture(scope="module")
def executed() -> Any:
    return execute(QUICKSTART)


@pytest.mark.kernel
def test_the_model_that_two_ranks_trained_is_the_notebooks(executed: Any) -> None:
    assert accuracy_in(text_of(executed)) > 95


@pytest.mark.kernel
def test_the_loss_falls(executed: Any) -> None:
    losses = [float(loss) for loss in re.findall(r"epoch +\d+ +loss ([\d.]+)", text_of(executed))]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2


@pytest.mark.kernel
def test_there_is_a_plot_and_a_value_of_each_rank(executed: Any) -> None:
    shown = [output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", ())]
    assert any("image/png" in data for data in shown)
    assert re.search(r"\[0: \d+, 1: \d+\]", text_of(executed))
    assert "I am rank 1 of 2, my model is a DistributedDataParallel" in text_of(executed)


def test_it_is_saved_with_its_outputs() -> None:
    saved = nbformat.read(QUICKSTART, as_version=4)
    assert accuracy_in(text_of(saved)) > 95
    assert not any(output.output_type == "error" for cell in saved.cells for output in cell.get("outputs", ()))


def test_cleaning_leaves_nothing() -> None:
    cleaned = clean(nbformat.read(QUICKSTART, as_version=4))
    assert text_of(cleaned) == ""
