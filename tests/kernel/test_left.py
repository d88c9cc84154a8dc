"""A rank that has ended the cell cannot come any more: who waits for it is told so at once, and nobody else is."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import END_LIMIT, magic, works

pytestmark = pytest.mark.kernel

READY = """
from nbdist import Accelerator
accelerator = Accelerator()
bare = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
"""


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ("--ranks 0", "accelerator.gather(torch.ones(1))", "rank 0 is in gather at cell line 3; this needs rank 1 too"),
        ("--ranks 1", "accelerator.prepare(torch.nn.Linear(2, 1))", "rank 1 is in prepare at cell line 3; this needs"),
        (
            "",
            "for step in range(9):\n"
            "    if rank == 1 and step == 3: break\n"
            "    accelerator.backward(model(torch.ones(1, 2)).mean())\n"
            "    optimizer.step(); optimizer.zero_grad()",
            "rank 0 is in backward at cell line 5; rank 1 has finished the cell",
        ),
        ("", "accelerator.on_main_process(accelerator.wait_for_everyone)()", "rank 0 is in wait_for_everyone at cell"),
        ("", "if rank == 1: dist.all_reduce(torch.ones(1))", "rank 1 is in all_reduce at cell line 3; rank 0 has fin"),
    ],
)
def test_who_waits_for_it_is_told_at_once(nb: Notebook, options: str, code: str, told: str) -> None:
    nb.ok(magic(READY, 2))
    cell = nb.run(magic(code, 2, options))
    assert cell.error is not None and cell.error[0] == "RanksWaitForEachOther", cell.text
    assert told in cell.error[1], cell.text
    assert cell.seconds < END_LIMIT  # the figure is 2
    works(nb, 2)


def test_a_bar_and_workers_do_not_hide_it(nb: Notebook) -> None:
    """They leave threads behind, which begin no collective."""
    code = """
import tqdm, concurrent.futures
bar = tqdm.tqdm(range(1))
pool = concurrent.futures.ThreadPoolExecutor()
pool.submit(abs, 1).result()
print(threading.active_count() > 4)
if rank == 1: dist.all_reduce(torch.ones(1))
"""
    cell = nb.run(magic(code, 2))
    assert "True" in cell.stdout and cell.error is not None and cell.error[0] == "RanksWaitForEachOther", cell.text
    assert cell.seconds < END_LIMIT
    nb.ok(magic("pool.shutdown()", 2))


def test_nobody_else_is(nb: Notebook) -> None:
    """At once: rank 2 has left, and the others are busy without it, or with what it has begun before."""
    code = """
without = dist.new_group([0, 1])
begun = dist.all_reduce(torch.ones(3), async_op=True)
if rank == 0: time.sleep(2.5)
if rank < 2: dist.barrier(without)
if rank == 1: dist.send(torch.ones(1), 0)
if rank == 0:
    time.sleep(0.1)
    dist.recv(torch.ones(1), 1)
    begun.wait()
    print("met")
"""
    assert nb.ok(magic(code, 3)).stdout == "met\n"


@pytest.mark.parametrize(
    "thread",
    ["threading.Timer(2.5, dist.barrier)", "threading.Thread(target=lambda: time.sleep(2.5) or dist.barrier())"],
)
def test_a_thread_may_still_come(nb: Notebook, thread: str) -> None:
    code = f"""
if rank == 1: {thread}.start()
else:
    dist.barrier()
    print("met")
"""
    assert nb.ok(magic(code, 2)).stdout == "met\n"
