"""Which cell code writes for: the one that started its thread, its task or its work."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nbdist.worker import cells


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    monkeypatch.setattr(cells, "_running", 0)
    cells.install()
    yield
    cells.begin(0)


class Waiting(threading.Thread):
    """Says for which cell it writes when it is let go: it, and a thread that it starts then."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.told = threading.Event(), list[int]()

    def run(self) -> None:
        self.go.wait()
        self.told.append(cells.current())
        child = threading.Thread(target=lambda: self.told.append(cells.current()))
        child.start()
        child.join()


def test_threads_and_their_children_write_for_the_cell_that_started_them() -> None:
    threads = []
    for number in (1, 2, 3):
        cells.begin(number)
        threads.append(Waiting())
        threads[-1].start()
    for thread in threads:
        thread.go.set()
        thread.join()
    assert [thread.told for thread in threads] == [[1, 1], [2, 2], [3, 3]] and cells.current() == 3


def test_a_timer_and_to_thread() -> None:
    cells.begin(1)
    told: list[int] = []
    timer = threading.Timer(0.01, lambda: told.append(cells.current()))
    timer.start()
    cells.begin(2)
    timer.join()
    assert told == [1] and asyncio.run(asyncio.to_thread(cells.current)) == 2


def test_a_pool_of_threads_works_for_the_cell_that_gives_it_work() -> None:
    with ThreadPoolExecutor(1) as pool:
        cells.begin(1)
        assert pool.submit(cells.current).result() == 1
        cells.begin(2)
        assert pool.submit(cells.current).result() == 2
        assert list(pool.map(lambda _: cells.current(), range(2))) == [2, 2]
        assert pool.submit(dict, fn=1, self=2).result() == {"fn": 1, "self": 2}
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
        assert pool.submit(cells.current).result() == 2


def test_a_task_of_an_earlier_cell() -> None:
    loop, told = asyncio.new_event_loop(), list[int]()

    async def later(gate: asyncio.Event) -> None:
        await gate.wait()
        told.append(cells.current())

    async def begin(gate: asyncio.Event) -> asyncio.Task[None]:
        return asyncio.create_task(later(gate))

    async def end(gate: asyncio.Event, task: asyncio.Task[None]) -> None:
        gate.set()
        await task
        told.append(cells.current())

    gate = asyncio.Event()
    cells.begin(1)
    task = loop.run_until_complete(begin(gate))
    cells.begin(2)
    loop.run_until_complete(end(gate, task))
    loop.close()
    assert told == [1, 2]


def test_an_empty_context_and_a_native_thread_write_for_the_cell_that_runs() -> None:
    import _thread

    cells.begin(4)
    assert contextvars.Context().run(cells.current) == 4
    told, done = list[int](), threading.Event()
    _thread.start_new_thread(lambda: (told.append(cells.current()), done.set()), ())
    done.wait(10)
    assert told == [4]


def test_a_thread_is_kept_by_nothing() -> None:
    cells.begin(1)
    thread = threading.Thread(target=cells.current)
    thread.start()
    thread.join()
    gone = weakref.ref(thread)
    gc.disable()
    try:
        del thread
        assert gone() is None
    finally:
        gc.enable()
