"""The stop button, pressed while four ranks are in every kind of trouble: the cell is back, and the ranks go on.

After each Stop: the same processes with the same namespace, and the next cell's collectives, an earlier subgroup, a
DeviceMesh and a DistributedDataParallel made before still work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.notebook import Cell, Notebook
from tests.kernel.trouble import HERE, IMPORTS, SLOW_DATA, all_here, magic, was_stopped, works

pytestmark = pytest.mark.kernel

RANKS = 4

SETUP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
me = os.getpid()
sub = dist.new_group([0, 1])
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
"""

CHECK = """
assert me == os.getpid(), "another process"
value = torch.ones(2) * (rank + 1)
dist.all_reduce(value)
assert value.tolist() == [10.0, 10.0], value
if rank < 2:
    value = torch.ones(2)
    dist.all_reduce(value, group=sub)
    assert value.tolist() == [2.0, 2.0], value
for name in ("a", "b"):
    value = torch.ones(2)
    dist.all_reduce(value, group=mesh.get_group(name))
    assert value.tolist() == [2.0, 2.0], value
ddp.zero_grad()
ddp(torch.ones(1, 4) * (rank + 1)).sum().backward()
assert ddp.module.weight.grad.tolist() == [[2.5] * 4] * 4, ddp.module.weight.grad
print("fine", "abcdefgh"[rank])
"""

# Where ranks are when Stop is pressed. All of them keep their processes and their namespace.
KEPT = {
    "a python loop": HERE + "while True: pass",
    "a2 loop of all_reduce": HERE + "value = torch.zeros(10)\nwhile True: dist.all_reduce(value)",
    "a3 loop of all_reduce, some ahead": HERE
    + """
import random
import time
value, count = torch.zeros(10), 0
while True:
    if rank == 0: time.sleep(random.random() * 0.01)
    work = dist.all_reduce(value, async_op=True)
    count += 1
    if count % 50 == 0: work.wait()
""",
    "b time.sleep": HERE + "time.sleep(60)",
    "c chain of matmuls": HERE + "a = torch.randn(600, 600)\nfor _ in range(10**6): a = a @ a / 600",
    "d all but one in all_reduce": HERE + "dist.all_reduce(torch.ones(4)) if rank else time.sleep(60)",
    "e recv in a circle": HERE + f"dist.recv(torch.ones(4), (rank + 1) % {RANKS})",
    "e2 all_reduce against all_gather": HERE
    + f"""
value = torch.ones(4)
if rank % 2: dist.all_reduce(value)
else: dist.all_gather([torch.ones(4) for _ in range({RANKS})], value)
dist.recv(value, (rank + 1) % {RANKS})
""",
    "e3 in the backward of DDP": HERE
    + "loss = ddp(torch.ones(2, 4)).sum()\nloss.backward() if rank else time.sleep(60)",
    "f DataLoader workers": SLOW_DATA
    + "for batch in DataLoader(Slow(0.02), batch_size=4, num_workers=1): print('here', 'abcdefgh'[rank])",
    "f2 worker stuck in one item": SLOW_DATA
    + HERE
    + "for batch in DataLoader(Slow(1000), batch_size=4, num_workers=1): pass",
    "g subprocess.run": HERE + "subprocess.run(['sleep', '1000'])",
    "g2 os.system": HERE + "os.system('sleep 1000')",
    "g3 a shell escape": HERE + "!sleep 1000",
    "h lock taken twice": "lock = threading.Lock()\nlock.acquire()\n" + HERE + "lock.acquire()",
    "h2 Event.wait": HERE + "threading.Event().wait()",
    "i store.get": HERE
    + "dist.distributed_c10d._get_default_store().get('no such key') if rank != 1 else time.sleep(60)",
    "i2 barrier": HERE + "dist.barrier() if rank else time.sleep(60)",
    "i3 monitored_barrier": HERE + "dist.monitored_barrier() if rank else time.sleep(60)",
    "i4 new_group on one rank only": HERE + f"dist.new_group(range({RANKS})) if rank == 2 else time.sleep(60)",
    "i5 barrier, recv and a large send": HERE
    + """
if rank == 0: dist.barrier()
elif rank == 1: dist.recv(torch.ones(4), 0)
elif rank == 2: dist.send(torch.ones(10_000_000), 3)
else: time.sleep(60)
""",
    "j KeyboardInterrupt swallowed": HERE + "while True:\n    try: time.sleep(0.1)\n    except KeyboardInterrupt: pass",
    "k BaseException swallowed": HERE + "while True:\n    try: time.sleep(0.1)\n    except BaseException: pass",
    "k2 swallowed in a function": """
def swallow():
    while True:
        try: time.sleep(0.05)
        except BaseException: continue
"""
    + HERE
    + "swallow()",
    "k3 SIGINT and SIGUSR1 ignored": "for it in (signal.SIGINT, signal.SIGUSR1): signal.signal(it, signal.SIG_IGN)\n"
    + HERE
    + "time.sleep(60)",
    "k4 sleep in finally": "try:\n    " + HERE.strip() + "\n    time.sleep(60)\nfinally: time.sleep(60)",
    "k5 swallowed around a collective": HERE
    + """
while True:
    try: dist.barrier() if rank else time.sleep(60)
    except BaseException: pass
""",
    "k6 swallowed, and the first hard signal lost": """
def losing():
    from nbdist.shipping.wire import HARD_SIGNAL
    usual, came = signal.getsignal(HARD_SIGNAL), []
    signal.signal(HARD_SIGNAL, lambda *what: usual(*what) if came else came.append(what))
    while True:
        try: time.sleep(60)
        except BaseException: pass
"""
    + HERE
    + "losing()",
    "l flood of prints": HERE + "while True: print('x' * 200)",
    "l2 flood of raw writes": HERE + "line = b'y' * 999 + b'\\n'\nwhile True: os.write(1, line)",
    "m top-level await": "import asyncio\n" + HERE + "await asyncio.sleep(60)",
    "n --ranks, the others idle": HERE + "time.sleep(60)",
}


