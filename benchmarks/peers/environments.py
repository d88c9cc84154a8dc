"""Makes `benchmarks/.envs/`: one environment with torch, and one a tool that sees it through a `.pth` file.

Each tool has an interpreter and packages of its own; what it needs in another version than `base` has, it gets beside
it, before it on the path. Nothing is downgraded in `base`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .tools import TOOLS, Tool

ROOT = Path(__file__).resolve().parent.parent.parent
ENVS = ROOT / "benchmarks" / ".envs"
CPU_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
BASE = ["numpy", "ipykernel>=7", "jupyter_client", "psutil"]


def python(name: str) -> str:
    """The interpreter of an environment."""
    return str(ENVS / name / "bin" / "python")


def _pip(name: str, *arguments: str, check: bool = True) -> bool:
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        [python(name), "-m", "pip", "install", *quiet, *arguments], check=False, capture_output=True, text=True
    )
    if check and done.returncode:
        raise RuntimeError(f"pip install {' '.join(arguments)} in {ENVS / name} failed:\n{done.stderr}")
    return done.returncode == 0


def _venv(name: str) -> None:
    if not Path(python(name)).exists():
        print(f"making {(ENVS / name).relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ENVS / name)], check=True)


def base() -> None:
    """torch (its CPU build where it is to be had), a kernel, and nothing that is measured."""
    _venv("base")
    if not _imports("base", "torch"):
        torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        _pip("base", f"{torch}+cpu", check=False) or _pip("base", *CPU_INDEX, f"{torch}+cpu", check=False) or _pip(
            "base", torch
        )
    _pip("base", *BASE)


def tool(tool: Tool) -> None:
    """The environment of one tool, over `base`."""
    _venv(tool.name)
    packages = next((ENVS / tool.name / "lib").glob("python3*")) / "site-packages"
    shared = next((ENVS / "base" / "lib").glob("python3*")) / "site-packages"
    (packages / "base.pth").write_text(f"{shared}\n")
    requirement = ["-e", str(ROOT)] if tool.name == "nbdist" else [tool.requirement, *tool.also]
    _pip(tool.name, *requirement)
    for name in tool.shims:
        # A tool that ends processes by a pattern of their command line would end other people's on this machine.
        shim = ENVS / tool.name / "bin" / name
        shim.write_text("#!/bin/sh\nexit 1\n")
        shim.chmod(0o755)


def _imports(name: str, module: str) -> bool:
    return subprocess.run([python(name), "-c", f"import {module}"], capture_output=True).returncode == 0


def make(names: list[str]) -> None:
    """Make what is not there yet; a stamp holds what an environment was made for."""
    wanted = [("base", base, BASE)] + [
        (t.name, lambda t=t: tool(t), [t.requirement, *t.also]) for t in TOOLS if t.name in names
    ]
    for name, step, requirement in wanted:
        stamp = ENVS / name / ".made"
        if not stamp.exists() or stamp.read_text() != repr(requirement):
            step()
            stamp.write_text(repr(requirement))


def versions(name: str) -> dict[str, str]:
    """What an environment holds: the tool's own version and torch's."""
    one = next(t for t in TOOLS if t.name == name)
    code = "import sys, importlib.metadata as m; print(*[m.version(n) for n in sys.argv[1:]], sys.version.split()[0])"
    found = subprocess.run(
        [python(name), "-c", code, one.distribution, "torch", "ipykernel"], check=True, capture_output=True, text=True
    ).stdout.split()
    return dict(zip(("tool", "torch", "ipykernel", "python"), found, strict=True))


if __name__ == "__main__":
    make([t.name for t in TOOLS])
