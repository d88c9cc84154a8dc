"""Home: the notebook's side of a pool of ranks.

Ships what a cell reads, and takes in what the lead rank made of it, in place.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nbdist.shipping.arriving import Arriving
from nbdist.shipping.comparing import changed
from nbdist.shipping.explain import reason_of
from nbdist.shipping.handles import Fetch, Handles
from nbdist.shipping.hooks import hook_counter, raise_hook_counter
from nbdist.shipping.kinds import MISSING
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import Encoder, Packed
from nbdist.shipping.raised import Raised, unpack_raised
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
        fetch: Fetch | None = None,
    ) -> None:
        self.namespace, self.world_size = namespace, world_size
        self._table = Table(namespace)
        self._encoder = Encoder(self._table, self)
        self._bound: dict[str, Any] = {}
        self._ranks = Ranks(world_size, self._table)
        self._modules: dict[str, Version] = {}  # as the ranks know them
        self._numbers = itertools.count()
        self._handles = Handles(world_size, fetch, self)
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
        arriving = Arriving(table, self._bound, self._settle, self._handles, arrival)
        arriving.take_in(received, envelope)
        new, before = [token for token, _ in received.new], arriving.before
        table.remember([*before, *new], received.digests)
        table.refresh([*before, *new], received.digests)
        kept = arriving.keep_apart(envelope["kept"])
        self._ranks.came_back(
            envelope,
            lead,
            new,
            before,
            [*arriving.values, *kept],
            {rank: pickle.loads(report) for rank, report in reports.items() if report},
        )
        self._settle["confirm"] = envelope["cell"]
        self._settle["reject"] = self._ranks.rejected
        self._settle["drop"].extend(received.lost)
        return arrival

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
        return self._handles.make(facts["label"], facts)

    def raised(self, parcels: list[Parcel]) -> Raised:
        """The exception that `Away.raised` packed, of the first parcel that can be read here; after `accept`. All of
        them are closed.
        """
        found = Raised(reason="nothing of it came")
        for parcel in parcels:
            if found.error is not None:
                parcel.close()
                continue
            files, parcel.files = parcel.files, []
            try:
                found = unpack_raised(pickle.loads(parcel.head), files, self._table, self)
            except Exception as error:
                found = Raised(reason=reason_of(error))
        return found

    # -- forgetting

    def own(self, key: str, name: str) -> Any:
        """Only ranks look objects up by a handle's key."""
        raise LookupError(f"{name} stays on the ranks")

    def forget(self) -> None:
        """The ranks were replaced: nothing is known to them, and handles of before are dead."""
        self._handles.forget()
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
        self._settle["unpin"].extend(self._handles.prune(self._bound.values()))


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