whole: set[str] = set()  # marks of notebooks whose ranks were found fine, and nothing ran on them since


@pytest.fixture
def four(nb: Notebook) -> Notebook:
    """Ranks with what SETUP makes: those of the last test where it left them fine, so that one failure stays one."""
    if nb.mark not in whole:
        nb.ok("%distributed stop")
        nb.ok(magic(SETUP, RANKS))
    whole.discard(nb.mark)
    return nb


def still_fine(notebook: Notebook) -> Cell:
    """The next cell finds the same ranks with everything that they had, and in step."""
    cell = notebook.ok(magic(CHECK, RANKS))
    assert all(f"fine {letter}" in cell.stdout for letter in "abcdefgh"[:RANKS]), cell.text
    whole.add(notebook.mark)
    return cell


@pytest.mark.parametrize("where", KEPT)
def test_ranks_are_kept(four: Notebook, where: str) -> None:
    """Every row of the table: back in time, and all is as before."""
    some = where.startswith("n ")
    options, here = (
        ("--ranks 0,2", lambda cell: "here a" in cell.stdout and "here c" in cell.stdout)
        if some
        else ("", all_here(RANKS))
    )
    cell = four.run(magic(KEPT[where], RANKS, options), stop_after=0.2, stop_when=here)
    was_stopped(cell)
    still_fine(four)


def seconds_of_svd(notebook: Notebook, seconds: float) -> int:
    """The size of a matrix whose SVD takes about so long here."""
    cell = notebook.ok(
        f"%%distributed -n {RANKS} --ranks 1\n{IMPORTS}a = torch.randn(500, 500)\nstart = time.perf_counter()\n"
        "torch.linalg.svd(a)\nprint('took', time.perf_counter() - start)"
    )
    took = float(cell.stdout.split("took")[1].split()[0])
    return int(500 * (seconds / took) ** (1 / 3))


def grace(notebook: Notebook, seconds: float) -> None:
    """How long the next cell waits for a rank that is still in a native call."""
    notebook.ok(f"import nbdist.launchers.settling\nnbdist.launchers.settling.settle.__defaults__ = ({seconds},)")


@pytest.fixture
def patient(four: Notebook) -> Iterator[Notebook]:
    """The next cell waits as long as it takes: how long a native call needs on a busy machine nobody knows."""
    grace(four, 50.0)
    yield four
    grace(four, 8.0)


