"""What has changed of what the other side knows: objects against their snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbdist.shipping.kinds import Snapshot, same
from nbdist.shipping.table import Table, Token
from nbdist.shipping.walk import Node, Walked


def changed(table: Table, nodes: dict[int, Node]) -> Iterable[tuple[Token, Node]]:
    """The known nodes that are not as their snapshot says."""
    for key, node in nodes.items():
        token = table.tokens.get(key)
        if token is not None:
            snapshot = table.snapshots.get(token)
            if snapshot is None or not same(snapshot, node.snapshot):
                yield token, node


def walk_with_what_was(table: Table, roots: list[tuple[str, Any]], late: list[Any]) -> Walked:
    """Walk from labelled objects, and from what changed objects on the way referred to before.

    Args:
        late: objects to visit at the end.
    """
    missing: list[tuple[Token, Node]] = []

    def grown(node: Node) -> list[Any]:
        token = table.tokens.get(id(node.value))
        if token is None:
            return []
        old = table.snapshots.get(token)
        if old is None:
            missing.append((token, node))
            return []
        return [] if same(old, node.snapshot) else _referred(old)

    walked = table.walker.walk(roots, place=True, grown=grown, late=late)
    for token, node in missing:  # never compared on this rank before: as it is now is all that is known
        table.snapshots[token] = node.snapshot
    return walked


def _referred(snapshot: Snapshot) -> list[Any]:
    if snapshot[0] == "S" and snapshot[1]:
        return [*snapshot[1][1].objects, *snapshot[2]]
    return list(snapshot[2])
