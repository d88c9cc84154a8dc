"""The notebook on resuming, executed for real after its outputs were deleted; and what is saved in the file."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from tests.notebooks.reading import NOTEBOOKS, execute, shown_by, text_of

RESUME = NOTEBOOKS / "resume.ipynb"


def check(notebook: Any) -> None:
    [error] = [one for one in shown_by(notebook, "dies_at=47") if one.output_type == "error"]
    assert error.ename == "RankLost" and "rank 1 was killed by SIGKILL" in error.evalue
    text = text_of(notebook)
    assert "checkpoint_3 of 4 ranks: model 40" in text
    assert "88 steps, last loss 0.0" in text and "within 1e-5 everywhere: True" in text


@pytest.mark.kernel
@pytest.mark.ranks
def test_killed_and_resumed_on_other_ranks_it_is_the_same_curve() -> None:
    executed = execute(RESUME)
    check(executed)
    assert "image/png" in shown_by(executed, "never stopped")[-1].data


def test_it_is_saved_with_its_outputs_and_no_path_of_a_machine() -> None:
    check(nbformat.read(RESUME, as_version=4))
    assert "site-packages" not in RESUME.read_text() and "/tmp" not in RESUME.read_text()