def test_a_native_call_is_left_and_waited_for(patient: Notebook) -> None:
    """c2: Stop does not wait for it, and the next cell does; nothing is lost, results included."""
    size = seconds_of_svd(patient, 6.0)
    code = f"early = 'from {size}'\na = torch.randn({size}, {size})\n{HERE}"
    code += "torch.linalg.svd(a) if rank == 0 else time.sleep(60)"
    cell = patient.run(magic(code, RANKS), stop_after=0.1, stop_when=all_here(RANKS))
    was_stopped(cell)
    assert cell.error is not None
    assert "rank 0 is" in cell.error[1]
    assert "native code" in cell.error[1]
    still_fine(patient)
    assert patient.value("early") == f"from {size}"


# A native call that nothing interrupts, and that ends when a file is there: a lock that its own thread has taken.
NATIVE = """
def native(until):
    import ctypes
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    def open_it():
        while not os.path.exists(until): time.sleep(0.02)
        libc.pthread_mutex_unlock(lock)
    libc.pthread_mutex_lock(lock)
    threading.Thread(target=open_it, daemon=True).start()
    libc.pthread_mutex_lock(lock)
"""


def test_stop_again_while_the_next_cell_waits(patient: Notebook, tmp_path: Path) -> None:
    """The wait for a native call can be stopped too, and still nothing is lost."""
    enough = tmp_path / "enough"
    code = f"{NATIVE}{HERE}native({str(enough)!r}) if rank == 1 else time.sleep(60)"
    was_stopped(patient.run(magic(code, RANKS), stop_after=0.1, stop_when=all_here(RANKS)))
    cell = patient.run(magic("print('ran')", RANKS), stop_after=0.1, stop_when=lambda cell: "waiting" in cell.stderr)
    was_stopped(cell)
    assert "ran" not in cell.stdout.replace("traceback", "")
    enough.touch()
    still_fine(patient)


@pytest.mark.parametrize(("where", "until"), [("i2 barrier", 0.2), ("k2 swallowed in a function", 0.6)])
def test_an_impatient_user(four: Notebook, where: str, until: float) -> None:
    """Stop pressed again and again while the first is being carried out (it takes longer than that in both rows)."""
    presses = [until * part / 10 for part in range(11)]
    cell = four.run(magic(KEPT[where], RANKS), stop_after=presses, stop_when=all_here(RANKS))
    was_stopped(cell)
    still_fine(four)


FORGET = """
import gc
from nbdist.worker.groups import Groups
next(it for it in gc.get_objects() if type(it) is Groups)._noted.clear()
"""


@pytest.mark.parametrize("when", ["at the Stop", "by the next cell"])
def test_connections_that_no_rank_has_noted(four: Notebook, when: str) -> None:
    """They are found by having both ends in ranks; by the next cell, where the ranks had no time to answer before."""
    limit = "__import__('nbdist.launchers.stopping', fromlist=['x']).FOR_AN_ANSWER"
    usual = four.value(limit)
    if when == "by the next cell":
        four.ok(f"{limit} = -1.0")
    cell = four.run(magic(FORGET + KEPT["i2 barrier"], RANKS), stop_after=0.1, stop_when=all_here(RANKS))
    four.ok(f"{limit} = {usual}")
    was_stopped(cell)
    assert cell.error is not None
    assert ("rank 1 is" in cell.error[1]) is (when == "by the next cell"), cell.text
    assert not still_fine(four).stderr


def test_a_gloo_that_was_told_to_connect_late(fresh: Notebook) -> None:
    """A rank that waits in its first collective until another one connects to it has no connection to cut."""
    fresh.ok("import os\nos.environ['TORCH_GLOO_LAZY_INIT'] = '1'")
    for _ in range(2):
        cell = fresh.run(magic(KEPT["i2 barrier"], 2), stop_after=0.1, stop_when=all_here(2))
        was_stopped(cell)
        assert cell.error is not None and "native code" not in cell.error[1]
        assert not fresh.ok(magic("dist.barrier()", 2)).stderr


