"""Figures from single records: medians, spreads, a table in words, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import TITLES
from .tools import TOOLS, Tool

Record = dict[str, Any]
HIDDEN = ("plain px",)  # told in a sentence


def quantile(figures: Sequence[float], share: float) -> float:
    """The value below which a share of the figures lies, between neighbours by their distance (numpy's default)."""
    ordered = sorted(figures)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def seconds(value: float) -> str:
    """A time as one reads it: two digits or three, milliseconds below a second."""
    if value >= 10:
        return f"{value:.0f} s"
    if value >= 0.995:
        return f"{value:.1f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.00995 else f"{value * 1e3:.1f} ms"


def of(records: Sequence[Record], tool: str, row: str) -> list[Record]:
    return [record for record in records if record["tool"] == tool and record["row"] == row]


def times(records: Sequence[Record], tool: str, row: str) -> list[float]:
    """The seconds of what went well; a Stop went well when the next cell works."""
    return [
        record["seconds"] for record in of(records, tool, row)
        if record["ok"] and record["seconds"] is not None and record.get("usable", True)
    ]  # fmt: skip


def figure(figures: Sequence[float], base: Sequence[float] | None) -> str:
    """Median, the range from the 10th to the 90th of a hundred, and how many times the median of `base`."""
    middle = statistics.median(figures)
    text = seconds(middle)
    if len(figures) > 1:
        text += f" ({seconds(quantile(figures, 0.1))} to {seconds(quantile(figures, 0.9))})"
    if base:
        text += f", {_times(middle / statistics.median(base))}"
    return text


def _times(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 9.95 else f"{ratio:.1f} x"


def cell(records: Sequence[Record], tool: Tool, row: str, base: str) -> str:
    """What the table says of one tool in one row."""
    found = of(records, tool.name, row)
    if not found:
        return "not measured"
    if row == "orphans":
        return _orphans(found)
    good = times(records, tool.name, row)
    if row.startswith("stop"):
        return _stopped(
            found, tool, figure(good, times(records, base, row) if tool.name != base else None) if good else ""
        )
    if not good:
        return f"no: {_short(found[-1]['words'])}"
    remark = tool.remarks.get(row)
    text = figure(good, times(records, base, row) if tool.name != base and remark is None else None)
    if any(record.get("copy") for record in found):
        text += "; another object: aliases keep the old weights"
    if remark is not None:
        text += f"; {remark}"
    if failed := [record for record in found if not record["ok"]]:
        text += f"; {len(failed)} of {len(found)} failed: {_short(failed[-1]['words'])}"
    if row == "cold" and (at_once := of(records, tool.name, "cold at once")):
        text += f", {tool.patience:.0f} s of it waiting"
        if lost := sum(bool(record["words"]) for record in found):
            text += f"; the first cell is lost all the same ({lost} of {len(found)})"
        if not at_once[0]["ok"]:
            text += f"; without it the first cell is lost: {seconds(at_once[0]['seconds'])}"
    return text


def _stopped(found: Sequence[Record], tool: Tool, text: str) -> str:
    """In words: what Stop left, or that it left nothing that works."""
    parts = [f"{text}; {'ranks and state kept' if tool.keeps else 'the next launch works'}"] if text else []
    for record in found:
        if not record["ok"]:
            parts.append(_short(record["words"]))
        elif not record["usable"]:
            parts.append(f"back after {seconds(record['seconds'])}, but the next cell fails: {_short(record['words'])}")
    counted = {part: parts.count(part) for part in parts}
    first, *rest = counted
    if not rest:
        return first
    return "; ".join([first, *(f"{counted[part]} of {len(found)}: {part}" for part in rest)])


def _orphans(found: Sequence[Record]) -> str:
    most = max(record["left"] for record in found)
    if not most:
        return f"none, after {seconds(max(record['seconds'] for record in found))} at most"
    computing = any(record["cpu"] > 20 for record in found)
    return f"{most}" + (", still computing" if computing else "")


def _short(words: str, most: int = 110) -> str:
    words = " ".join(words.split()).replace("|", "/")
    return words if len(words) <= most else f"{words[: most - 3]}..."


def table(result: Record, tools: Sequence[Tool] = TOOLS) -> str:
    """The page: where and when, the table, the settings."""
    about, records = result["about"], result["records"]
    shown = [tool for tool in tools if any(record["tool"] == tool.name for record in records)]
    base = shown[0].name
    rows = [key for key in TITLES if key not in HIDDEN and any(record["row"] == key for record in records)]
    rounds = 1 + max(record["round"] for record in records)
    heads = [f"{tool.name} {about['versions'][tool.name]['tool']}" for tool in shown]
    lines = [
        "# A cell on two ranks: nbdist and its peers",
        "",
        f"Measured on {about['date']}: {about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB, "
        f"{about['system']}, Python {about['versions'][base]['python']}, torch {about['versions'][base]['torch']}, "
        f"gloo; load average {_list(about['loads'])} before each round and at the end: the machine was shared, so read "
        "the ratios.",
        "",
        f"Real kernels, two ranks, {rounds} {'round' if rounds == 1 else 'rounds'} with the tools in turns, warm cells "
        "one by one. An entry is the median from the execute request to idle (10th to 90th percentile), and how many "
        "times nbdist's median it is.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
    ]
    for key in rows:
        lines.append(f"| {TITLES[key]} | " + " | ".join(cell(records, tool, key, base) for tool in shown) + " |")
    lines += ["", "![the same as a plot](results.png)", ""]
    lines += [f"* {tool.name}: {tool.setting}." for tool in shown]
    if plain := times(records, "ipyparallel", "plain px"):
        lines.append(f"* `%%px` without options, `x = rank + 1`: {figure(plain, times(records, base, 'simple'))}.")
    lines += [
        "",
        "`make bench-peers` makes the environments, measures again and writes this page, the plot and results.json.",
        "",
    ]
    return "\n".join(lines)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def plot(result: Record, file: Path, tools: Sequence[Tool] = TOOLS) -> None:
    """One panel a row, a bar a tool from its median, a line over its spread; words where there is no figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    records = result["records"]
    shown = [tool for tool in tools if any(record["tool"] == tool.name for record in records)]
    keys = [
        key for key in TITLES
        if key not in (*HIDDEN, "orphans") and any(record["row"] == key for record in records)
    ]  # fmt: skip
    columns = min(4, len(keys))
    lines = -(-len(keys) // columns)
    picture, panels = plt.subplots(lines, columns, figsize=(3.3 * columns, 2.3 * lines), sharey=True, squeeze=False)
    for panel in panels.flat[len(keys) :]:
        panel.set_visible(False)
    for panel, key in zip(panels.flat, keys, strict=False):
        every = [value for tool in shown for value in times(records, tool.name, key)]
        low = min(every) / 2
        for at, tool in enumerate(reversed(shown)):
            colour = "#1f6feb" if tool.name == shown[0].name else "#8c959f"
            if figures := times(records, tool.name, key):
                look = {"color": colour}
                if key in tool.remarks:  # not the same thing: see the table
                    look = {"facecolor": "white", "edgecolor": colour, "linestyle": "--"}
                panel.barh(at, statistics.median(figures) - low, left=low, height=0.6, **look)
                panel.plot([quantile(figures, 0.1), quantile(figures, 0.9)], [at, at], color="black", linewidth=1)
            else:
                found = of(records, tool.name, key)
                word = _word(found[-1]["words"] if found else "", key)
                panel.text(low * 1.15, at, word, va="center", fontsize=8, color="#b62324")
        panel.set_xscale("log")
        panel.set_xlim(low, max(every) * 2)
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0,) if max(every) > 30 * low else (1.0, 2.0, 5.0)))
        panel.set_title(_wrapped(TITLES[key].replace("`", "")), fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_yticks(range(len(shown)), [tool.name for tool in reversed(shown)])
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.xaxis.set_major_formatter(lambda value, _: seconds(value))
        panel.xaxis.set_minor_formatter(lambda value, _: "")
    picture.suptitle(
        "seconds (logarithmic), two ranks on a CPU: shorter is better; line: 10th to 90th percentile", fontsize=9
    )
    picture.tight_layout()
    picture.savefig(file, dpi=90)
    plt.close(picture)


def _word(words: str, row: str) -> str:
    """What stands in the plot where there is no bar."""
    if not words or words.startswith("it did not begin"):
        return "not measured"
    if words.startswith("never"):
        return "never"
    return "ranks are lost" if row.startswith("stop") else "cannot"


def _wrapped(text: str, width: int = 38) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
