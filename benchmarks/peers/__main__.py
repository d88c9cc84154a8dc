"""`python -m benchmarks.peers`: makes what environments are missing, measures, writes results.md, .png and .json."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from . import environments, report, run
from .tools import TOOLS

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--tools", default=",".join(tool.name for tool in TOOLS), help="names, the first is the base")
    parser.add_argument("--rows", default="warm,stop,orphans", help="besides the cold start: warm, stop, orphans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=40, help="warm cells a round and tool")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="path of the results without suffix")
    parser.add_argument("--again", type=Path, help="only write the page and the plot of these raw results")
    options = parser.parse_args()
    names = options.tools.split(",")
    tools = [tool for tool in TOOLS if tool.name in names]
    if unknown := set(names) - {tool.name for tool in TOOLS}:
        parser.error(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(t.name for t in TOOLS)}")
    if options.again:
        result = json.loads(options.again.read_text())
    else:
        # A job in the background of a script ignores SIGINT, and so would every kernel and rank: no Stop would work.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the kernels are ended as well
        environments.make(names)
        raw = options.out.with_suffix(".json")
        result = run.measure(tools, options.rounds, options.repetitions, options.rows.split(","), raw)
    options.out.with_suffix(".md").write_text(report.table(result, tools))
    report.plot(result, options.out.with_suffix(".png"), tools)
    print(report.table(result, tools))


if __name__ == "__main__":
    main()