def test_code_that_stops_itself_is_not_ours(four: Notebook) -> None:
    """A KeyboardInterrupt that the cell raised by itself is shown with its place, as any other exception."""
    cell = four.run(magic("if rank == 1: raise KeyboardInterrupt('mine')\ndist.barrier()", RANKS))
    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    assert "mine" in cell.error[1]
    assert "rank 1" in cell.text
    still_fine(four)


@pytest.mark.parametrize("others", [True, False])
def test_a_cell_that_handles_the_stop_itself_ends_as_an_ordinary_one(four: Notebook, others: bool) -> None:
    who = "True" if others else "rank == 1"
    cell = four.run(
        "%%distributed -n 4\nimport time\nhandled = False\nprint('running')\n"
        "try:\n    while True:\n        time.sleep(.01)\n"
        f"except KeyboardInterrupt:\n    if not {who}:\n        raise\n    handled = True\nhandled",
        stop_when=lambda cell: "running" in cell.stdout,
        stop_after=0.2,
    )
    if others:
        assert cell.error is None and cell.results == [{"text/plain": "True"}], cell.text
    else:
        assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
        assert "the cell handled it and ran to its end on rank 1, and not on the others" in cell.error[1]
    assert four.ranks("print('next')", "-n 4 --output rank0").stdout == "next\n"


def test_a_stop_just_after_a_rank_has_failed_tells_of_that(nb: Notebook) -> None:
    cell = nb.run(
        "%%distributed -n 2\nimport time\nprint('x')\nif rank:\n    time.sleep(.4)\n    raise KeyError('mine')\n"
        "time.sleep(5)",
        stop_when=lambda cell: "x" in cell.stdout,
        stop_after=0.45,
    )
    assert cell.error is not None and "mine" in cell.error[1], cell.text
    assert "a step apart" not in cell.text  # nothing was trained


def test_random_stops_of_collectives(four: Notebook) -> None:
    """Stops at random moments of a loop that uses every group, one after the other: all of them heal."""
    chance = random.Random(5)
    code = HERE + "while True:\n    " + CHECK.replace("\n", "\n    ").replace('print("fine", "abcdefgh"[rank])', "")
    for _ in range(6):
        cell = four.run(magic(code, RANKS), stop_after=chance.uniform(0, 0.4), stop_when=all_here(RANKS))
        was_stopped(cell)
        still_fine(four)


def test_stop_while_things_travel(four: Notebook) -> None:
    """Stop at random moments of sending and taking over: the next cell has the right values on every rank."""
    chance = random.Random(6)
    four.ok("things = [{'number': i, 'text': str(i) * 3} for i in range(40_000)]")
    for number in range(8):
        four.ok(f"things[7]['number'] = {number}\nthings.append({number})")
        code = f"things[8]['number'] = {number}\nmade = list(map(str, things))\ntime.sleep(60)"
        was_stopped(four.run(magic(code, RANKS), stop_after=chance.uniform(0, 0.5)))
        code = (
            "print('sum', 'abcdefgh'[rank], things[7]['number'], things[-1], len(things), things[39_999]['text'][:5])"
        )
        cell = four.ok(magic(code, RANKS))
        for letter in "abcdefgh"[:RANKS]:
            assert f"sum {letter} {number} {number} {40_001 + number} 39999" in cell.stdout, cell.text
    still_fine(four)


def test_stop_while_results_come_back(four: Notebook, tmp_path: Path) -> None:
    """Stop when the code has ended and its results are on their way, which takes a while: they are there or not, and
    ranks and notebook go on with the same values.
    """
    chance = random.Random(8)
    four.ok("kept = [[]]")
    for number in range(3):
        ended = tmp_path / str(number)
        code = f"""
kept[0].append({number})
class Slow:  # to pack: a second for all
    def __getstate__(self):
        time.sleep(0.02)
        return self.__dict__
made = [Slow() for _ in range(50)]
if rank == 0: open({str(ended)!r}, "w").close()
"""
        was_stopped(
            four.run(
                magic(code, RANKS), stop_after=chance.uniform(0, 0.2), stop_when=lambda _, ended=ended: ended.exists()
            )
        )
        cell = four.ok(magic("print('kept', 'abcdefgh'[rank], kept[0])", RANKS))
        shown = {line.split("kept")[1][3:] for line in cell.stdout.splitlines() if "kept" in line}
        assert len(shown) == 1, cell.text
        assert shown == {four.value("str(kept[0])")}, cell.text
    four.ok("kept = made = Slow = None")
    still_fine(four)


