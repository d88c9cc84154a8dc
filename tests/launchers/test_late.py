"""To which cell late output goes, and which cells are forgotten."""

from __future__ import annotations

from nbdist.launchers import late
from nbdist.launchers.late import LateCells
from nbdist.launchers.reader import Event


class Kept:
    def __init__(self, held: int = 0) -> None:
        self.held, self.heard, self.settled = held, list[int](), 0

    def __call__(self, event: Event) -> None:
        self.heard.append(event.cell)

    def settle(self) -> None:
        self.settled += 1


def run(cells: LateCells, number: int, held: int = 0) -> Kept:
    one = Kept(held)
    cells.follow(one)
    cells.begin(number)
    return one


def text(cell: int) -> Event:
    return Event(0, "text", b"x", "stdout", cell)


def test_each_cell_gets_its_own_and_the_last_one_what_nobody_knows() -> None:
    cells = LateCells()
    cells(text(1))  # before any cell: nowhere to go
    first, second = run(cells, 1), run(cells, 2)
    for number in (1, 2, 0, 99, 1):
        cells(text(number))
    assert (first.heard, second.heard) == ([1, 1], [2, 0, 99]) and first.settled == 1
    cells.forget()
    cells(text(1))
    assert second.heard[-1] == 1


def test_a_cell_that_goes_on_writing_is_not_forgotten() -> None:
    cells = LateCells()
    talker, silent = run(cells, 1), run(cells, 2)
    for number in range(3, 3 * late.MOST_CELLS):
        last = run(cells, number)
        cells(text(1))
    cells(text(2))
    assert len(talker.heard) == 3 * late.MOST_CELLS - 3 and silent.heard == [] and last.heard == [2]
    assert silent.settled >= 2  # nothing of it is held back for ever


def test_what_their_screens_keep_is_bounded() -> None:
    cells = LateCells()
    large = [run(cells, number, late.MOST_HELD // 3) for number in range(1, 8)]
    for number in range(1, 8):
        cells(text(number))
    assert [one.heard for one in large] == [[], [], [], [], [5], [6], [1, 2, 3, 4, 7]]
    alone = run(cells, 8, 9 * late.MOST_HELD)
    cells(text(8))
    assert alone.heard == [8]
