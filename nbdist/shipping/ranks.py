"""What single ranks do not have in common with the lead: objects that they lack, changes that they missed, names not
bound.
"""

from __future__ import annotations

from typing import Any

from nbdist.shipping.kinds import Snapshot
from nbdist.shipping.shipment import Plan
from nbdist.shipping.table import GONE, PART, Table, Token
from nbdist.shipping.walk import Walked


class Ranks:
    """The differences of each rank.

    A token *lacks* on a rank that has no object for it. It is *stale* there when the rank missed a change because it
    did not run: the snapshot says what it has. A name is *unbound* when its value is to be bound there whatever the
    others have.
    """

    def __init__(self, world_size: int, table: Table) -> None:
        self.table = table
        self.lacks: list[set[Token]] = [set() for _ in range(world_size)]
        self.stale: list[dict[Token, Snapshot | None]] = [{} for _ in range(world_size)]
        self.unbound: list[set[str]] = [set() for _ in range(world_size)]
        self.rejected: dict[int, list[str]] = {}  # of each rank the groups whose provisional tokens do not hold

    def lacking(self, rank: int) -> frozenset[Token]:
        return _Lacking(self.lacks[rank])

    def differs(self, rank: int, names: set[str], walked: Walked, common: Plan) -> Any:
        """None when a rank can take the common parcel; else something that is equal for ranks with the same needs."""
        lacks, stale, unbound = self.lacks[rank], self.stale[rank], self.unbound[rank]
        if not (lacks or stale or unbound):
            return None
        tokens = {token for key in walked.nodes if (token := self._token(key)) is not None}
        lacking = self.lacking(rank)
        needs = (
            frozenset(name for name in unbound if name in names),
            frozenset(token for token in stale if token in tokens),
            frozenset(token for token in common.packed.seeds if token in lacking or token in stale),
            frozenset(token for token in common.updates if token in lacking),
        )
        if not any(needs):
            return None
        return (*needs, frozenset(lacks), rank if needs[1] or needs[2] & stale.keys() else -1)

    def plan_for(self, rank: int, names: set[str], namespace: dict[str, Any], walked: Walked, common: Plan) -> Plan:
        """The plan for one rank that differs."""
        lacking = self.lacking(rank)
        binds = dict(common.binds)
        for name in self.unbound[rank]:
            if name in names:
                binds[name] = namespace[name]
        updates = {token: pair for token, pair in common.updates.items() if token not in lacking}
        by_token = {token: node for key, node in walked.nodes.items() if (token := self._token(key)) is not None}
        for token, old in self.stale[rank].items():
            if token in by_token and token not in lacking:
                updates[token] = (by_token[token], old)
        wanted = {id(common.updates[token][0].value) for token in common.updates if token in lacking}
        if wanted:
            self._carry(wanted, names, namespace, walked, lacking, binds, updates)
        return Plan((rank,), dict(sorted(binds.items())), updates)

    def _carry(
        self,
        wanted: set[int],
        names: set[str],
        namespace: dict[str, Any],
        walked: Walked,
        lacking: frozenset[Token],
        binds: dict[str, Any],
        updates: dict[Token, tuple[Any, Snapshot | None]],
    ) -> None:
        """Objects that the notebook changed and a rank lacks go to it whole, with what leads to them: a known
        container, or the name.
        """
        holders: dict[int, list[int]] = {}
        for key, node in walked.nodes.items():
            for child in node.kind.children(node.value, node.snapshot[2]):
                for below in _through(child, walked):
                    holders.setdefault(below, []).append(key)
        pending, seen = list(wanted), set(wanted)
        keepers: set[int] = set()
        while pending:
            for holder in holders.get(pending.pop(), ()):
                token = self._token(holder)
                if token is not None and token not in lacking:
                    keepers.add(holder)
                elif holder not in seen:
                    seen.add(holder)
                    pending.append(holder)
        for holder in keepers:
            # A change against a snapshot in which the lacking objects are other ones: of an object only these
            # attributes are sent.
            node, token = walked.nodes[holder], self._token(holder)
            old = updates[token][1] if token in updates else self.table.snapshots.get(token)
            if old is not None:
                letter, scalars, references = old
                marked = tuple(GONE if any(b in seen for b in _through(ref, walked)) else ref for ref in references)
                old = (letter, scalars, marked)
            updates[token] = (node, old)
        for name in names:
            if any(below in seen for below in _through(namespace.get(name), walked)):
                binds[name] = namespace[name]

    def has_received(self, plan: Plan) -> None:
        """These ranks have decoded their plan."""
        for rank in plan.ranks:
            self.lacks[rank].difference_update(token for token, _ in plan.packed.born)
            for token in plan.updates:
                self.stale[rank].pop(token, None)
            self.unbound[rank].difference_update(plan.binds)

    def came_back(
        self,
        envelope: dict[str, Any],
        lead: int,
        new: list[Token],
        before: dict[Token, Snapshot | None],
        bound: list[str],
        reports: dict[int, dict[str, Any]],
    ) -> None:
        """After a return: what the other ranks do not have of it."""
        self.rejected = {}
        signs = envelope["signs"]
        handles = [name for name in envelope["handles"] if name]
        born = {token[1] for token in new}
        for rank in range(len(self.lacks)):
            if rank == lead:
                self.lacks[rank].difference_update(new)
                self.unbound[rank].difference_update(bound)
                for token in before:
                    self.stale[rank].pop(token, None)
                continue
            report = reports.get(rank)
            if report is None or not report["ran"]:
                self.lacks[rank].update(new)
                self.unbound[rank].update(bound)
                for token, old in before.items():
                    if token not in self.lacks[rank]:
                        self.stale[rank].setdefault(token, old)
                continue
            matching = {
                group for group, sign in signs.items() if "{}" not in group and report["signs"].get(group) == sign
            }
            # What stays with the lead, as a handle, gets no token here: nobody would ever take it back.
            self.rejected[rank] = [group for group in report["given"] if group not in matching or group not in born]
            self.lacks[rank].update(token for token in new if token[1] not in matching)
            present = report["present"]
            self.unbound[rank].update(name for name in (*bound, *handles) if name not in present)
            self.unbound[rank].update(name for name in report["deleted"] if name not in envelope["deleted"])

    def dropped(self, tokens: list[Token]) -> None:
        gone = set(tokens)
        for rank in range(len(self.lacks)):
            self.lacks[rank] -= gone
            for token in gone & self.stale[rank].keys():
                del self.stale[rank][token]

    def _token(self, key: int) -> Token:
        return self.table.tokens.get(key)


class _Lacking(frozenset):
    """A set of tokens that also holds the parts of the modules in it."""

    def __contains__(self, token: object) -> bool:
        if frozenset.__contains__(self, token):
            return True
        return isinstance(token, tuple) and bool(token) and token[0] == PART and token[1] in self


def _through(value: Any, walked: Walked) -> list[int]:
    """The ids of the nodes that a value is or, through tuples and the like, holds."""
    found: list[int] = []
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if id(value) in walked.nodes:
            found.append(id(value))
        elif id(value) in walked.held and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, tuple | frozenset):
                stack.extend(value)
    return found
