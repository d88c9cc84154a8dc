"""What the lead rank returned is put into the notebook's own objects and names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbdist.shipping.classify import KINDS
from nbdist.shipping.explain import reason_of
from nbdist.shipping.handle import RankedValue
from nbdist.shipping.handles import Handles
from nbdist.shipping.kinds import MISSING, CannotApply, Snapshot
from nbdist.shipping.message import BIND, BULKS, EXTRA, UPDATE
from nbdist.shipping.plain import BULK
from nbdist.shipping.shipment import Arrival
from nbdist.shipping.table import Table, Token
from nbdist.shipping.unpacking import Unpacked


@dataclass
class Arriving:
    """One return as it is taken in. What cannot be changed is left as it was and noted; what cannot be rebuilt becomes
    a handle.

    Attributes:
        bound: what the ranks have under each name.
        settle: what the ranks are to be told with the next parcel.
        arrival: is filled.
        before: the snapshots, before this, of what was changed.
        values: what was bound to names.
    """

    table: Table
    bound: dict[str, Any]
    settle: dict[str, Any]
    handles: Handles
    arrival: Arrival
    before: dict[Token, Snapshot | None] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def take_in(self, received: Unpacked, envelope: dict[str, Any]) -> None:
        """Make the changes, bind the names, and delete those that the cell has deleted."""
        table = self.table
        bulk = {id(value) for sort, _, content in received.values if sort == BULKS for value in content}
        for token, value in received.new:
            table.put(token, value)
            if id(value) not in bulk:
                table.came_opened(value)
        for sort, key, content in received.values:
            if sort == UPDATE:
                self.before[key] = table.snapshots.get(key)
                self._apply(key, content)
            elif sort == BIND:
                self.values[key] = content
            elif sort == EXTRA:
                self.arrival.extra = content
        self._bind(envelope, received.failed)

    def _apply(self, token: Token, content: tuple[str, Any]) -> None:
        notes, namespace = self.arrival.notes, self.table.namespace
        table = self.table
        try:
            value = table.find(token)
        except KeyError:
            notes.append("an object that the notebook has dropped meanwhile was not changed")
            return
        letter, change = content
        try:
            KINDS[letter].apply(value, change)
            if letter != BULK.letter:
                table.came_opened(value)
        except CannotApply as failure:
            names = [name for name, bound in self.bound.items() if bound is value and namespace.get(name) is value]
            label = self._label(value)
            if failure.instead is MISSING or not names:
                notes.append(f"{label} was left as it was: {failure}")
                return
            for name in names:
                namespace[name] = self.bound[name] = failure.instead
            self.table.put(token, failure.instead)
            notes.append(f"{label} is a new object now: {failure}; other references keep the old one")
        except Exception as error:
            notes.append(f"{self._label(value)} was left as it was: {reason_of(error)}")

    def _label(self, value: Any) -> str:
        for name, bound in self.bound.items():
            if bound is value:
                return f"{name} ({type(value).__name__})"
        return f"a {type(value).__name__}"

    def _bind(self, envelope: dict[str, Any], failed: list[tuple[str, Any, BaseException]]) -> None:
        arrival, namespace = self.arrival, self.table.namespace
        for name, value in self.values.items():
            namespace[name] = self.bound[name] = value
            arrival.bound.append(name)
        stays = dict(envelope["handles"])
        for sort, key, error in failed:
            if sort in (BIND, EXTRA):
                name = key if sort == BIND else ""
                reason = f"it cannot be rebuilt here ({reason_of(error)})"
                stays[name] = {**envelope["described"][name], "reason": reason}
            elif sort == UPDATE:
                value = self.table.objects.get(key, MISSING)
                label = "an object" if value is MISSING else self._label(value)
                arrival.notes.append(f"{label} was left as it was: {reason_of(error)}")
        for name, facts in stays.items():
            handle = self.handles.make(name, facts)
            if name == "":
                arrival.extra = handle
                continue
            namespace[name] = self.bound[name] = handle
            arrival.handles[name] = handle
            self.settle["pins"].append((facts["key"], name))
        for name in envelope["deleted"]:
            if name in namespace and namespace[name] is self.bound.get(name, namespace[name]):
                del namespace[name]
                arrival.deleted.append(name)
            if self.bound.pop(name, MISSING) is not MISSING:
                self.settle["unbind"].append(name)

    def keep_apart(self, names: list[str]) -> list[str]:
        """Names that the ranks have bound anew, and that were not to come back: they keep what they made, until the
        notebook rebinds the name. Returns those whose value here goes to a rank that did not run the cell.
        """
        namespace = self.table.namespace
        held = {name: namespace[name] for name in names if name in namespace}
        self.bound.update(held)
        return [name for name, value in held.items() if not isinstance(value, RankedValue)]
