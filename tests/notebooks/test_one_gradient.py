"""The notebook on the gradient, executed for real after its outputs were deleted; and what is saved in the file."""

from __future__ import annotations

import ast
import re
from typing import Any

import nbformat
import pytest

from tests.notebooks.reading import NOTEBOOKS, execute, shown_by, text_of

ONE_GRADIENT = NOTEBOOKS / "one_gradient.ipynb"


def check_the_curves(notebook: Any) -> None:
    lines = re.findall(
        r"^(\S.*?) +(\d+) steps, last loss ([\d.]+), within 1e-6 of one process: (\w+)$", text_of(notebook), re.M
    )
    assert [name for name, *_ in lines] == ["one process", "2 ranks", "2 ranks, 4 micro-batches", "4 ranks"]
    assert {steps for _, steps, _, _ in lines} == {str(3 * 22)}
    assert {last for _, _, last, _ in lines} == {lines[0][2]}
    assert {near for *_, near in lines} == {"True"}
    assert float(lines[0][2]) < 0.1  # they did learn


@pytest.fixture(scope="module")
def executed() -> Any:
    return execute(ONE_GRADIENT)


@pytest.mark.kernel
@pytest.mark.ranks
def test_the_curves_are_one_however_the_samples_are_split(executed: Any) -> None:
    check_the_curves(executed)
    [plot] = shown_by(executed, "four curves, one line")
    assert "image/png" in plot.data


@pytest.mark.kernel
@pytest.mark.ranks
def test_ga1_a_weight_makes_the_mean_of_what_the_ranks_have(executed: Any) -> None:
    assert re.search(r"mean of means: 3\.0\nwith weights:  4\.0\n", text_of(executed))


@pytest.mark.kernel
@pytest.mark.ranks
def test_ga3_a_short_window_divides_by_what_it_holds(executed: Any) -> None:
    assert shown_by(executed, "torch.ones(5, 1)")[0].data["text/plain"] == "[0.0, 0.0, 0.0, 1.0, 2.0]"
    assert shown_by(executed, "torch.ones(6, 1)")[0].data["text/plain"] == "[0.0, 1.0, 2.0]"


@pytest.mark.kernel
@pytest.mark.ranks
def test_ga10_eight_samples_are_one_step_in_any_split(executed: Any) -> None:
    assert re.findall(r"\d process.*?: \[.*?([\d.]+)\]", text_of(executed)) == ["4.5", "4.5"]
    assert re.findall(r"\d ranks, .*?: \[.*?([\d.]+)\]", text_of(executed)) == ["4.5", "4.5"]


@pytest.mark.kernel
@pytest.mark.ranks
def test_a_step_holds_the_same_samples_on_any_number_of_ranks(executed: Any) -> None:
    alone = ast.literal_eval(shown_by(executed, "def batches")[0].data["text/plain"])
    shared = ast.literal_eval(shown_by(executed, 'dict(enumerate(ranks["mine"]))')[0].data["text/plain"])
    assert [first + second for first, second in zip(shared[0], shared[1], strict=True)] == alone
    assert sorted(index for batch in alone for index in batch) == list(range(8))


@pytest.mark.kernel
@pytest.mark.ranks
def test_a_tail_is_seen_by_all_and_counts_once(executed: Any) -> None:
    shown = shown_by(executed, "metrics count")[0].text
    found = re.findall(r"step (\d), rank (\d) sees \[(.*?)\] +metrics count \[(.*?)\]", shown)
    assert found[:2] == [("0", "0", "1.0, 2.0", "1.0, 2.0, 3.0, 4.0"), ("0", "1", "3.0, 4.0", "1.0, 2.0, 3.0, 4.0")]
    assert found[2:] == [("1", "0", "5.0", "5.0"), ("1", "1", "5.0", "5.0")]


def test_it_is_saved_with_its_outputs_and_no_path_of_a_machine() -> None:
    saved = nbformat.read(ONE_GRADIENT, as_version=4)
    check_the_curves(saved)
    assert not any(output.output_type == "error" for cell in saved.cells for output in cell.get("outputs", ()))
    assert "site-packages" not in ONE_GRADIENT.read_text()
