"""Home: the notebook's side of a pool of ranks.

Ships what a cell reads, and takes in what the lead rank made of it, in place.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nbdist.shipping.classify import KINDS
from nbdist.shipping.comparing import changed
from nbdist.shipping.explain import reason_of
from nbdist.shipping.handle import RankedValue, handle_facts
from nbdist.shipping.hooks import hook_counter, raise_hook_counter
from nbdist.shipping.kinds import MISSING, CannotApply, Snapshot
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import BIND, EXTRA, UPDATE, Encoder, Packed
from nbdist.shipping.ranks import Ranks
from nbdist.shipping.sending import Sending
from nbdist.shipping.shipment import Arrival, Plan, Shipment
from nbdist.shipping.table import Table, Token
from nbdist.shipping.unpacking import decode
from nbdist.shipping.versions import Version, notebook_modules
from nbdist.shipping.walk import Walked

QUICK = 0.003  # seconds that a walk after each notebook cell may take
MUCH = 1 << 20  # bytes of one tensor or array worth looking for


class Home:
    """One for each pool, in the notebook's process.

    Args:
        namespace: the notebook's own; only it is changed.
        world_size: how many ranks there are.
        fetch: called with a handle and attribute names when the user reads an attribute of a handle.
    """

    moves_memory = True  # what was sent as a part is moved into the whole that is sent later

    def __init__(
        self,
        namespace: dict[str, Any],
        world_size: int,
        fetch: Callable[[RankedValue, tuple[str, ...]], Any] | None = None,
    ) -> None:
        self.namespace, self.world_size, self.fetch = namespace, world_size, fetch
        self._table = Table(namespace)
        self._encoder = Encoder(self._table, self)
        self._bound: dict[str, Any] = {}
        self._ranks = Ranks(world_size, self._table)
        self._modules: dict[str, Version] = {}  # as the ranks know them
        self._numbers = itertools.count()
        self._handles: list[RankedValue] = []
        self._cell = 0
        self._walk_seconds = 0.0
        self._settle = _nothing_to_settle()

    # -- notebook -> ranks

    def ship(
        self,
        reads: Iterable[str],
        *,
        maybe: Iterable[str] = (),
        deletes: Iterable[str] = (),
        running: Sequence[int] | None = None,
        extra: Any = None,
        missing: Mapping[Token, str] = MappingProxyType({}),
    ) -> Shipment:
        """Pack what the ranks do not have yet of what a cell reads.

        Args:
            reads: names that are surely read; those the notebook does not have are ignored.
            maybe: names that may be read; one that cannot be shipped is left out.
            deletes: names that the cell deletes; a placeholder is enough for those that the ranks do not have.
            running: the ranks that will run the cell; all of them get the parcel.
            extra: travels in the same graph, and is what `Away.receive` returns.
            missing: from `NeedsMore`; see `again`.

        Raises:
            CannotShip: a name of `reads` cannot leave this process.
            NotEnoughMemory: there is no room for the shared copy.
        """
        namespace = self.namespace
        reads, maybe, deletes = set(reads), set(maybe), list(deletes)
        asked = {"reads": reads, "maybe": maybe, "deletes": deletes, "running": running, "extra": extra}
        for name in (reads | maybe) & self._bound.keys():
            if name not in namespace:  # deleted here since
                del self._bound[name]
                self._settle["unbind"].append(name)
        hard = {name for name in reads if name in namespace}
        names = hard | {name for name in maybe if name in namespace}
        walked = self._walk(names, extra)
        updates = {
            token: (node, self._table.snapshots.get(token)) for token, node in changed(self._table, walked.nodes)
        }
        binds = {
            name: namespace[name] for name in sorted(names) if self._bound.get(name, MISSING) is not namespace[name]
        }
        whole = {**dict.fromkeys(self._table.worn_out(), "all"), **missing}
        sending = Sending(self._table, self._encoder, namespace, self._numbers, walked, hard, extra, whole)
        common = Plan((), binds, updates)
        plans: list[Plan] = []
        try:
            sending.pack(common, frozenset(), frozenset())
            groups: dict[Any, list[int]] = {}
            for rank in range(self.world_size):
                groups.setdefault(self._ranks.differs(rank, names, walked, common), []).append(rank)
            for difference, ranks in groups.items():
                if difference is None:
                    plans.append(Plan(tuple(ranks), common.binds, common.updates, common.packed, common.patches))
                    continue
                plan = self._ranks.plan_for(ranks[0], names, namespace, walked, common)
                plan.ranks = tuple(ranks)
                plans.append(plan)
                behind = frozenset(self._ranks.stale[ranks[0]].keys() - plan.updates.keys())
                sending.pack(plan, self._ranks.lacking(ranks[0]), behind)
            if None not in groups:
                _close(common.packed.files)
        except BaseException:
            for plan in [common, *plans]:
                _close(plan.packed.files)
            raise
        upgrade = notebook_modules().upgrade
        held = notebook_modules().versions({name for plan in plans for name in plan.packed.modules})
        modules = {name: version for name, version in held.items() if self._modules.get(name) != version}
        header = {
            "modules": modules,
            "upgrade": upgrade,
            "cell": self._cell + 1,
            "settle": self._settle,
            "hooks": hook_counter(),
            "deletes": [name for name in deletes if name in namespace],
        }
        parcels = [
            (
                plan.ranks,
                Parcel(
                    pickle.dumps({**header, **plan.packed.envelope(), "binds": list(plan.binds)}, 5), plan.packed.files
                ),
            )
            for plan in plans
        ]
        return Shipment(
            parcels=parcels,
            names=frozenset(names - sending.left_out.keys()),
            left_out=sending.left_out,
            size=sum(len(parcel.head) for _, parcel in parcels) + sum(_memory(plan.packed) for plan in plans),
            trivial=not any(plan.packed.spans for plan in plans),
            notes=[*_notes(plans), *(() if upgrade else notebook_modules().edited())],
            plans=plans,
            modules=modules,
            settled=self._settle,
            asked=asked,
        )

    def again(self, shipment: Shipment, missing: Mapping[Token, str]) -> Shipment:
        """What `ship` was asked for, with all of those objects that a rank has not as the notebook had thought.

        To be called after `rollback`. Raises as `ship` does.
        """
        return self.ship(**shipment.asked, missing=missing)

    def _walk(self, names: set[str], extra: Any) -> Walked:
        """Walk from names; those that functions read on the way are added to `names`."""
        namespace = self.namespace

        def found(globals_read: frozenset[str]) -> list[tuple[str, Any]]:
            more = [name for name in sorted(globals_read - names) if name in namespace]
            names.update(more)
            return [(name, namespace[name]) for name in more]

        roots = [(name, namespace[name]) for name in sorted(names)]
        if extra is not None:
            roots.append(("", extra))
        return self._table.walker.walk(roots, found=found)

    def commit(self, shipment: Shipment) -> None:
        """Every rank has decoded the shipment: what was sent is known from now on."""
        table = self._table
        self._cell += 1
        self._modules.update(shipment.modules)
        for plan in shipment.plans:
            for token, node in plan.packed.born:
                if token not in table.objects:
                    table.put(token, node.value, node.snapshot)
            for token, (node, _) in plan.updates.items():
                table.snapshots[token] = node.snapshot
            table.has_patched(plan.patches)
            self._bound.update(plan.binds)
            self._ranks.has_received(plan)
        if self._settle is shipment.settled:
            self._settle = _nothing_to_settle()
        self._close(shipment)

    def rollback(self, shipment: Shipment) -> None:
        """A rank could not decode the shipment: everything is as it was before."""
        self._close(shipment)

    def _close(self, shipment: Shipment) -> None:
        for _, parcel in shipment.parcels:
            parcel.close()

    # -- ranks -> notebook

    def accept(self, parcel: Parcel, reports: dict[int, bytes], *, lead: int = 0) -> Arrival:
        """Apply what the lead rank returned to the notebook's own objects. What cannot be rebuilt becomes a handle.

        Args:
            parcel: from `Away.give(lead=True)`.
            reports: the heads of the other ranks' parcels, by rank; ranks that did not run or died are missing.
            lead: the rank that the parcel comes from.
        """
        envelope = pickle.loads(parcel.head)
        files, parcel.files = parcel.files, []
        arrival = Arrival(notes=list(envelope["notes"]))
        table = self._table
        received = decode(envelope, files, table, self, isolate=True)
        raise_hook_counter(envelope["hooks"])
        new = [token for token, _ in received.new]
        for token, value in received.new:
            table.put(token, value)
        before: dict[Token, Snapshot | None] = {}
        values: dict[str, Any] = {}
        for sort, key, content in received.values:
            if sort == UPDATE:
                before[key] = table.snapshots.get(key)
                self._apply(key, content, arrival)
            elif sort == BIND:
                values[key] = content
            elif sort == EXTRA:
                arrival.extra = content
        self._bind(values, envelope, received.failed, arrival, lead)
        table.remember([*before, *new], received.digests)
        table.refresh([*before, *new], received.digests)
        kept = self._keep_apart(envelope["kept"])
        self._ranks.came_back(
            envelope, lead, new, before, [*values, *kept], {r: pickle.loads(b) for r, b in reports.items() if b}
        )
        self._settle["confirm"] = envelope["cell"]
        self._settle["reject"] = self._ranks.rejected(envelope, lead)
        self._settle["drop"].extend(received.lost)
        return arrival

    def _apply(self, token: Token, content: tuple[str, Any], arrival: Arrival) -> None:
        try:
            value = self._table.find(token)
        except KeyError:
            arrival.notes.append("an object that the notebook has dropped meanwhile was not changed")
            return
        letter, change = content
        try:
            KINDS[letter].apply(value, change)
        except CannotApply as failure:
            names = [
                name for name, bound in self._bound.items() if bound is value and self.namespace.get(name) is value
            ]
            label = self._label(value)
            if failure.instead is MISSING or not names:
                arrival.notes.append(f"{label} was left as it was: {failure}")
                return
            for name in names:
                self.namespace[name] = self._bound[name] = failure.instead
            self._table.put(token, failure.instead)
            arrival.notes.append(f"{label} is a new object now: {failure}; other references keep the old one")
        except Exception as error:
            arrival.notes.append(f"{self._label(value)} was left as it was: {reason_of(error)}")

    def _label(self, value: Any) -> str:
        for name, bound in self._bound.items():
            if bound is value:
                return f"{name} ({type(value).__name__})"
        return f"a {type(value).__name__}"

    def _bind(
        self,
        values: dict[str, Any],
        envelope: dict[str, Any],
        failed: list[tuple[str, Any, BaseException]],
        arrival: Arrival,
        lead: int,
    ) -> None:
        for name, value in values.items():
            self.namespace[name] = self._bound[name] = value
            arrival.bound.append(name)
        stays = dict(envelope["handles"])
        for sort, key, error in failed:
            if sort == BIND:
                stays[key] = {**envelope["described"][key], "reason": f"it cannot be rebuilt here ({reason_of(error)})"}
            elif sort == EXTRA:
                stays[""] = {**envelope["described"][""], "reason": f"it cannot be rebuilt here ({reason_of(error)})"}
            elif sort == UPDATE:
                value = self._table.objects.get(key, MISSING)
                label = "an object" if value is MISSING else self._label(value)
                arrival.notes.append(f"{label} was left as it was: {reason_of(error)}")
        for name, facts in stays.items():
            handle = self._handle(name, facts, lead)
            if name == "":
                arrival.extra = handle
                continue
            self.namespace[name] = self._bound[name] = handle
            arrival.handles[name] = handle
            self._settle["pins"].append((facts["key"], name))
        for name in envelope["deleted"]:
            if name in self.namespace and self.namespace[name] is self._bound.get(name, self.namespace[name]):
                del self.namespace[name]
                arrival.deleted.append(name)
            if self._bound.pop(name, MISSING) is not MISSING:
                self._settle["unbind"].append(name)

    def _keep_apart(self, names: list[str]) -> list[str]:
        """Names that the ranks have bound anew, and that were not to come back: they keep what they made, until the
        notebook rebinds the name. Returns those whose value here goes to a rank that did not run the cell.
        """
        held = {name: self.namespace[name] for name in names if name in self.namespace}
        self._bound.update(held)
        return [name for name, value in held.items() if not isinstance(value, RankedValue)]

    def _handle(self, name: str, facts: dict[str, Any], lead: int) -> RankedValue:
        where = f"ranks 0-{self.world_size - 1}" if self.world_size > 1 else "rank 0"
        handle = RankedValue(
            facts.get("label", name) or "the cell's value",
            facts["type"],
            key=facts["key"],
            path=tuple(facts.get("path", ())),
            ranks=where,
            size=facts.get("size"),
            reason=facts["reason"],
            fetch=self.fetch,
            pool=self,
        )
        self._handles.append(handle)
        return handle

    def unpack(self, parcel: Parcel) -> Any:
        """The value that `Away.peek` packed; a handle when it cannot be here.

        Raises:
            NameError, AttributeError: the rank has no such name or attribute.
        """
        envelope = pickle.loads(parcel.head)
        files, parcel.files = parcel.files, []
        if envelope.get("error") is not None:
            raise envelope["error"]
        facts = envelope.get("stays")
        if facts is None:
            received = decode(envelope, files, self._table, self, isolate=True)
            if not received.failed:
                return received.values[-1][2]
            facts = {
                **envelope["described"],
                "reason": f"it cannot be rebuilt here ({reason_of(received.failed[0][2])})",
            }
        return self._handle(facts["label"], facts, envelope["rank"])

    # -- forgetting

    def own(self, key: str, name: str) -> Any:
        """Only ranks look objects up by a handle's key."""
        raise LookupError(f"{name} stays on the ranks")

    def forget(self) -> None:
        """The ranks were replaced: nothing is known to them, and handles of before are dead."""
        for handle in self._handles:
            handle_facts(handle).dead = True
        self._handles.clear()
        self._table.clear()
        self._bound.clear()
        self._modules.clear()
        self._ranks = Ranks(self.world_size, self._table)
        self._settle = _nothing_to_settle()

    def prune(self) -> None:
        """Drop what the notebook no longer holds; ranks are told with the next parcel.

        Cheap when nothing has changed.
        """
        namespace = self.namespace
        gone = [name for name, value in self._bound.items() if namespace.get(name, MISSING) is not value]
        for name in gone:
            del self._bound[name]
        self._settle["unbind"].extend(gone)
        # A tensor taken out of a list leaves no trace among the names: look, as long as looking is quick.
        if gone or (self._walk_seconds < QUICK and self._holds_much()):
            self._sweep()

    def _holds_much(self) -> bool:
        return any(_is_much(value) for value in self._table.objects.values())

    def _sweep(self) -> None:
        start = time.perf_counter()
        live = self._table.walker.walk([(name, value) for name, value in self._bound.items()], light=True, weakly=False)
        dead = {token: value for token, value in self._table.objects.items() if id(value) not in live.nodes}
        self._walk_seconds = time.perf_counter() - start
        if not dead:
            return
        self._table.release(dead)
        self._settle["drop"].extend(dead)
        self._ranks.dropped(list(dead))
        bound = {id(value) for value in self._bound.values()}
        kept = [handle for handle in self._handles if id(handle) in bound or sys.getrefcount(handle) > 3]
        unpinned = {handle_facts(handle).key for handle in self._handles} - {
            handle_facts(handle).key for handle in kept
        }
        self._settle["unpin"].extend(unpinned)
        self._handles = kept


def _notes(plans: list[Plan]) -> list[str]:
    count = max((plan.packed.unhooked for plan in plans), default=0)
    if not count:
        return []
    what = "a tensor" if count == 1 else f"{count} tensors"
    return [f"the functions that {what} got by register_hook stay in the notebook: register them inside the cell"]


def _nothing_to_settle() -> dict[str, Any]:
    return {"confirm": None, "reject": {}, "drop": [], "unbind": [], "pins": [], "unpin": []}


def _memory(packed: Packed) -> int:
    return sum(length for file, _, length, _, _ in packed.layout.segments if file >= 0)


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _is_much(value: Any) -> bool:
    try:
        return hasattr(value, "shape") and value.nbytes >= MUCH
    except Exception:  # a sparse tensor has no nbytes, and raises no AttributeError
        return False