# ---------------------------------------------------------------- ranks that must be replaced: last, it costs the state


REPLACED = {
    "c3 svd for long": "torch.linalg.svd(big) if rank == 1 else time.sleep(60)",
    "c4 a C call that holds the interpreter": """
import itertools
sum(itertools.repeat(1, 10**12)) if rank == 1 else time.sleep(60)
""",
    "d2 peers in all_reduce, one in svd": "dist.all_reduce(torch.ones(4)) if rank else torch.linalg.svd(big)",
    "k6 our own signal ignored too": """
for number in (signal.SIGINT, signal.SIGUSR1, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)):
    signal.signal(number, signal.SIG_IGN)
end = time.monotonic() + 60
while time.monotonic() < end: time.sleep(0.1)
""",
}


@pytest.mark.parametrize("where", REPLACED)
def test_ranks_are_replaced(four: Notebook, where: str) -> None:
    """What nothing can interrupt is left alone, and ended only when the next cell needs the ranks; that is said."""
    # the limit of 8 s that the first of these has is shortened for the others: 8 s are a choice
    seconds = 8.0 if where.startswith("c3") else 1.5
    grace(four, seconds)
    before = four.value("list(ranks['me'])")
    code = "big = torch.randn(6000, 6000)\n" + HERE + REPLACED[where] + "\n"
    cell = four.run(magic(code, RANKS, "--no-return"), stop_after=0.3, stop_when=all_here(RANKS))
    was_stopped(cell)
    cell = four.ok(magic("me = os.getpid()\nvalue = torch.ones(1)\ndist.all_reduce(value)\nprint(value.item())", RANKS))
    assert "4.0" in cell.stdout
    assert f"still busy after {seconds:g} s" in cell.stderr, cell.text
    assert "new ranks" in cell.stderr
    gone = cell.stderr.split("Gone with the old ones: ")[1].split(";")[0].split(", ")
    assert {"mesh", "sub"} <= set(gone)
    assert "ddp" not in gone  # the notebook has the model
    after = four.value("list(ranks['me'])")
    assert len(set(before) | set(after)) == 2 * RANKS


def test_stop_while_ranks_start(nb: Notebook) -> None:
    """Stop at any moment of a start: the next cell has the right number of ranks, and no others live."""
    chance = random.Random(7)
    nb.ok("from nbdist.magics import _sessions\npools = next(iter(_sessions.values())).pools.values()")
    for _ in range(10):
        nb.ok("%distributed stop")
        was_stopped(nb.run(magic("time.sleep(60)", RANKS), stop_after=chance.uniform(0, 0.35)))
        pids = works(nb, RANKS)
        assert len(set(pids)) == RANKS
        assert nb.value("[pool.pids for pool in pools if pool.pids]") == [pids]
        rank = next(process for process in nb.processes() if process.pid in pids)
        end = time.monotonic() + 5
        while {sibling.pid for sibling in rank.parent().children()} != set(pids):
            others = [process for process in rank.parent().children() if process.pid not in pids]
            assert time.monotonic() < end, f"processes of a start that was stopped live on: {others}"
            time.sleep(0.05)


def test_stop_while_everything_warms(fresh: Notebook) -> None:
    """The first cell of all waits until the supervisor has imported torch: that can be stopped too."""
    for _ in range(2):
        was_stopped(fresh.run(magic("time.sleep(60)", 2), stop_after=0.1))
    assert len(works(fresh, 2)) == 2


# ---------------------------------------------------------------- floods, and Stop when the code has ended


@pytest.mark.parametrize("code", ["while True: print(rank)", "while True: print(rank, flush=True)"])
@pytest.mark.parametrize("pressed_after", [0.4, 2.0])
def test_stop_while_every_rank_prints_in_a_loop(nb: Notebook, code: str, pressed_after: float) -> None:
    """Thousands of tiny records a second: the button does not wait behind them."""
    nb.ok("%%distributed -n 2\npass")
    cell = nb.run(f"%%distributed -n 2\n{code}", stop_after=pressed_after)
    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.stop_seconds is not None
    assert cell.stop_seconds < 5
    assert nb.ok("%%distributed -n 2\nprint('next')").stdout == "next\n"


