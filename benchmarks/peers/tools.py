"""How each tool is told to run a cell on two ranks: as its documentation says, in the best setting that we found.

`rank`, `torch` and `dist` mean the same in every cell; what a tool cannot do is tried all the same, so that the table
says what was seen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .kernel import Kernel
from .server import ServerKernel

IMPORTS = "import torch\nimport torch.distributed as dist"
FIRST = 't = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nprint(f"sum {t.item():.0f}")'


@dataclass(frozen=True)
class Tool:
    """A way to run cells on ranks.

    Args:
        requirement: what pip installs, with `also`.
        keeps: the ranks outlive the cell, and what it made with them.
        patience: seconds that one has to wait between starting ranks and the first cell.
        remarks: row -> what its figure means where that is not what it means for the others.
        shims: commands that must do nothing when this tool runs them.
    """

    name: str = ""
    requirement: str = ""
    setting: str = ""
    keeps: bool = True
    patience: float = 0.0
    also: tuple[str, ...] = ()
    shims: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)
    kernel: type[Kernel] = Kernel

    @property
    def distribution(self) -> str:
        return self.requirement.split("==")[0]

    def start(self) -> list[str]:
        """Cells until ranks can be used."""
        raise NotImplementedError

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        """Cells that run `body` on both ranks, with these names of the notebook, and bring those home."""
        raise NotImplementedError

    def ordinary(self, code: str) -> list[str]:
        """Cells that run `code` in the notebook and not on ranks."""
        return [code]

    def first(self) -> list[str]:
        """Cells whose output has the sum over both ranks."""
        return self.on_ranks(FIRST)


@dataclass(frozen=True)
class Nbdist(Tool):
    name: str = "nbdist"
    requirement: str = "nbdist"
    setting: str = "`%%distributed -n 2`"

    def start(self) -> list[str]:
        return ["%load_ext nbdist"]

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        return [f"%%distributed -n 2\n{body}"]

    def first(self) -> list[str]:
        return self.on_ranks(f"{IMPORTS}\n{FIRST}")


@dataclass(frozen=True)
class Accelerate(Tool):
    name: str = "accelerate"
    requirement: str = "accelerate==1.15.0"
    setting: str = "`notebook_launcher(cell, num_processes=2, monitor_interval=0.01)` (default 0.1: slower)"
    keeps: bool = False

    def start(self) -> list[str]:
        return [f"import os\n{IMPORTS}\nfrom accelerate import PartialState, notebook_launcher"]

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        own = "rank = PartialState(cpu=True).process_index" if "dist." in body else 'rank = int(os.environ["RANK"])'
        if gives:
            own = f"global {', '.join(gives)}\n{own}"
        function = textwrap.indent(f"{own}\n{body}", "    ")
        launch = 'notebook_launcher(cell, (), num_processes=2, monitor_interval=0.01, use_port="29577")'
        return [f"def cell():\n{function}\n{launch}"]


@dataclass(frozen=True)
class Nbdistributed(Tool):
    name: str = "nbdistributed"
    requirement: str = "nbdistributed==0.1.0"
    setting: str = (
        "`%dist_init -n 2`, five seconds of patience, `%%distributed`; `%dist_mode -d` for cells of the notebook"
    )
    patience: float = 5.0
    shims: tuple[str, ...] = ("pkill",)

    def start(self) -> list[str]:
        return ["%load_ext nbdistributed", "%dist_init -n 2"]

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        return [f"%%distributed\n{body}"]

    def ordinary(self, code: str) -> list[str]:
        return ["%dist_mode -d", code, "%dist_mode -e"]


@dataclass(frozen=True)
class Ipyparallel(Tool):
    name: str = "ipyparallel"
    requirement: str = "ipyparallel==9.2.0"
    setting: str = (
        "`Cluster(n=2)`, `%%px --progress-after -1` (no options: slower), names by `push` and `view[...]`, "
        "`use_cloudpickle()`"
    )
    also: tuple[str, ...] = ("cloudpickle",)
    px: str = "%%px --progress-after -1"

    def start(self) -> list[str]:
        return [
            f"import socket\n{IMPORTS}\nimport ipyparallel as ipp\n"
            "rc = await ipp.Cluster(n=2, delay=0).start_and_connect(activate=True)\n"
            "view = rc[:]\n"
            "view.block = True\n"
            "view.use_cloudpickle()\n"
            "with socket.socket() as free:\n"
            '    free.bind(("127.0.0.1", 0))\n'
            '    view.push({"port": free.getsockname()[1]})\n'
            'view.scatter("rank", rc.ids, flatten=True)',
            f"%%px\n{IMPORTS}\n"
            'dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)',
        ]

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        push = [f"view.push({{{', '.join(f'{name!r}: {name}' for name in takes)}}})"] if takes else []
        pull = ["\n".join(f"{name} = rc[0][{name!r}]" for name in gives)] if gives else []
        return [*push, f"{self.px}\n{body}", *pull]


@dataclass(frozen=True)
class JupyterDistributed(Tool):
    name: str = "jupyter-distributed"
    requirement: str = "jupyter-distributed==0.1.1"
    setting: str = "a Jupyter server with its extension, Processes 2; every cell runs on every rank"
    remarks: Mapping[str, str] = field(
        default_factory=lambda: {
            "capture": "no notebook but the ranks: each made its own",
            "return": "no notebook but the ranks: it stays there",
            "model": "no notebook but the ranks: each made its own",
        }
    )
    kernel: type[Kernel] = ServerKernel

    def start(self) -> list[str]:
        return [f'import os\n{IMPORTS}\nrank = int(os.environ["RANK"])\ndist.init_process_group("gloo")']

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        return [body]


@dataclass(frozen=True)
class Torchrunx(Tool):
    name: str = "torchrunx"
    requirement: str = "torchrunx==0.4.0"
    setting: str = (
        '`Launcher(workers_per_host=2, backend="gloo")`, names as arguments and return value (a model as its state), '
        "no log files"
    )
    keeps: bool = False

    def start(self) -> list[str]:
        return [
            f'import os\nos.environ["TORCHRUNX_LOG_DIR"] = ""\n{IMPORTS}\nimport torchrunx\n'
            'launcher = torchrunx.Launcher(workers_per_host=2, backend="gloo")'
        ]

    def on_ranks(self, body: str, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> list[str]:
        # A class of the notebook cannot be returned (WorkerFailedError), so a model comes home as its state.
        state = list(gives) == ["model"]
        home = f"return {', '.join(gives)}" + (".state_dict()" if state else "") if gives else ""
        function = textwrap.indent(f'rank = int(os.environ["RANK"])\n{body}\n{home}', "    ")
        launch = f"launcher.run({', '.join(['cell', *takes])}).rank(0)"
        if state:
            launch = f"model.load_state_dict({launch})"
        elif gives:
            launch = f"{', '.join(gives)} = {launch}"
        return [f"def cell({', '.join(takes)}):\n{function}\n{launch}"]

    def first(self) -> list[str]:
        (cell,) = self.on_ranks(FIRST.splitlines()[0] + "\ndist.all_reduce(t)", gives=["t"])
        return [f'{cell}\nprint(f"sum {{t.item():.0f}}")']


TOOLS: tuple[Tool, ...] = (
    Nbdist(), Accelerate(), Nbdistributed(), Ipyparallel(), JupyterDistributed(), Torchrunx(),
)  # fmt: skip
