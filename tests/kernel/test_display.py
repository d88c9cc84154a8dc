"""What ranks display is shown as an ordinary cell would show it, with the notebook's own settings."""

from __future__ import annotations

import re

import pytest

from tests.kernel.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def started(nb: Notebook) -> None:
    nb.ok("import sys, logging, warnings, threading, time\nfrom IPython.display import display, HTML")
    nb.ranks("pass")


def update(cell: Cell) -> list[tuple[str, str, str | None]]:
    return [
        (kind, content["data"]["text/plain"], content["transient"].get("display_id"))
        for kind, content in cell.events
        if kind in ("display_data", "update_display_data")
    ]


# ------------------------------------------------------------------ the notebook's settings


def test_plots_are_drawn_as_the_notebook_says(fresh: Notebook) -> None:
    fresh.ok("import matplotlib.pyplot as plt\nplt.rcParams['figure.figsize'] = (2, 1)")
    fresh.ok("%config InlineBackend.figure_formats = ['svg']")
    cell = fresh.ranks("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.plot([2, 1]);")
    assert [(sorted(data), data["text/plain"]) for data in cell.data] == [
        (["image/svg+xml", "text/plain"], "<Figure size 200x100 with 1 Axes>")
    ] * 2
    assert cell.stdout == ""  # the same on rank 1, but for the names and the date in the SVG
    fresh.ok("%config InlineBackend.figure_formats = ['png']\nplt.rcParams['figure.figsize'] = (3, 1)")
    cell = fresh.ranks("fig, ax = plt.subplots()\nax.plot([1, 2])\nplt.close(fig)\nfig")
    assert "image/png" in cell.results[0] and "size 300x100" in cell.results[0]["text/plain"]
    fresh.ranks("plt.rcParams['figure.figsize'] = (1, 1)")  # a cell's own setting stays on the ranks
    assert "100x100" in fresh.ranks("plt.plot([1]);").data[0]["text/plain"]
    fresh.ok("%matplotlib agg")
    assert fresh.ranks("plt.plot([1])\nplt.show()").data == []


def test_frames_arrays_and_tensors_are_printed_as_the_notebook_says(nb: Notebook) -> None:
    nb.ok("import numpy as np, torch, pandas as pd\nx, t = np.array([1.23456]), torch.tensor([1.23456])")
    nb.ok("np.set_printoptions(precision=2); torch.set_printoptions(precision=1); pd.set_option('display.max_rows', 4)")
    code = "print(x, t)\nprint(pd.DataFrame({'a': range(50)}))\ndisplay(pd.DataFrame({'a': range(50)}))"
    here, there = nb.ok(code), nb.ranks(code)
    assert there.stdout == here.stdout and "1.23]" in there.stdout and "49  49" in there.stdout
    assert there.data == here.data and there.data[0]["text/html"].count("<tr") == 6
    nb.ok("np.set_printoptions(precision=8); torch.set_printoptions(precision=4); pd.reset_option('display.max_rows')")
    assert nb.ranks("print(x, t)").stdout == "[1.23456] tensor([1.2346])\n"


def test_formatters_of_the_notebook_hold_on_the_ranks(nb: Notebook) -> None:
    nb.ok(
        "class Box:\n    pass\nword = 'here'\nhtml = get_ipython().display_formatter.formatters['text/html']\n"
        "html.for_type(Box, lambda box: f'<b>box {word}</b>')\nhtml.for_type(set, lambda one: f'<i>{len(one)}</i>')"
    )
    cell = nb.ranks("word = 'there'\ndisplay(Box(), {1, 2})")
    assert [data.get("text/html") for data in cell.data] == ["<b>box there</b>", "<i>2</i>"]
    nb.ok("lock = threading.Lock()\nhtml.for_type(frozenset, lambda one, lock=lock: '')")
    cell = nb.ranks("display(frozenset({1}))")
    assert "the text/html formatter of frozenset cannot be sent to the ranks" in cell.stderr
    assert [sorted(data) for data in cell.data] == [["text/plain"]]
    assert nb.ranks("pass").stderr == ""  # said once


def test_logging_and_warnings_are_set_as_in_the_notebook_and_shown_once(fresh: Notebook) -> None:
    fresh.ok("import logging, warnings")
    fresh.ok(
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s|%(message)s')\n"
        "logging.getLogger('quiet').setLevel(logging.ERROR)"
    )
    code = "logging.info('rank %s', rank)\nlogging.debug('x')\nlogging.getLogger('quiet').warning('x')"
    assert fresh.ranks(code, "-n 4").stderr == "INFO|rank 0\n"
    fresh.ok("logging.getLogger().setLevel(logging.WARNING)")
    assert fresh.ranks(f"{code}\nlogging.warning('w')", "-n 4").stderr == "WARNING|w\n"
    cell = fresh.ranks("for _ in range(3):\n    warnings.warn('all')\nif rank == 3:\n    warnings.warn('mine')", "-n 4")
    lines = [re.sub(r"\S+/(\d+)\.py", "FILE", line) for line in cell.stderr.splitlines()]
    assert lines == [
        *("FILE:3: UserWarning: all", "  warnings.warn('all')"),
        *("[3] FILE:5: UserWarning: mine", "[3]   warnings.warn('mine')"),
    ]
    fresh.ok("warnings.filterwarnings('ignore', message='all')")
    assert fresh.ranks("warnings.warn('all')\nwarnings.warn('other')", "-n 4").stderr.count("Warning") == 1
    fresh.ranks("warnings.filterwarnings('ignore', message='other')", "-n 4")  # a cell's own stays on the ranks
    fresh.ok("warnings.resetwarnings()")
    assert fresh.ranks("warnings.warn('other')\nwarnings.warn('all')", "-n 4").stderr.count("Warning") == 1