def test_a_timeout_while_every_rank_prints_in_a_loop(nb: Notebook) -> None:
    nb.ok("%%distributed -n 2\npass")
    cell = nb.run("%%distributed -n 2 --timeout 1\nwhile True: print(rank)")
    assert cell.error is not None
    assert cell.error[0] == "CellTimeout"
    assert cell.seconds < 8


# Packing and taking in last so long on any machine that every press below meets one of them, and none meets ipykernel
# behind the cell, which would lose its reply.
UNHURRIED = """
import time
class Unhurried:
    def __getstate__(self):
        time.sleep(0.06)
        return {"made": True}
    def __setstate__(self, state):
        time.sleep(0.15)
        vars(self).update(state)
"""


def test_stop_while_results_are_packed_or_taken_in(nb: Notebook) -> None:
    """The next cell is not hit by what stopped this one, and sees what this one did."""
    nb.ok("import torch\nx = torch.zeros(30_000_000)" + UNHURRIED)
    for number in range(1, 7):
        cell = nb.run(
            "%%distributed -n 2\nx.add_(1)\nunhurried = Unhurried()\nprint('ran')",
            stop_when=lambda cell: "ran" in cell.stdout,
            stop_after=0.02 * number,
        )
        assert cell.error is None or cell.error[0] == "KeyboardInterrupt", cell.text
        if cell.error is not None:
            assert "before the cell started" not in cell.text
        nb.ok("%%distributed -n 2\ny = 5\nseen = x[0].item()")
        assert nb.value("(seen, x[0].item())") == (number, number)


SLOW = """
import time
class Slow:
    n = 0
    def __getstate__(self):
        time.sleep(self.seconds)
        return self.__dict__
slow, small, kept = Slow(), 0, []
slow.seconds = 0.0
"""


def test_an_error_does_not_cut_off_what_is_being_packed(nb: Notebook) -> None:
    """Rank 1 has failed and is done; rank 0 takes its time to pack what it made before it failed as well."""
    nb.ok(SLOW)
    body = "slow.n += 1; slow.seconds = 1.5 if rank == 0 else 0.0; small = 3; kept.append(2)\nraise ValueError('typo')"
    cell = nb.run(magic(body, 2))
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert nb.value("(slow.n, small, kept)") == (1, 3, [2])


def test_a_stop_leaves_time_to_pack(nb: Notebook) -> None:
    nb.ok(SLOW)
    cell = nb.run(
        magic("slow.seconds = 2.0 if rank == 0 else 0.0\nprint('here', flush=True)\nwhile True:\n    slow.n += 1", 2),
        stop_after=0.1,
        stop_when=lambda cell: "here" in cell.stdout,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert nb.value("slow.n") > 0
    assert "on its way" in cell.stderr


def test_a_stop_while_results_are_packed_leaves_them_on_the_ranks(nb: Notebook) -> None:
    """They are there for the next cell, can be pulled, and nothing of the notebook's is taken for the ranks'."""
    nb.ok(SLOW)
    nb.ok(magic("slow", 2))
    cell = nb.run(
        magic("slow.n = 5; slow.seconds = 30.0; small = 3; new = 7; kept.append(2)\nprint('here', flush=True)", 2),
        stop_after=0.5,
        stop_when=lambda cell: "here" in cell.stdout,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt" and cell.seconds < 30
    assert "left on the ranks" in cell.stderr and "pull" in cell.stderr
    assert nb.value("(slow.n, small, kept, 'new' in globals())") == (0, 0, [], False)
    assert nb.ok(magic("slow.seconds = 0.0\nprint(slow.n, small, new, kept)", 2)).stdout == "5 3 7 [2]\n"
    assert nb.value("(slow.n, kept)") == (5, [2])
    nb.ok("%distributed pull new\n%distributed pull small")
    assert nb.value("(new, small)") == (7, 3)
    bound = "__import__('nbdist.magics', fromlist=['_sessions'])._sessions"
    assert nb.value(f"'ranks' in next(iter({bound}.values())).last.home._bound") is False
