"""What a cell on ranks shows in the notebook, on the screen and in its model."""

from __future__ import annotations

import re
from typing import Any


def test_rank_0_streams_and_lines_of_others_stand_beside_it(notebook: Any) -> None:
    index = notebook.start(
        """%%distributed -n 2
import time
for step in range(3):
    print("step", step)
    if step == 1:
        print("I am", rank)
    time.sleep(0.6)
"""
    )
    notebook.until(index, "step 0")
    assert not notebook.page.evaluate("index => window.running[index].ended", index)  # it is shown while it runs
    text = notebook.wait(index).stream()
    notebook.shot("stream", index)
    print(repr(text))


def test_a_plot(notebook: Any) -> None:
    index, output = notebook.ok(
        """%%distributed -n 2
import matplotlib.pyplot as plt
plt.figure(figsize=(4, 2.5))
plt.plot([1, 3, 2])
plt.title("from rank 0")
plt.show()
"""
    )
    image = notebook.shown(index).locator("img")
    image.wait_for()
    notebook.shot("plot", index)
    assert image.evaluate("image => image.naturalWidth") > 200


def test_a_frame(notebook: Any) -> None:
    index, output = notebook.ok(
        """%%distributed -n 2
import pandas as pd
pd.DataFrame({"rank": [rank], "loss": [0.5 + rank]})
"""
    )
    notebook.shown(index).get_by_role("table").wait_for()
    notebook.shot("frame", index)


def test_bar(notebook: Any) -> None:
    index, output = notebook.ok(
        """%%distributed -n 2
import time
from tqdm.auto import tqdm
for i in tqdm(range(30), desc="train"):
    time.sleep(0.02)
"""
    )
    notebook.shot("bar", index)
    print(output)
