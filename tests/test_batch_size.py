"""find_executable_batch_size: all ranks try again together, and nothing that failed stays in memory."""

from __future__ import annotations

import contextlib
import time
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nbdist import Accelerator, find_executable_batch_size
from nbdist.batch_size import ran_out_of_memory
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def _out_of_memory() -> None:
    torch.empty(10**15)  # what torch's CPU allocator says is what we look for


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_what_is_taken_for_it(error: Exception, is_memory: bool) -> None:
    assert ran_out_of_memory(error) is is_memory
    outer = RuntimeError("in step 3")
    outer.__cause__ = error
    assert ran_out_of_memory(outer) is is_memory


def test_one_process() -> None:
    sizes, kept = [], []

    class Big:
        pass

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int, goal: int, *, more: int = 0) -> int:
        """Its own words."""
        big = Big()
        kept.append(weakref.ref(big))
        sizes.append(batch_size)
        if batch_size > goal:
            _out_of_memory()
        return batch_size + more

    assert train(7, more=1) == 8 and sizes == [10, 9, 8, 7]
    assert [one() for one in kept] == [None] * 4, "a failed try is kept alive"
    assert train.__doc__ == "Its own words." and train(2) == 2
    assert sizes[4:] == [7, 6, 5, 4, 3, 2]  # from the one that worked
    with pytest.raises(RuntimeError, match="train: memory ran out at every batch size from 2 down"):
        train(-1)
    with pytest.raises(TypeError, match=r"^train\(16, 5\): the decorator gives the batch size.*Call train\(5\)$"):
        train(16, 5)


def test_other_ways_to_reduce() -> None:
    sizes: list[int] = []

    def tried(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > 3:
            raise MemoryError

    find_executable_batch_size(tried, starting_batch_size=16, reduce_batch_size_fn=lambda size: size // 2)()
    left = iter((7, 2))
    find_executable_batch_size(tried, starting_batch_size=16, reduce_batch_size_fn=lambda: next(left))()
    assert sizes == [16, 8, 4, 2, 16, 7, 2]
    with pytest.raises(ValueError, match="gave 16 after 16"):
        find_executable_batch_size(tried, starting_batch_size=16, reduce_batch_size_fn=lambda size: size)()
    with pytest.raises(KeyError):
        find_executable_batch_size(lambda batch_size: {}["x"])()


def train(accelerator: Accelerator, batch_size: int, where: str, tried: list[int]) -> list[float]:
    """Rank 1 runs out of memory where it is told, until the batch size is 2; rank 0 then waits for it."""
    accelerator.free_memory()
    tried.append(batch_size)
    own = nn.Sequential(linear_at_zero(), nn.BatchNorm1d(1, affine=False)) if where == "buffers" else linear_at_zero()
    optimizer: Any = torch.optim.SGD(own.parameters(), lr=1.0)
    data = DataLoader(torch.arange(1.0, 17)[:, None], batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(own, optimizer, data)
    for step, rows in enumerate(loader):
        short = accelerator.process_index == 1 and batch_size > 2
        if short and where == "first forward":
            _out_of_memory()
        loss = -model(rows).mean()
        if short and (where != "second backward" or step):
            _out_of_memory()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.item() for parameter in own.parameters()]


def _tried(rank: int, ranks: int) -> dict[str, Any]:
    accelerator, found = Accelerator(), {}
    for where in ("first forward", "buffers", "second backward"):
        tried: list[int] = []
        started = time.monotonic()
        function = find_executable_batch_size(train_with(accelerator, where, tried), starting_batch_size=4)
        found[where] = tried, function(), time.monotonic() - started < 20
    found["after"] = accelerator.gather(torch.ones(rank + 1)).tolist()

    @find_executable_batch_size(starting_batch_size=4)
    def fails(batch_size: int) -> None:
        if rank:
            raise ValueError("no such file")

    try:
        fails()
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"

    @find_executable_batch_size(starting_batch_size=4)
    def leaves(batch_size: int) -> None:
        if not rank:
            raise ValueError("no such file")
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()  # until rank 0, whose store it is, has ended

    try:
        leaves()
    except Exception as error:
        found["left"] = f"{type(error).__name__}: {error}"
        found["frames"] = "C++" in "".join(traceback.format_exception(error))
    return found


def train_with(accelerator: Accelerator, where: str, tried: list[int]) -> Any:
    return lambda batch_size: train(accelerator, batch_size, where, tried)


@pytest.mark.ranks
def test_all_ranks_try_again_when_one_runs_out_of_memory() -> None:
    first, second = run_ranks(_tried, 2)
    for where in ("first forward", "buffers", "second backward"):
        for found in (first, second):
            tried, weight, quick = found[where]
            assert tried == [4, 3, 2] and quick
            assert where == "buffers" or weight == pytest.approx([2.5 + 6.5 + 10.5 + 14.5])
    assert first["after"] == second["after"] == [1.0, 1.0, 1.0]
    assert second["failed"] == "ValueError: no such file"
    assert first["left"] == "ValueError: no such file"
    assert second["left"].startswith(
        "RuntimeError: another rank has ended, or failed and left, while this one waited for it; "
    )
    assert len(second["left"]) < 250 and not second["frames"]
    assert first["failed"] == "RuntimeError: rank 1 failed: ValueError: no such file"
