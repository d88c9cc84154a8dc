"""What a cell on ranks shows, on the screen and in the notebook's model."""

from __future__ import annotations

from typing import Any


def test_output_comes_while_the_cell_runs(notebook: Any) -> None:
    index = notebook.start(
        """
%%distributed -n 2
import time
for step in range(3):
    print("step", step)
    time.sleep(0.7)
"""
    )
    notebook.until(index, "step 0")
    assert not notebook.ended(index)
    assert "step 2" not in notebook.output(index).stream()
    assert "step 2" in notebook.wait(index).stream()
    notebook.shot("stream", index)


def test_what_all_ranks_wrote_is_shown_once_and_what_differs_has_its_rank(notebook: Any) -> None:
    index, output = notebook.ok(
        """
%%distributed -n 2
import time
print("loading the data")
time.sleep(0.3 * rank)
print("my share starts at", ["the front", "the middle"][rank])
"""
    )
    notebook.shot("ranks", index)
    assert output.stream() == "loading the data\nmy share starts at the front\n[1] my share starts at the middle\n"


def test_output_all_names_the_ranks_of_every_line(notebook: Any) -> None:
    code = "%%distributed -n 2 --output all\nprint('loading the data')\nprint('share', 'ab'[rank])"
    index, output = notebook.ok(code)
    notebook.shot("all", index)
    assert sorted(output.stream().splitlines()) == ["[0-1] loading the data", "[0] share a", "[1] share b"]


def test_tabs_are_there_while_it_runs_and_open_on_a_click(notebook: Any) -> None:
    index = notebook.start(
        """
%%distributed -n 2 --output tabs
import time
import pandas as pd
for step in range(4):
    print(f"step {step} of {'ab'[rank]}")
    time.sleep(0.4)
display(pd.DataFrame({"share": ["first", "second"][rank:][:1]}))
"""
    )
    notebook.until(index, "step 1 of b")
    assert not notebook.ended(index)
    notebook.shot("tabs-running", index)
    output = notebook.wait(index)
    shown = notebook.shown(index)
    shown.get_by_text("step 3 of a").wait_for()
    notebook.shot("tabs", index)
    assert not shown.get_by_text("step 3 of b").is_visible()
    shown.get_by_text("rank 1", exact=True).click()
    assert shown.get_by_text("step 3 of b").is_visible()
    assert shown.get_by_role("cell", name="second").is_visible()
    notebook.shot("tabs-open", index)
    tabs = [data for data in output.data if "<details" in data.get("text/html", "")]
    assert len(tabs) == 1
    assert "step 3 of b" in tabs[0]["text/plain"]


def test_a_plot(notebook: Any) -> None:
    index, output = notebook.ok(
        """
%%distributed -n 2
import matplotlib.pyplot as plt
plt.figure(figsize=(4, 2.5))
plt.plot([1, 3, 2])
plt.title(f"drawn by rank {rank}")
plt.show()
"""
    )
    image = notebook.shown(index).locator("img").first
    image.wait_for()
    notebook.shot("plot", index)
    assert "image/png" in output.data[0]
    assert image.evaluate("image => image.naturalWidth") > 200
    assert image.bounding_box()["height"] > 100


def test_a_frame_is_a_table(notebook: Any) -> None:
    index, output = notebook.ok(
        """
%%distributed -n 2
import pandas as pd
pd.DataFrame({"epoch": [0, 1], "loss": [2.25, 1.125]})
"""
    )
    notebook.shot("frame", index)
    table = notebook.shown(index).get_by_role("table")
    assert table.get_by_role("cell", name="1.125").is_visible()
    assert "text/plain" in output.data[0]


def test_a_bar_ends_at_100_percent_on_one_line(notebook: Any) -> None:
    index, output = notebook.ok(
        """
%%distributed -n 2
import time
from tqdm.auto import tqdm
for step in tqdm(range(30), desc="train", disable=rank != 0):
    time.sleep(0.02)
"""
    )
    notebook.shot("bar", index)
    shown = notebook.shown(index).inner_text().strip().splitlines()
    assert len(shown) == 1, shown
    assert shown[0].startswith("train: 100%|")
    assert "30/30" in shown[0]
    assert [line for line in output.stream("stderr").splitlines() if line.strip()] == shown


def test_a_display_is_updated_in_its_place(notebook: Any) -> None:
    index, _ = notebook.ok(
        """
%%distributed -n 2
from IPython.display import HTML, display
handle = display(HTML("<b>loss 2.0</b>"), display_id=True)
print("below")
if handle is not None:
    handle.update(HTML("<b>loss 0.5</b>"))
"""
    )
    notebook.shot("update", index)
    shown = notebook.shown(index)
    shown.get_by_text("loss 0.5").wait_for()
    assert shown.get_by_text("loss 2.0").count() == 0


def test_tab_completes_the_magics_options(notebook: Any) -> None:
    """TAB with the cursor in a cell, as a hand would press it; Enter takes the suggestion."""
    index = notebook.add("%%distributed --ou")
    notebook.cell(index).locator(".cm-content").click()
    page = notebook.page
    offered = page.locator(".jp-Completer-item code")
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    offered.get_by_text("--output").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel"
        ".source.includes('--output')",
        arg=index,
    )
    page.keyboard.type(" ")
    page.keyboard.press("Tab")
    offered.get_by_text("merged").wait_for()
    notebook.shot("completion")
    assert {"merged", "all", "tabs", "rank0", "none"} <= {text.strip() for text in offered.all_inner_texts()}
    page.keyboard.press("Escape")  # the list
    page.keyboard.press("Escape")  # out of the cell
