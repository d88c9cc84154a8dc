"""Which room may import which (CONTRIBUTING.md), and that importing the package costs nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# room -> rooms it may import; `utils` is a face; `registry`, `checks`, `messages`, `kwargs`, `system` and `cgroups` are
# leaves beside it.
MAY = {
    "config": {"checks", "cgroups", "system"},
    "system": set(),
    "cgroups": set(),
    "registry": set(),
    "later": set(),
    "checks": set(),
    "shipping": {"system", "cgroups"},
    "kwargs": set(),
    "state": {"checks", "config", "messages", "kwargs"},
    "messages": {"config"},
    "variables": set(),
    "alone": {"state"},
    "parallelism": {"alone", "checks", "messages", "state", "variables"},
    "plugins": {"checks", "state", "variables"},
    "context": {"checks", "state"},
    "grid": {"context", "parallelism", "processes"},
    "ends": set(),
    "bringing": {"ends", "messages", "state"},
    "collectives": {"checks", "state", "config", "messages", "ends", "bringing"},
    "metrics": {"checks", "collectives", "data", "ends", "messages", "state"},
    "splitting": {"ends", "messages", "shipping", "state"},
    "processes": {"checks", "kwargs", "messages", "parallelism", "plugins", "splitting", "state"},
    "helpers": {
        "checks",
        "accumulation",
        "arguments",
        "batch_size",
        "collectives",
        "data",
        "grid",
        "kwargs",
        "messages",
        "metrics",
        "processes",
        "profiling",
        "saving",
        "splitting",
        "state",
    },
    "rng": {"checks", "collectives", "messages", "state"},
    "logging": {"checks", "state"},
    "saving": {"checks", "state"},
    "profiling": {"checks", "kwargs", "state"},
    "sockets": {"system"},
    "regroup": {"messages", "sockets", "state"},
    "batch_size": {"checks", "messages", "regroup", "state"},
    "local_sgd": {"checks", "accelerator", "collectives"},
    "weighing": {"checks", "messages"},
    "beside": {"data"},
    "loose": {"messages", "state", "strategies", "window"},
    "held": {"accumulation", "loose", "messages", "strategies", "window"},
    "keeping": {"accumulation", "held", "loose", "window"},
    "bare": {"accumulation", "loose"},
    "window": {"accumulation", "beside", "data", "held", "weighing"},
    "accumulation": {"bare", "beside", "data", "loose", "messages", "state", "strategies", "weighing", "window"},
    "scheduler": {"strategies"},
    "precision": {"checks", "state", "config", "kwargs"},
    "views": {"precision", "shipping"},
    "scaling": {"kwargs", "messages"},
    "compiling": {"checks", "kwargs", "views", "precision"},
    "data": {"checks", "state", "config", "collectives", "messages", "shipping"},
    "checkpoint": {"checks", "collectives", "config", "ends", "kwargs", "messages", "state", "strategies", "views"},
    "tracking": {"state", "config"},
    "strategies": {
        "checks",
        "state",
        "config",
        "precision",
        "views",
        "kwargs",
        "collectives",
        "bigmodel",
        "shipping",
        "registry",
        "messages",
        "reach",
        "engine",
        "alone",
        "context",
        "parallelism",
        "plugins",
        "rng",
        "variables",
    },
    "engine": set(),
    "bigmodel": {"config", "state"},
    "worker": {"shipping", "state", "config", "system", "sockets"},
    "launchers": {"checks", "shipping", "config", "registry", "system", "cgroups"},
    "magics": {"shipping", "config", "kwargs", "registry", "launchers", "worker", "state", "system", "messages"},
    "widgets": {"shipping", "config", "launchers", "state"},
}
GUESTS = "nbdist/worker/guests/"  # loaded by name: they may know the strategies


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "nbdist" and len(parts) > 1 else None


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "nbdist"}
    return found


def files() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / "nbdist").rglob("*.py")):
        parts = path.relative_to(ROOT / "nbdist").parts
        found.append((parts[0].removesuffix(".py"), path))
    for room in ("magics", "widgets"):
        found += [(room, path) for path in sorted((ROOT / room).rglob("*.py"))]
    return found


@pytest.mark.parametrize(("room", "path"), files(), ids=lambda value: str(getattr(value, "name", value)))
def test_nothing_points_back(room: str, path: Path) -> None:
    allowed = MAY.get(room)
    if allowed is None:  # the front: accelerator, utils, __init__, cli
        return
    if path.relative_to(ROOT).as_posix().startswith(GUESTS):
        allowed = allowed | {"strategies"}
    used = {other for module in imports(path) if (other := room_of(module)) and other != room}
    assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", [path for room, path in files() if room not in ("magics", "widgets")], ids=str)
def test_the_package_itself_knows_no_notebook(path: Path) -> None:
    known = {module.split(".")[0] for module in imports(path)}
    assert not known & {"IPython", "ipykernel", "ipywidgets", "anywidget"}, path


def run(code: str) -> tuple[str, float]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout.strip(), time.perf_counter() - start


def test_importing_nbdist_imports_neither_torch_nor_ipython() -> None:
    """PF2. The figure (0.15 s more than bare Python) is in benchmarks/; here a generous limit."""
    told, seconds = run("import sys, nbdist; print([m for m in ('torch', 'IPython', 'numpy') if m in sys.modules])")
    assert told == "[]"
    assert seconds < 2


def test_modules_are_there_after_a_bare_import() -> None:
    told, _ = run("import sys, nbdist; print(nbdist.utils.gather is not nbdist.logging.get_logger)")
    assert told == "True"


def test_an_unknown_name_says_what_there_is() -> None:
    import nbdist

    with pytest.raises(AttributeError, match="Accelerator"):
        nbdist.Acelerator  # noqa: B018


def test_everything_that_is_offered_exists() -> None:
    import nbdist

    for name in nbdist.__all__:
        assert getattr(nbdist, name) is not None
