"""What the first line of a script costs: importing nbdist, and its Accelerator once torch is there. Each in fresh
processes, interleaved, measured inside of them.

    python benchmarks/imports.py [--rounds 7]

Accelerate's in the same run, where `make bench` has installed it (benchmarks/beside.py).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import beside

# Name -> (what is there before, what is measured)
LINES = {
    "import nbdist": ("import sys", "import nbdist"),
    "from nbdist import Accelerator, after torch": ("import torch", "from nbdist import Accelerator"),
    "from accelerate import Accelerator, after torch": ("import torch", "from accelerate import Accelerator"),
}


def seconds(before: str, line: str) -> float:
    """How long a line takes in a fresh process."""
    code = f"""
import sys, time
sys.path.append({str(beside.FOLDER)!r})
{before}
start = time.perf_counter()
{line}
print(time.perf_counter() - start)
assert {"torch" in before} or "torch" not in sys.modules
"""
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lines = dict(LINES)
    if beside.accelerate() is None:
        print(beside.HOW)
        lines = {name: line for name, line in lines.items() if "accelerate" not in name}
    times: dict[str, list[float]] = {name: [] for name in lines}
    for number in range(options.rounds + 1):  # the first reads the files from the disk
        for name, line in lines.items():
            took = seconds(*line)
            if number:
                times[name].append(took)
    for name, took_each in times.items():
        print(f"{name:48s} median {statistics.median(took_each):.3f} s  min {min(took_each):.3f} s")


if __name__ == "__main__":
    main()
