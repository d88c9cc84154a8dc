"""The hour of exploration, executed for real after its outputs were deleted; and what is saved in the file."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest

from tests.notebooks.reading import NOTEBOOKS, execute, shown_by, text_of

EXPLORATION = NOTEBOOKS / "exploration.ipynb"


@pytest.fixture(scope="module")
def executed() -> Any:
    return execute(EXPLORATION)


@pytest.fixture(scope="module")
def saved() -> Any:
    return nbformat.read(EXPLORATION, as_version=4)


def accuracies(notebook: Any) -> dict[str, tuple[float, float]]:
    """By how the digits are moved: accuracy in percent before and after they were learnt so."""
    lines = re.findall(r"^([a-z ]+?) +([\d.]+)%  -> +([\d.]+)%$", text_of(notebook), re.MULTILINE)
    return {name: (float(before), float(after)) for name, before, after in lines}


def check_the_story(notebook: Any) -> None:
    """What must be so however fast the machine was when it pressed Stop."""
    found = accuracies(notebook)
    assert found.keys() == {"as they are", "right", "left", "down", "up"}
    as_they_are = found.pop("as they are")
    assert as_they_are[0] > 90
    assert as_they_are[1] > 90
    for before, after in found.values():
        assert after > before + 10
        assert after > 70
    errors = [output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"]
    assert [error.ename for error in errors] == ["IndexError", "KeyboardInterrupt"]
    assert re.search(r"stopped at step \d+ on every rank", errors[1].evalue)


@pytest.mark.kernel
def test_the_network_learns_what_it_was_shown(executed: Any) -> None:
    check_the_story(executed)


@pytest.mark.kernel
def test_the_ranks_keep_what_is_theirs_over_the_cells(executed: Any) -> None:
    assert "674 [674, 673]" in text_of(executed)
    zero, one = re.findall(r"\[0: ([\d.]+), 1: ([\d.]+)\]", text_of(executed))[0]
    assert zero != one
    assert "only on the ranks: accelerator" in text_of(executed)


@pytest.mark.kernel
def test_what_an_ordinary_cell_edits_is_what_the_next_cell_reads(executed: Any) -> None:
    started_anew = re.search(r"(\d+) of 48 units start anew", text_of(executed))
    assert started_anew is not None and int(started_anew[1]) > 0
    assert "learning rate 0.0005" in text_of(executed)


@pytest.mark.kernel
def test_a_mistake_costs_neither_the_steps_before_it_nor_the_ranks(executed: Any) -> None:
    [error] = [output for output in shown_by(executed, "a batch has 32") if output.output_type == "error"]
    told = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert "moved[i] = x[i].roll(int(steps[i]), 2)" in told
    assert "nbdist" not in told and "site-packages" not in told
    assert "epoch 7: loss" in text_of(executed)


@pytest.mark.kernel
def test_the_plot_of_the_ranks_is_shown_once(executed: Any) -> None:
    outputs = shown_by(executed, 'plt.xlabel("unit, sorted")')
    assert [sorted(output.data) for output in outputs] == [["image/png", "text/plain"]]


def test_it_is_saved_with_its_outputs_and_no_path_of_a_machine(saved: Any) -> None:
    check_the_story(saved)
    assert "site-packages" not in EXPLORATION.read_text()
