"""The notebook on inference, executed for real after its outputs were deleted; and what is saved in the file."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest

from tests.notebooks.reading import NOTEBOOKS, execute, shown_by, text_of

INFERENCE = NOTEBOOKS / "inference.ipynb"


@pytest.fixture(scope="module")
def executed() -> Any:
    return execute(INFERENCE)


def check_the_order(notebook: Any) -> None:
    text = text_of(notebook)
    assert "19 results, as one process writes them, in the same order: True" in text
    known = re.search(r"(\d+) of 19 lines by heart", text)
    assert known is not None and int(known[1]) >= 15
    assert "batches of [[4, 3], [4, 2], [4, 2]]; the same results: True" in text


@pytest.mark.kernel
@pytest.mark.ranks
def test_nineteen_lines_on_three_ranks_come_back_in_order(executed: Any) -> None:
    check_the_order(executed)
    assert re.findall(r"rank (\d) completes (\d) lines, from number (\d+) on", text_of(executed)) == [
        ("0", "7", "0"), ("1", "6", "7"), ("2", "6", "13"),
    ]  # fmt: skip


@pytest.mark.kernel
@pytest.mark.ranks
def test_an_object_of_every_rank_makes_one_table(executed: Any) -> None:
    [table] = shown_by(executed, "pd.DataFrame(reports)")
    rows = re.findall(r"^(\d) +(\d) +\d+ *$", table.data["text/plain"], re.M)
    assert rows == [("0", "7"), ("1", "6"), ("2", "6")]


@pytest.mark.kernel
@pytest.mark.ranks
def test_a_rank_without_an_input_gets_an_empty_list_or_a_copy_that_does_not_count(executed: Any) -> None:
    text = text_of(executed)
    assert "rank 2: [], with padding ['Explicit is ']" in text
    assert "\n['Beautiful is better than ugly.', 'Explicit is better than implicit.']" in text


@pytest.mark.kernel
@pytest.mark.ranks
def test_bfloat16_takes_half_the_memory_and_leaves_the_notebooks_model(executed: Any) -> None:
    found = re.search(r"(\d+) of 19 completions are those of float32, with 50% of its memory", text_of(executed))
    assert found is not None and int(found[1]) >= 12
    assert "the model here is torch.float32 as before" in text_of(executed)


@pytest.mark.kernel
@pytest.mark.ranks
def test_a_generator_is_taken_in_chunks(executed: Any) -> None:
    found = re.search(r"chunks of \[7, 7, 7, 7, 7, 3\]: 38 questions, (\d+) answers", text_of(executed))
    assert found is not None and int(found[1]) >= 30
    assert "a generator has no length; pass list(...)" in text_of(executed)


def test_it_is_saved_with_its_outputs_and_no_path_of_a_machine() -> None:
    saved = nbformat.read(INFERENCE, as_version=4)
    check_the_order(saved)
    assert not any(output.output_type == "error" for cell in saved.cells for output in cell.get("outputs", ()))
    assert "site-packages" not in INFERENCE.read_text()
