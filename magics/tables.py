"""A table as aligned text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from nbdist.launchers.status import RankStatus

_HEAD = ("rank", "pid", "host", "device", "state", "own memory", "shared", "on the device", "holds")
_RIGHT = {"rank", "pid", "own memory", "shared"}


def size(count: int | None) -> str:
    """Bytes in words, in three figures."""
    if count is None:
        return "?"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def rows(ranks: Sequence[RankStatus]) -> tuple[list[str], list[list[str]]]:
    """Head and rows; a column in which nothing is told is left out."""
    table = [
        [
            str(rank.rank),
            str(rank.pid),
            rank.host,
            rank.device,
            rank.state,
            *_memory(rank),
            _on_device(rank),
            _holds(rank),
        ]
        for rank in ranks
    ]
    used = [index for index in range(len(_HEAD)) if index < 7 or any(row[index] for row in table)]
    return [_HEAD[index] for index in used], [[row[index] for index in used] for row in table]


def _memory(rank: RankStatus) -> tuple[str, str]:
    if rank.state == "ended":
        return "", ""
    return size(rank.own) + (f" ({1 + rank.others} processes)" if rank.others else ""), size(rank.shared)


def _on_device(rank: RankStatus) -> str:
    memory = rank.on_device
    if memory is None:
        return ""
    return f"{size(memory['allocated'])}, {size(memory['reserved'])} reserved of {size(memory['total'])}"


def _holds(rank: RankStatus) -> str:
    names = [f"{name} {size(count)}" for name, _, count in rank.holds.get("names", ())]
    more = rank.holds.get("more", 0)
    return ", ".join(names) + (f", and {more} more" if more else "")


def as_text(head: Sequence[str], table: Sequence[Sequence[str]], indent: str = "  ") -> str:
    widths = [max(len(row[index]) for row in (head, *table)) for index in range(len(head))]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ).rstrip()
        for row in (head, *table)
    )


def as_html(head: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align:{"right" if name in _RIGHT else "left"}">{html.escape(cell)}</{tag}>'
            for cell, name in zip(cells, head, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table)
    return f"<table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
