"""What is measured: the cells of each row, as each tool is told them, and how to see that they did what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .tools import Ipyparallel, Tool

TENSOR = 1 << 24  # elements: 64 MiB of float32
NETWORK = """
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    def forward(self, inputs):
        return self.second(self.first(inputs).relu())
model = mine = Network()
before = model.first.weight.detach().clone()
"""
TRAIN = """
model(torch.ones(4, 512) * (rank + 1)).pow(2).mean().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.data -= 0.1 * parameter.grad
"""


@dataclass(frozen=True)
class Cells:
    """One repetition: cells before (not timed), the timed ones, and a cell that must show `expect` afterwards."""

    timed: list[str]
    before: list[str] = field(default_factory=list)
    check: list[str] = field(default_factory=list)
    expect: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        cells: (tool, k) -> repetition k.
        every: measured once in so many repetitions of the warm cell.
        if_not: what to say when the cells went well and `expect` was not seen.
    """

    key: str
    title: str
    cells: Callable[[Tool, int], Cells]
    every: int = 1
    if_not: str = ""


def _simple(tool: Tool, k: int) -> Cells:
    return Cells(tool.on_ranks("x = rank + 1"))


def _reduce(tool: Tool, k: int) -> Cells:
    return Cells(tool.on_ranks("t = torch.ones(1)\ndist.all_reduce(t)"))


def _plain_px(tool: Tool, k: int) -> Cells:
    """ipyparallel's magic without options, to show that the table has its better setting."""
    return Cells(["%%px\nx = rank + 1"] if isinstance(tool, Ipyparallel) else [])


def _capture(tool: Tool, k: int) -> Cells:
    made = tool.ordinary(f"big = torch.full(({TENSOR},), {k}.0)")
    return Cells(tool.on_ranks(f"assert big[5] == {k}", takes=["big"]), made)


def _return(tool: Tool, k: int) -> Cells:
    timed = tool.on_ranks(f"y = torch.full(({TENSOR},), {k}.0)", gives=["y"])
    return Cells(timed, [], tool.ordinary("print('y is', int(y[5]))"), f"y is {k}")


def _model(tool: Tool, k: int) -> Cells:
    check = "print('trained', not torch.equal(model.first.weight, before), 'own object', model is mine)"
    timed = tool.on_ranks(TRAIN.strip(), takes=["model"], gives=["model"])
    return Cells(timed, tool.ordinary(NETWORK.strip()), tool.ordinary(check), "trained True")


ROWS: tuple[Row, ...] = (
    Row("simple", "warm cell, `x = rank + 1`", _simple),
    Row("reduce", "warm cell with an all_reduce", _reduce),
    Row("plain px", "`%%px` without options, `x = rank + 1`", _plain_px),
    Row("capture", "a new 64 MiB tensor of the notebook is read on the ranks", _capture, 5),
    Row("return", "a 64 MiB tensor made on the ranks is in the notebook", _return, 5, "nothing comes home"),
    Row(
        "model", "a 2 MB model of the notebook, trained a step on the ranks", _model, 5, "its weights stay as they were"
    ),
)

COLD = "cold start: from a new kernel to the first all_reduce"
STOPS = {
    "stop loop": ("Stop in a Python loop", "while True: pass"),
    "stop collective": (
        "Stop, one rank in an all_reduce, the other asleep",
        "dist.all_reduce(torch.ones(4)) if rank else time.sleep(600)",
    ),
}
ORPHANS = "`kill -9` of the kernel: processes left after 3 s"
KEEP = "kept = 42"
AFTER = "u = torch.ones(1)\ndist.all_reduce(u)\nassert u.item() == 2"
TITLES = (
    {"cold": COLD} | {row.key: row.title for row in ROWS} | {key: title for key, (title, _) in STOPS.items()}
    | {"orphans": ORPHANS}
)  # fmt: skip


def busy(folder: str, code: str) -> str:
    """A cell that says by files in `folder` that both ranks run, and then does not end."""
    return f"import pathlib, time\npathlib.Path(f'{folder}/busy-{{rank}}').touch()\n{code}"
