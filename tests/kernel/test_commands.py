"""`%distributed status | stop | restart | pull | resync | env`, help, and loading and unloading."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.kernel.notebook import Notebook, wait_gone

pytestmark = pytest.mark.kernel


def error_of(nb: Notebook, code: str) -> tuple[str, str]:
    cell = nb.run(code)
    assert cell.error is not None, cell.text
    assert len(cell.traceback.splitlines()) == 1, cell.traceback
    return cell.error[0], cell.error[1]


def pids(nb: Notebook) -> list[int]:
    """Of the ranks, as %distributed status tells them."""
    return [int(pid) for pid in re.findall(r"^ +\d+ +(\d+) ", nb.ok("%distributed status").text, re.M)]


def test_without_ranks(fresh: Notebook) -> None:
    assert fresh.ok("%distributed status").stdout == "no ranks: a %%distributed cell starts them\n"
    assert fresh.ok("%distributed stop").stdout == "no ranks are running\n"
    for code in ("%distributed restart", "%distributed pull x", "%distributed resync"):
        kind, text = error_of(fresh, code)
        assert kind == "NotOnTheRanks" and "%%distributed cell starts them" in text
    assert "no ranks" in fresh.ok("ranks").text
    cell = fresh.run("ranks['x']")
    assert cell.error is not None and cell.error[0] == "NotOnTheRanks"


def test_status(nb: Notebook) -> None:
    nb.ranks("gen = (i for i in range(3))")
    nb.ranks("import torch\nbig = torch.zeros(1 << 20)\nview = big[1:]\nmodel = torch.nn.Linear(300, 300)")
    [data] = nb.ok("%distributed status").data
    shown, page = data["text/plain"], data["text/html"]
    assert re.search(r"^2 ranks on the CPU \(used last\): \d+ cells? run, idle for \d+ s$", shown, re.M), shown
    assert "chosen by -n 2; this machine has no GPU" in shown and "1 thread a rank: OMP_NUM_THREADS=1" in shown
    head, *ranks = [line for line in shown.splitlines() if re.match(r" +(rank|\d+) +(pid|\d+) ", line)]
    assert re.split(r"  +", head.strip()) == ["rank", "pid", "host", "device", "state", "own memory", "shared", "holds"]
    for number, line in enumerate(ranks):
        rank, _, _, device, state, own, shared, holds = re.split(r"  +", line.strip())
        assert (rank, device, state) == (str(number), "cpu", "idle")
        assert own.endswith("MiB") and 4 < float(own.split()[0]) < float(shared.split()[0])
        assert holds.startswith("big 4.0 MiB, view 4.0 MiB, model 353 KiB") and "gen" not in holds
        assert line.index(device) == head.index("device") and line.index(holds) == head.index("holds")
    assert len(ranks) == 2 and page.count("<tr>") == 3 and "<td" in page and "big 4.0 MiB" in page
    assert "only on the ranks: gen" in shown and "`%distributed stop` gives back" in shown


def test_status_while_a_cell_runs_and_after_one_that_could_not_be_stopped(fresh: Notebook, tmp_path: Path) -> None:
    fresh.ranks("pass")
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    code = (
        "import os, time; busy = bytes(1 << 20); dist.barrier()\n"
        f"open({str(begun)!r}, 'w').close()\nwhile not os.path.exists({str(enough)!r}): time.sleep(.02)"
    )
    fresh.ok(
        f"import os, threading, time\ncell = 'import torch.distributed as dist\\n' + {code!r}\n"
        "thread = threading.Thread(target=get_ipython().run_cell_magic, args=('distributed', '-n 2', cell))\n"
        f"thread.start()\nwhile not os.path.exists({str(begun)!r}): time.sleep(.02)\ntime.sleep(.3)"
    )
    cell = fresh.ok("%distributed status")  # it does not wait for the cell, which waits for us
    enough.touch()
    assert len(re.findall(r"running In\[\d+\], line 5 ", cell.text)) == 2 and "busy 1.0 MiB" in cell.text, cell.text
    assert cell.text.startswith("2 ranks on the CPU (used last): 1 cell run, running\n")
    fresh.ok("thread.join()")
    native = "import hashlib\nif rank == 1: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 20_000_000)"
    assert fresh.run(f"%%distributed -n 2\n{native}", stop_after=1.0).status == "error"
    lines = [line for line in fresh.ok("%distributed status").text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert "idle, stopped" in lines[0] and "left running native code, line 3" in lines[1], lines


def test_stop_says_how_much_memory_came_back_and_takes_one_pool(fresh: Notebook) -> None:
    fresh.ranks("import torch\nblock = torch.ones(8 << 20)\nblock = None if rank else block", "-n 2 --no-return")
    fresh.ranks("x = 1", "-n 3")
    assert fresh.ok("%distributed stop -n 5").stdout == (
        "there are no 5 ranks on the CPU; there are 2 ranks on the CPU and 3 ranks on the CPU\n"
    )
    shown = fresh.ok("%distributed stop -n 2").stdout
    assert shown.startswith("ended: 2 ranks on the CPU")
    freed = re.search(r"^memory given back: ([\d.]+) MiB$", shown, re.M)
    assert freed is not None and 32 < float(freed[1]) < 400, shown
    fresh.ranks("x += 1", "-n 3")
    text = fresh.ok("%distributed status").text
    assert "3 ranks on the CPU (used last): 2 cells run" in text and "2 ranks" not in text


def test_stop_and_restart_take_the_same_options_and_check_them_first(fresh: Notebook) -> None:
    fresh.ranks("x = 1", "-n 2")
    fresh.ranks("x = 2", "-n 3")
    before = pids(fresh)
    for command in ("stop", "restart"):
        assert fresh.ok(f"%distributed {command} -n 5").stdout.startswith("there are no 5 ranks on the CPU")
        for wrong, told in [
            ("3", f"%distributed {command} 3: did you mean -n 3"),
            ("-n two", f"%distributed {command} -n two: takes a number"),
            ("--timeout 3", f"%distributed {command} --timeout 3: takes -n, --gpus or --cpus"),
            ("--fresh", f"%distributed {command} --fresh: takes -n, --gpus or --cpus"),
        ]:
            kind, text = error_of(fresh, f"%distributed {command} {wrong}")
            assert kind == "OptionError" and text.startswith(told), text
    assert pids(fresh) == before
    shown = fresh.ok("%distributed restart -n 2").stdout
    assert shown.count("restarted") == 1 and "restarted: 2 ranks on the CPU" in shown
    after = pids(fresh)
    assert after[2:] == before[2:] and not set(after[:2]) & set(before)


def test_what_a_cell_left_in_native_code_had_made_is_named_when_its_ranks_go(fresh: Notebook) -> None:
    fresh.ok("losses, w, const, hidden = [1], 1, 5, []\ndef step(): hidden.append(1)")
    fresh.ranks("pass")
    code = "losses.append(2); w += 1; new = const; gen = (i for i in ()); step()\nprint('in')\nsum(range(10**12))"
    cell = fresh.run(f"%%distributed -n 2\n{code}", stop_when=lambda cell: "in" in cell.stdout)
    assert "It goes on" in cell.text
    shown = fresh.ok("%distributed restart").stdout
    assert "set or may have changed did not come back: gen, hidden, losses, new, w." in shown, shown
    assert fresh.value("(losses, w, hidden)") == ([1], 1, [])
    assert "did not come back" not in fresh.ok("%distributed restart").stdout


@pytest.mark.parametrize("command", ["stop", "restart"])
def test_ranks_that_another_thread_ends_while_a_cell_runs(fresh: Notebook, command: str) -> None:
    """The cell is stopped first, and says what happened; the next one runs."""
    fresh.ok("made = []\nimport threading, time, os\nmain = get_ipython().run_line_magic")
    fresh.ranks("pass")
    fresh.ok(
        "def later():\n    while not os.path.exists(flag): time.sleep(0.05)\n"
        f"    main('distributed', '{command}')\n"
        "import tempfile\nflag = tempfile.mkdtemp() + '/there'\n"
        "thread = threading.Thread(target=later)\nthread.start()"
    )
    cell = fresh.run("%%distributed -n 2\nmade.append(1)\nopen(flag, 'w').close()\nwhile True: time.sleep(0.01)")
    assert cell.error is not None and cell.error[0] == "RanksEnded", cell.text
    assert f"ended by `%distributed {command}` in another thread" in cell.error[1]
    assert len(cell.traceback.splitlines()) == 2 and "had made until then is in the notebook" in cell.traceback
    fresh.ok("thread.join(20); assert not thread.is_alive()")
    assert fresh.value("made") == [1]
    text = fresh.ok("%distributed status").text
    assert text.startswith("no ranks") if command == "stop" else "0 cells run, idle for" in text, text
    fresh.ranks("made.append(2)")
    assert fresh.value("made") == [1, 2]


def test_env_is_a_report_to_paste_without_torch_in_the_kernel() -> None:
    secrets = {"GLOO_TOKEN": "sesame", "TORCH_HOME": "https://me:sesame@host/x", "OTHER": "nobody asked"}
    with Notebook({**secrets, "NCCL_DEBUG": "INFO"}) as nb:
        nb.ok("%load_ext nbdist")
        nb.ranks("x = rank", "-n 3")
        shown = nb.ok("%distributed env").stdout
        assert nb.value("'torch' in __import__('sys').modules") is False
    for part in (
        r"^  python +3\.", r"^  torch +\d\S*, built for the CPU", r"^  ipykernel +\d", r"^  backends +.*gloo",
        r"^  GPUs +no GPU for ranks: this machine has no GPU", r"^  precision +bf16 on the CPU", r"^  memory +\d.*GiB",
        r"^  open files +\d", r"^  /dev/shm +", r"^  NCCL_DEBUG +INFO$", r"^  GLOO_TOKEN +\(set, not shown\)$",
        r"^  TORCH_HOME +https://\.\.\.@host/x$", r"^  runs on +\d+ ranks? on the CPU: this machine has no GPU; \d",
        r"^  threads +1 a rank: OMP_NUM_THREADS=1$", r"^  supervisor +pid \d+, alive$",
        r"^  3 ranks on the CPU  pids \d+, \d+, \d+, 1 cells? run; chosen by -n 3; this machine has no GPU$",
    ):  # fmt: skip
        assert re.search(part, shown, re.M), (part, shown)
    assert "sesame" not in shown and "nobody asked" not in shown


def test_restart_and_stop(nb: Notebook) -> None:
    nb.ok("kept = [1]")
    nb.ranks("held = (i for i in range(3))\nkept.append(2)")
    old = pids(nb)
    shown = nb.ok("%distributed restart").stdout
    assert "restarted: 2 ranks on the CPU" in shown and "held" in shown
    new = pids(nb)
    assert len(new) == 2 and not set(new) & set(old)
    nb.ranks("kept.append(3)")
    assert nb.value("kept") == [1, 2, 3] and pids(nb) == new
    below = [process for process in nb.processes() if process.pid in new]
    assert "ended: 2 ranks on the CPU" in nb.ok("%distributed stop").stdout
    assert wait_gone(below, 2.0) == []
    assert nb.ok("%distributed status").stdout.startswith("no ranks")
    nb.ranks("kept.append(4)")
    assert nb.value("kept") == [1, 2, 3, 4]


def test_pull(nb: Notebook) -> None:
    nb.ok("pulled = [1]")
    nb.ranks("gen2 = (i for i in range(3))\npulled.append(2)\nunseen = 5", "-n 2 --no-return")
    assert nb.value("pulled") == [1]
    nb.ok("%distributed pull unseen")
    assert nb.value("unseen") == 5
    nb.ranks("gen2 = (i for i in range(3))")
    assert "gen2 cannot come home" in nb.ok("%distributed pull gen2").stdout
    kind, text = error_of(nb, "%distributed pull no_such")
    assert kind == "NameError" and "'no_such'" in text
    assert "takes one name" in error_of(nb, "%distributed pull a b")[1]
    assert "takes one name" in error_of(nb, "%distributed pull")[1]


def test_resync(nb: Notebook) -> None:
    nb.ranks(
        "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.weight.data.fill_(rank)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)\nmodel(torch.ones(1)).sum().backward()\n"
        "opt.step()\nstep = 10 + rank\nw = torch.full((3,), float(rank))"
    )
    assert nb.value("len(set(ranks['step']))") == 2
    shown = nb.ok("%distributed resync").stdout
    assert "rank 0's values are on every rank now" in shown and "model" in shown and "step" in shown
    nb.ranks("seen = (model.weight.item(), step, w.tolist())")
    assert nb.value("len(set(map(repr, ranks['seen'])))") == 1
    assert nb.value("seen == (model.weight.item(), 10, [0., 0., 0.])")


def test_unknown_command(nb: Notebook) -> None:
    kind, text = error_of(nb, "%distributed restrat")
    assert kind == "OptionError" and "did you mean restart" in text
    assert "status, stop, restart, pull, resync" in error_of(nb, "%distributed")[1]
    assert "%distributed -n: takes one of" in error_of(nb, "%distributed -n 2")[1]


def test_help(nb: Notebook) -> None:
    for code in ("%%distributed?", "?%%distributed", "%distributed?"):
        cell = nb.ok(code)
        page = "".join(part["data"]["text/plain"] for part in cell.payload if part.get("source") == "page")
        assert "--timeout S" in page or "resync" in page, page


def test_loading_twice(nb: Notebook) -> None:
    nb.ranks("mine = rank")
    before = pids(nb)
    nb.ok("%load_ext nbdist")
    assert pids(nb) == before
    nb.ok("%reload_ext nbdist")
    nb.ranks("mine = rank + 1")
    assert nb.value("list(ranks['mine'])") == [1, 2]


def test_unloading_ends_everything(fresh: Notebook) -> None:
    fresh.ranks("x = rank\nimport subprocess\n_child = subprocess.Popen(['sleep', '100'])")
    fresh.ranks("y = rank", "-n 3")
    below = fresh.processes()
    assert len(below) >= 6
    fresh.ok("%unload_ext nbdist")
    assert wait_gone(below, 5.0) == []
    assert fresh.value("('ranks' in globals(), x)") == (False, 0)
    cell = fresh.run("%%distributed -n 2\n1")
    assert "distributed" in cell.text and "not found" in cell.text
    fresh.ok("%load_ext nbdist")
    fresh.ranks("x += 5")
    assert fresh.value("x") == 5


def test_the_notebooks_own_name_ranks_is_left(fresh: Notebook) -> None:
    fresh.ok("ranks = 'mine'\n%reload_ext nbdist")
    fresh.ranks("seen = ranks")
    assert fresh.value("(ranks, seen)") == ("mine", "mine")


def test_torch_is_not_imported_in_the_kernel(fresh: Notebook) -> None:
    fresh.ranks("import os\nplain = [rank]")
    assert fresh.value("('torch' in __import__('sys').modules, plain)") == (False, [0])


def test_status_of_ranks_that_are_suspended_or_have_ended(fresh: Notebook) -> None:
    fresh.ranks("x = rank")
    first, second = pids(fresh)
    os.kill(second, signal.SIGSTOP)
    try:
        cell = fresh.ok("%distributed status")
        assert re.search(rf"^ +1 +{second} .* suspended ", cell.text, re.M), cell.text
    finally:
        os.kill(second, signal.SIGCONT)
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
    wait_gone([process for process in fresh.processes() if process.pid in (first, second)], 5.0)
    shown = fresh.ok("%distributed status").text
    assert len(re.findall(r" ended$", shown, re.M)) == 2 and "the next %%distributed cell starts new ones" in shown
    assert fresh.ok("%distributed stop").stdout.startswith("ended: 2 ranks on the CPU")


def test_what_a_stop_of_a_command_leaves(nb: Notebook) -> None:
    nb.ranks("import time\nclass Slow:\n    def __reduce__(self):\n        time.sleep(1.5)\n        return (int, (7,))")
    nb.ranks("_slow = Slow()", "-n 2 --no-return")
    cell = nb.run("ranks['_slow']", stop_after=0.3)
    assert cell.error is not None
    assert cell.error[:2] == (
        "KeyboardInterrupt",
        "stopped while '_slow' was read from the ranks: nothing has changed",
    ), cell.text
    assert nb.value("ranks[1]['_slow']") == 7
    cell = nb.run("%distributed pull _slow", stop_after=0.3)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert re.match(
        "stopped: '_slow' stays|Stop came when '_slow' had come home|stopped: the notebook's", cell.error[1]
    )
    cell = nb.run("%distributed restart", stop_after=0.05)
    if cell.error is not None:  # it may have been done before
        assert cell.error[0] == "KeyboardInterrupt" and re.match("stopped: the 2 ranks", cell.error[1]), cell.text
    assert nb.ranks("print('on')").stdout == "on\n"