# ------------------------------------------------------------------ displays that are updated


def test_displays_are_updated_across_cells(nb: Notebook) -> None:
    nb.ok("handle = display('made here', display_id='of the notebook')")
    cell = nb.ranks("handle.update('by a rank')\nother = display('made there', display_id=True)")
    (kind, _, name), (second, _, made) = update(cell)
    assert (kind, name, second) == ("update_display_data", "of the notebook", "display_data") and made
    assert update(nb.ranks("other.update('again')")) == [("update_display_data", "'again'", made)]
    assert update(nb.ok("other.update('here')")) == [("update_display_data", "'here'", made)]


# ------------------------------------------------------------------ what cannot be shown


def test_what_cannot_be_shown_is_said_and_the_cell_goes_on(nb: Notebook) -> None:
    cell = nb.ranks(
        "class Bad:\n    def _repr_html_(self):\n        raise ValueError('no html')\n    def __repr__(self):\n"
        "        return 'Bad()'\ndisplay(Bad())\n"
        "display({'text/plain': 'x'}, raw=True, metadata={'a': threading.Lock()})\n"
        "display({'text/plain': 'y', 'application/json': [object()]}, raw=True)\nprint('on')\ndone = True"
    )
    assert "nbdist: rank 0 cannot show a Bad: ValueError: no html" in cell.stderr and "no html" in cell.stderr
    assert "rank 0: a display is shown without what cannot be sent: metadata['a'] (a lock)" in cell.stderr
    assert "data['application/json'] (a object)" in cell.stderr
    assert cell.data == [{"text/plain": "Bad()"}, {"text/plain": "x"}, {"text/plain": "y"}]
    assert cell.stdout.startswith("on\n") and nb.value("done")


def test_a_widget_of_a_rank_is_shown_as_its_text(nb: Notebook) -> None:
    cell = nb.ranks(
        "class Widget:\n    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/plain': 'a slider', 'application/vnd.jupyter.widget-view+json': {'model_id': '1'}}\n"
        "display(Widget())"
    )
    assert cell.data == [{"text/plain": "a slider"}]


# ------------------------------------------------------------------ progress


def test_tqdm_asked_for_the_notebook_is_text(nb: Notebook) -> None:
    cell = nb.ranks(
        "from tqdm.notebook import tqdm, trange\nfor _i in tqdm(range(3)):\n    pass\nfor _i in trange(2): pass"
    )
    assert "3/3" in cell.stderr and "2/2" in cell.stderr and cell.data == [] and "[1]" not in cell.stderr


def test_rich_is_shown_as_in_a_notebook(nb: Notebook) -> None:
    cell = nb.ranks(
        "import rich\nfrom rich.progress import track\nrich.print('[red]hello[/red]', rank)\n"
        "for _i in track(range(3)):\n    time.sleep(.15)"
    )
    assert "hello</span>" in cell.data[0]["text/html"]
    # Rank 1's line differs, and is shown as it is; its bar is that of rank 0.
    others = [one for one in update(cell) if str(one[2]).startswith("nbdist-")]
    assert [text for _, text, _ in others] == ["\x1b[31mhello\x1b[0m \x1b[1;36m1\x1b[0m\n"]
    moving = [one for one in update(cell)[1:-1] if one not in others]
    assert len({name for _, _, name in moving}) == 1 and moving[0][0] == "display_data"
    assert "100%" in moving[-1][1] and len(moving) > 2
    assert cell.stdout == "[1]\n" and cell.stderr == ""


# ------------------------------------------------------------------ tabs


def test_tabs_while_it_runs_and_at_the_end(nb: Notebook) -> None:
    cell = nb.ranks(
        "for step in range(12):\n    print('step', step, 'ab'[rank])\n    time.sleep(.1)\n"
        "print('problem', file=sys.stderr)\ndisplay(HTML(f'<b>bold {rank}</b>'))\nrank",
        "-n 2 --output tabs",
    )
    shown = update(cell)
    assert 3 <= len(shown) <= 3 + cell.seconds / 0.4 and len({name for _, _, name in shown}) == 1
    page = cell.data[-2]["text/html"]
    assert page.count("<details") == 2 and "<b>bold 0</b>" in page and "<b>bold 1</b>" in page
    assert shown[-1][1] == "\n\n".join(
        f"rank {rank}\n"
        + "".join(f"step {i} {me}\n" for i in range(12))
        + f"problem\n<IPython.core.display.HTML object>\n{rank}"
        for rank, me in enumerate("ab")
    )
    assert (cell.stdout, cell.stderr, cell.results) == ("", "", [{"text/plain": "0"}])


def test_an_error_stays_outside_of_the_tabs_and_late_output_comes_into_them(nb: Notebook) -> None:
    cell = nb.fails("print('before')\nif rank == 1:\n    raise KeyError('mine')", "-n 2 --output tabs")
    assert cell.error is not None and cell.error[0] == "KeyError" and "before" in cell.data[-1]["text/html"]
    running = nb.start(
        "%%distributed -n 2 --output tabs\nprint('now')\nthreading.Timer(.4, lambda: print('later', rank)).start()"
    )
    name = update(nb.wait(running))[-1][2]
    last = ("later 0", "later 1")
    late = update(nb.late_output(running, 30, lambda cell: all(line in str(cell.data[-1:]) for line in last)))
    assert late[-1][0] == "update_display_data" and late[-1][2] == name
    assert late[-1][1] == "rank 0\nnow\nlater 0\n\nrank 1\nnow\nlater 1"
