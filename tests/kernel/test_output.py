"""What a cell on ranks shows: rank 0 as an ordinary cell would, the others with their rank in front, all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

ONLY_0 = "-n 2 --output rank0"


@pytest.fixture(scope="module", autouse=True)
def started(nb: Notebook) -> None:
    nb.ok("import sys, os, time, threading, ctypes\nfrom IPython.display import display, HTML, clear_output")
    nb.ranks("pass")


def shown(cell: Cell) -> list[tuple[str, Any]]:
    """Messages in their order; streams that follow each other joined, as a front end does."""
    told: list[tuple[str, Any]] = []
    for kind, content in cell.events:
        if kind == "stream":
            if told and told[-1][0] == content["name"]:
                told[-1] = (content["name"], told[-1][1] + content["text"])
            else:
                told.append((content["name"], content["text"]))
        elif kind in ("display_data", "update_display_data", "execute_result"):
            told.append((kind, content["data"]))
        elif kind == "clear_output":
            told.append((kind, content["wait"]))
    return told


def lines_of(rank: int, text: str) -> list[str]:
    """The lines of one rank, without its prefix."""
    lines = text.splitlines()
    if rank:
        start = f"[{rank}] "
        return [line[len(start) :] for line in lines if line.startswith(start)]
    return [line for line in lines if not re.match(r"\[[\d,-]+\] ", line)]


# ------------------------------------------------------------------ order


@pytest.mark.parametrize(
    "code",
    [
        "print('a')\ndisplay(HTML('<b>1</b>'))\nprint('b', end='')\nprint('c')\ndisplay('two')\nprint('d')\n41 + 1",
        "print('out')\ndisplay('x')\nprint('err', file=sys.stderr)\ndisplay('y')\nsys.stdout.write('no newline')\nNone",
        "handle = display('old', display_id='some')\nprint('between')\nhandle.update('new')\nprint('after')",
        "print('one')\nclear_output(wait=True)\nprint('two')\ndisplay({'text/plain': 'raw'}, raw=True)",
        "for step in range(3):\n    print(step)\n    display(step)\n    print(step, file=sys.stderr)\n    display('-')",
    ],
)
def test_rank_0_shows_what_an_ordinary_cell_shows(nb: Notebook, code: str) -> None:
    here, there = nb.ok(code), nb.ranks(code, ONLY_0)
    assert shown(there) == shown(here)


def test_other_ranks_lines_show_where_they_differ(nb: Notebook) -> None:
    cell = nb.ranks(
        "print('equal')\nprint('loss', 0.5 * rank)\nprint('problem', 'ab'[rank], file=sys.stderr)\n"
        "print('tail', 'ab'[rank], end='')"
    )
    assert cell.stdout == "equal\nloss 0.0\ntail a\n[1] loss 0.5\n[1] tail b\n"
    assert cell.stderr == "problem a\n[1] problem b\n"


def test_data_that_happens_to_be_the_rank_is_shown(nb: Notebook) -> None:
    cell = nb.ranks("print('errors:', rank)\nprint(f'rank {rank}: {rank} bad')\nprint([rank])\nprint(f'step {rank}')")
    assert (
        cell.stdout == "errors: 0\nrank 0: 0 bad\n[0]\nstep 0\n[1] errors: 1\n[1] rank 1: 1 bad\n[1] [1]\n[1] step 1\n"
    )


def test_lines_that_several_ranks_share_fold(nb: Notebook) -> None:
    code = "print(f'rank {rank} of {world_size} on {device}')\nif rank:\n    print('mine')"
    cell = nb.ranks(code, "-n 4")
    assert cell.stdout == (
        "rank 0 of 4 on cpu\n[1-3] mine\n[1-3] the same 1 line but for the rank (run with --output tabs to see each)\n"
    )
    assert nb.ranks(code, "-n 4 --ranks 1,3").stdout == (
        "rank 1 of 4 on cpu\nmine\n[3] the same 1 line but for the rank (run with --output tabs to see each)\n"
    )
    cell = nb.ranks(f"{code}\nprint('loss', rank / 10)", "-n 4 --output all")
    assert cell.stdout.splitlines()[:-1] == [
        "[0-3] rank 0 of 4 on cpu",
        "[1-3] mine",
        *(f"[{rank}] loss 0.{rank}" for rank in range(4)),
    ] or cell.stdout.splitlines()[1:-1] == [
        *("[0] loss 0.0", "[1-3] mine"),
        *(f"[{rank}] loss 0.{rank}" for rank in range(1, 4)),
    ]


def test_subprocesses_of_all_ranks_fold(nb: Notebook) -> None:
    cell = nb.ranks("import subprocess\n!echo from a shell\n_ = subprocess.run(['echo', 'from a child'])", "-n 3")
    assert cell.stdout == "from a shell\nfrom a child\n"


def test_a_line_of_rank_0_is_not_torn(nb: Notebook) -> None:
    cell = nb.ranks(
        "import torch.distributed as dist\nfor i in range(200):\n    print('begin', end='')\n"
        "    if rank and i % 50 == 0:\n        time.sleep(.002)\n    print(' end', 'ab'[rank])"
    )
    assert lines_of(0, cell.stdout) == ["begin end a"] * 200 and lines_of(1, cell.stdout) == ["begin end b"] * 200


def test_outputs_of_chosen_ranks(nb: Notebook) -> None:
    code = "print('text', rank)\nprint('error', rank, file=sys.stderr)\ndisplay('display')\nrank"
    cell = nb.ranks(code, ONLY_0)
    assert (cell.stdout, cell.stderr) == ("text 0\n", "error 0\n")
    cell = nb.ranks(code, "-n 2 --output none")
    assert [kind for kind, _ in shown(cell)] == ["execute_result"]
    cell = nb.ranks(code, "-n 2 --ranks 1")
    assert (cell.stdout, cell.stderr, cell.results) == ("text 1\n", "error 1\n", [{"text/plain": "1"}])


# ------------------------------------------------------------------ complete


def test_a_progress_bar_arrives_as_it_moves_and_those_of_others_do_not_spill(nb: Notebook) -> None:
    cell = nb.ranks(
        "from tqdm.auto import tqdm\nfor _step in tqdm(range(5), mininterval=0, miniters=1):\n    time.sleep(.01)",
        "-n 4",
    )
    assert cell.stderr.count("\r") >= 5 and "5/5" in cell.stderr and "[1" not in cell.stderr and cell.stdout == ""
    cell = nb.ranks("for _step in tqdm(range(5 + rank)):\n    time.sleep(.01)", "-n 4")
    told = [line.split("%")[0] + line.split("|")[2].split("[")[0] for line in cell.stderr.splitlines()[-3:]]
    assert told == [f"[{rank}] 100 {5 + rank}/{5 + rank} " for rank in (1, 2, 3)]


def test_native_output(nb: Notebook) -> None:
    cell = nb.ranks(
        "libc, me = ctypes.CDLL(None), 'ab'[rank]\nlibc.printf(b'printf %s', me.encode())\nlibc.fflush(None)\n"
        "print()\nos.system(f'echo system {me}; echo problem {me} >&2')\nos.write(1, f'raw {me}\\n'.encode())\n"
        "pid = os.fork()\nif pid == 0:\n    print('child', me)\n    os._exit(0)\nos.waitpid(pid, 0)\n"
        "libc.printf(b'last words %s', me.encode())\ndel libc"
    )
    for rank, me in enumerate("ab"):
        text = "\n".join(lines_of(rank, cell.stdout))
        for part in (f"printf {me}", f"system {me}", f"raw {me}", f"child {me}", f"last words {me}"):
            assert part in text, cell.stdout
        assert f"problem {me}" in lines_of(rank, cell.stderr)


def test_bytes_and_a_subprocess_with_the_cells_streams(nb: Notebook) -> None:
    cell = nb.ranks(
        "import subprocess\nsys.stdout.buffer.write('bytes é\\n'.encode())\n"
        "_ = subprocess.run(['sh', '-c', 'echo to stdout; echo to stderr >&2'], stdout=sys.stdout, stderr=sys.stderr)",
        ONLY_0,
    )
    assert sorted(cell.stdout.splitlines()) == ["bytes é", "to stdout"] and cell.stderr == "to stderr\n"


def test_prints_of_loader_workers(nb: Notebook) -> None:
    cell = nb.ranks(
        "from torch.utils.data import DataLoader, Dataset\nclass Chatty(Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        sys.stdout.write(f\"item {i} {'ab'[rank]}\\n\")\n        return i\n"
        "seen = list(DataLoader(Chatty(), num_workers=2, batch_size=2))"
    )
    for rank in (0, 1):
        assert sorted(lines_of(rank, cell.stdout)) == [f"item {i} {'ab'[rank]}" for i in range(8)]


def stream(nb: Notebook, seconds: float) -> None:
    cell = nb.ranks(
        f"start = time.monotonic()\nfor i in range({int(seconds * 1000)}):\n"
        "    print(f'{i:06d}' + 'xy'[rank] * 993, file=sys.stderr)\n"
        "    time.sleep(max(0, start + i / 1000 - time.monotonic()))",
        timeout=60,
    )
    for rank in (0, 1):
        lines = lines_of(rank, cell.stderr)
        assert [int(line[:6]) for line in lines] == list(range(int(seconds * 1000)))
        assert {len(line) for line in lines} == {999}


def test_a_megabyte_a_second_from_every_rank(nb: Notebook) -> None:
    stream(nb, 3)


@pytest.mark.slow
def test_a_megabyte_a_second_for_longer(nb: Notebook) -> None:
    stream(nb, 10)


def test_a_burst_of_20_megabytes(nb: Notebook) -> None:
    cell = nb.ranks("for i in range(10_000):\n    print(f'{i:06d}' + 'xy'[rank] * 993)")
    for rank in (0, 1):
        assert [int(line[:6]) for line in lines_of(rank, cell.stdout)] == list(range(10_000))


@pytest.fixture
def small_room(nb: Notebook) -> Iterator[None]:
    """Room for a mebibyte, and a notebook that takes its time."""
    nb.ok(
        "import nbdist.launchers.reader as _r, nbdist.magics.output as _o\n_usual = _r.MOST_PENDING, _o._write\n"
        "_r.MOST_PENDING = 1 << 20\ndef _slow(*a):\n    time.sleep(.005)\n    _usual[1](*a)\n_o._write = _slow"
    )
    yield
    nb.ok("_r.MOST_PENDING, _o._write = _usual")


def test_a_flood_waits_for_the_notebook_and_nothing_is_lost(nb: Notebook, small_room: None) -> None:
    cell = nb.ranks(
        "block = b'f' * 65535 + b'\\n'\nfor i in range(300 if rank == 0 else 0):\n    os.write(1, block)\nend = 1"
    )
    assert len(cell.stdout) == 300 * 65536 and cell.stderr == ""
    assert nb.value("end") == 1
    assert nb.ranks("print('next')", ONLY_0).stdout == "next\n"


def test_what_a_stop_leaves_of_a_flood_is_told_once(nb: Notebook, small_room: None) -> None:
    flood = "while True:\n    os.write(1, b'g' * 65535 + b'\\n')"
    cell = nb.run(f"%%distributed -n 2\n{flood}", stop_when=lambda cell: len(cell.stdout) > 1 << 20)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert len(re.findall(r"nbdist: stopped: [\d.]+ MB that the ranks had written are not shown", cell.stderr)) == 1
    assert cell.stderr.count("\n") == 1 and cell.stop_seconds is not None
    assert nb.ranks("print('next')", ONLY_0).stdout == "next\n"


def test_an_equal_flood_folds(nb: Notebook) -> None:
    """One rank is first far ahead of the other, then far behind."""
    cell = nb.ranks(
        "for turn in range(2):\n    if turn == rank:\n        time.sleep(.1)\n    for i in range(15_000):\n"
        "        print('a line of the log that is long enough to matter', i)\n"
        "print('z' * 20_000_000)\nprint('end', 'ab'[rank])"
    )
    assert cell.stdout.count("\n") == 30_003 and cell.stdout.endswith("end a\n[1] end b\n")


def test_text_of_many_bytes_a_letter(nb: Notebook) -> None:
    text = "é" * 3001 + "漢字" * 2003 + "😀" * 1501
    nb.ok(f"long_text = {text!r}")
    cell = nb.ranks(
        "mine = long_text + 'ab'[rank]\nprint(mine)\nprint(mine, file=sys.stderr)\n"
        "os.write(1, (mine + '\\n').encode());"
    )
    for rank, me in enumerate("ab"):
        assert lines_of(rank, cell.stdout) == [text + me, text + me]
        assert lines_of(rank, cell.stderr) == [text + me]
    cell = nb.ranks(
        "raw = (long_text + '\\n').encode()\nfor i in range(0, len(raw), 7):\n    sys.stdout.buffer.write(raw[i:i+7])"
    )
    assert cell.stdout == text + "\n"


def test_what_is_no_text(nb: Notebook) -> None:
    cell = nb.ranks(
        "os.write(1, bytes(range(256)) + b'\\n')\nsys.stdout.buffer.write(b'\\xff\\xfe\\n')\n"
        "print('e' * 200_000, file=sys.stderr)\nprint('z' * 10_000_000)\nprint('after')"
    )
    assert cell.stderr == "e" * 200_000 + "\n"
    assert cell.stdout.endswith("z" * 10_000_000 + "\nafter\n") and "ABC" in cell.stdout
    assert "[1" not in cell.stdout.replace("Z[", "")


def test_late_output_lands_under_its_own_cell(nb: Notebook) -> None:
    message = nb.start(
        "%%distributed -n 2\ndef later():\n    go.wait()\n    print('late', 'ab'[rank])\n"
        "    print('late error', file=sys.stderr)\n"
        "go = threading.Event()\nthreading.Timer(.4, go.set).start()\nthreading.Thread(target=later).start()\n"
        "print('in time')"
    )
    assert "in time" in nb.wait(message).stdout
    other = nb.ok("import time\nfor _i in range(12):\n    time.sleep(.1)\nprint('other')")
    late = nb.late_output(message, 30, lambda cell: cell.stdout.count("late ") == 2 and cell.stderr != "")
    assert late.stdout == "late a\n[1] late b\n" and late.stderr == "late error\n"
    assert other.stdout == "other\n" and other.stderr == ""


# ------------------------------------------------------------------ displays


def test_figures(nb: Notebook) -> None:
    cell = nb.ranks(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()\nplt.plot([3, 2])\nplt.title('left open');"
    )
    assert [("image/png" in data) for data in cell.data] == [True, True]
    assert cell.stdout == ""
    cell = nb.ranks("plt.plot([1, 2, rank])\nplt.show()", "-n 3")
    assert [("image/png" in data) for data in cell.data] == [True] * 3 and cell.stdout == "[1]\n[2]\n"
    cell = nb.ranks("plt.plot([1, 2, min(rank, 1)])\nplt.show()", "-n 3")
    assert [("image/png" in data) for data in cell.data] == [True] * 2 and cell.stdout == "[1-2]\n"
    cell = nb.ranks("import pandas as pd\npd.DataFrame({'a': [min(rank, 1)]})", "-n 3")
    assert cell.stdout == "[1-2]\n" and len(cell.data) == 2 and len(cell.results) == 1
    assert "<td>1</td>" in cell.data[0]["text/html"] and "<td>0</td>" in cell.results[0]["text/html"]
    cell = nb.ranks("plt.plot([1, 2, rank])\nplt.show()", "-n 3 --output all")
    assert len(cell.data) == 3 and re.fullmatch(r"(\[\d\]\n){3}", cell.stdout)


def test_a_display_of_rank_1_alone(nb: Notebook) -> None:
    shown = "display(HTML('<b>mine</b>'))\n    plt.plot([1])\n    plt.show()"
    cell = nb.ranks(f"import matplotlib.pyplot as plt\nif rank:\n    {shown}")
    assert cell.stdout == "[1]\n[1]\n"
    assert cell.data[0]["text/html"] == "<b>mine</b>" and "image/png" in cell.data[1]


def test_frames_of_rank_1_alone_replace_each_other(nb: Notebook) -> None:
    cell = nb.ranks(
        "for i in range(3 if rank else 0):\n    clear_output(wait=True)\n    display(HTML(f'frame {i}'))\n"
        "    time.sleep(.2)"
    )
    kinds = [kind for kind, _ in shown(cell) if kind in ("display_data", "update_display_data")]
    assert kinds == ["display_data", "update_display_data", "update_display_data"] and cell.stdout == "[1]\n"


def test_inline_figures_asked_for_in_the_cell(nb: Notebook) -> None:
    cell = nb.ranks(
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1])", ONLY_0
    )
    assert any("image/png" in data for data in cell.data)
    nb.ranks("ax.set_xlabel('x')\nsame = fig.axes[0] is ax", ONLY_0)
    assert nb.value("(same, ax.get_xlabel(), fig.axes[0] is ax)") == (True, "x", True)


def test_a_large_display_arrives_whole(nb: Notebook) -> None:
    cell = nb.ranks("display(HTML('<p>' + 'h' * 300_000 + '</p>'))", ONLY_0)
    assert cell.data[0]["text/html"] == "<p>" + "h" * 300_000 + "</p>"


def test_the_last_value_has_its_rich_form(nb: Notebook) -> None:
    nb.ok("import pandas as pd; frame = pd.DataFrame({'a': [1, 2]})")
    cell = nb.ranks("frame['b'] = frame.a * 2\nframe")
    assert "text/html" in cell.results[0] and "<table" in cell.results[0]["text/html"]


def test_the_last_expression_of_every_rank(nb: Notebook) -> None:
    cell = nb.ranks("rank * 10", "-n 3")
    assert cell.stdout == "[1] 10\n[2] 20\n" and cell.results == [{"text/plain": "0"}]
    assert nb.value("Out[max(Out)]") == 0
    for code in ("'equal'", "print('silent', end='')\nrank;", "None if rank else 5", "object()"):
        assert "[1" not in nb.ranks(code).stdout
    cell = nb.ranks("rank * 10\n", "-n 3 --output all")
    assert cell.stdout == "[0] 0\n[1] 10\n[2] 20\n" and cell.data == cell.results == [{"text/plain": "0"}]
    cell = nb.ranks("import pandas as pd\npd.DataFrame({'a': [rank]})", "-n 3 --output tabs")
    assert cell.data[-2]["text/html"].count("<table") == 3
    # what shows itself, and what cannot be shown
    selfish = "class Selfish:\n    def _ipython_display_(self):\n        print('myself')\nSelfish()"
    assert nb.ranks(selfish).stdout == "myself\n"
    broken = "class Broken:\n    def __repr__(self):\n        raise ValueError('no words')\nBroken()"
    cell = nb.run(f"%%distributed -n 2\n{broken}")
    assert "no words" in cell.text and "[1" not in cell.stderr + cell.stdout


def test_warnings_and_logging(nb: Notebook) -> None:
    cell = nb.ranks("import warnings, logging\nwarnings.warn('careful')\nlogging.warning('logged')", ONLY_0)
    assert "careful" in cell.stderr and "WARNING:root:logged" in cell.stderr


@pytest.mark.slow
def test_a_silent_cell(nb: Notebook) -> None:
    cell = nb.ranks("time.sleep(40)\nprint('at last', rank)", timeout=80)
    assert (lines_of(0, cell.stdout), cell.stderr) == (["at last 0"], "")


def test_a_rank_has_no_keyboard(nb: Notebook) -> None:
    cell = nb.fails("name = input('who? ')")
    assert cell.error is not None and cell.error[0] == "EOFError"
    assert "ordinary cell" in cell.error[1]
