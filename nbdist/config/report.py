"""A report to paste: sections of facts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdist import system
from nbdist.config import machine
from nbdist.config.machine import Facts

Section = tuple[str, Facts]


def sections(variables: Mapping[str, str]) -> list[Section]:
    """What is known without torch and without ranks."""
    short = system.missing()
    means = f"done by the nearest means: {', '.join(short)}" if short else "all that nbdist uses is there"
    return [
        ("versions", machine.versions()),
        ("machine", [*machine.machine(), ("means", means)]),
        ("limits", machine.limits()),
        ("environment", machine.environment(variables)),
    ]


def write(told: Sequence[Section]) -> str:
    """Aligned text; a section without facts says so."""
    lines = []
    for title, facts in told:
        width = max((len(name) for name, _ in facts), default=0)
        lines += [title, *(f"  {name.ljust(width)}  {machine.without_home(value)}" for name, value in facts)]
        if not facts:
            lines.append("  (nothing)")
    return "\n".join(lines)
