"""Away: a rank's side. Takes in what the notebook ships, and gives back what the cell made of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakSet

from nbdist.shipping import spread
from nbdist.shipping.bindings import Bindings
from nbdist.shipping.comparing import walk_with_what_was
from nbdist.shipping.errors import CannotReceive, NeedsMore
from nbdist.shipping.explain import reason_of
from nbdist.shipping.giving import Giving
from nbdist.shipping.hooks import hook_counter, raise_hook_counter
from nbdist.shipping.kinds import MISSING, Stays
from nbdist.shipping.lazy import torch_if_loaded
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import BIND, EXTRA, Encoder
from nbdist.shipping.peeking import peek
from nbdist.shipping.provisional import Provisional
from nbdist.shipping.raised import pack_raised
from nbdist.shipping.reaching import Reached, adopt, gather, let_go, reached, stand_for, take_the_places
from nbdist.shipping.table import Table, Token
from nbdist.shipping.unpacking import DecodeFailed, decode
from nbdist.shipping.versions import RankModules
from nbdist.shipping.walk import content_digest
from nbdist.shipping.writing import check_parameters, not_brought, write

_LIMIT = 4 << 30


class Away:
    """One in each rank.

    Args:
        namespace: the `__dict__` of the module that is `sys.modules["__main__"]` in the rank.
        rank: this rank.
    """

    moves_memory = False

    def __init__(self, namespace: dict[str, Any], rank: int) -> None:
        self.namespace, self.rank = namespace, rank
        self._table = Table(namespace)
        self._encoder = Encoder(self._table, self)
        self._arrived: tuple[dict[str, Any], Any] | None = None
        self._modules = RankModules()
        self.troubles: list[str] = []  # one line each: modules that could not be reloaded for this cell
        self._cell = 0
        self._provisional = Provisional(self._table)
        self._names = Bindings(namespace)
        self._pins: dict[str, Any] = {}
        self._extra: Any = None
        self._reached = Reached()  # by the run that has ended
        self._sharded: WeakSet[Any] = WeakSet()  # modules whose parameters a strategy has replaced
        self.moved: list[Any] = []  # tensors that now look at the memory of one that was sent after them
        # Only a rank that leads compares: the others take a snapshot when they are to lead a cell.
        self._tracks = rank == 0

    # -- notebook -> rank

    def receive(self, head: bytes, files: list[int]) -> Any:
        """Decode a parcel, bind its names and return its `extra`. No object is changed before `commit`.

        Raises:
            CannotReceive: something in it cannot be decoded here.
            NeedsMore: an object here is not what a change was made against; `Home.again` sends all of it.
        """
        try:
            envelope = pickle.loads(head)
        except Exception as error:
            for file in files:
                os.close(file)
            raise CannotReceive("", reason_of(error)) from error
        for key, name in envelope["settle"]["pins"]:
            if key not in self._pins and name in self.namespace:
                self._pins[key] = self.namespace[name]
        self.troubles = self._modules.follow(envelope["modules"], envelope["upgrade"])
        try:
            received = decode(envelope, files, self._table, self, isolate=False)
        except DecodeFailed as failure:
            name = failure.key if failure.sort == BIND else ""
            raise CannotReceive(name, reason_of(failure.error)) from failure.error
        except KeyError as error:
            raise CannotReceive("", f"it refers to an object that this rank does not have ({error})") from error
        self._arrived = (envelope, received)
        if self._table.kinds.spread:
            check_parameters(self._table, received)
        lacks = not_brought(self._table, received)
        if lacks:
            raise NeedsMore(lacks)
        extra = None
        for sort, _, content in received.values:
            if sort == EXTRA:
                extra = content
        self._extra = extra
        return extra

    def commit(self) -> None:
        """Every rank has decoded the parcel: its names stay bound, and its changes are written.

        Raises:
            CannotReceive: a change cannot be written into this rank's object (memory that is mapped cannot grow, for
                example).
        """
        if self._arrived is None:
            return
        (envelope, received), self._arrived = self._arrived, None
        table = self._table
        self._settle(envelope["settle"], {key for sort, key, _ in received.values if sort == BIND})
        raise_hook_counter(envelope["hooks"])
        self._cell = envelope["cell"]
        touched = [token for value in self.moved if (token := table.tokens.get(id(value))) is not None]
        self.moved.clear()
        touched += write(table, received)
        if table.kinds.spread:
            self._put_in_parts(received.digests)
        self._names.deletes = envelope["deletes"]
        table.remember(touched, received.digests)
        if self._tracks:
            table.refresh(touched, received.digests)
        else:
            for token in touched:
                table.snapshots.pop(token, None)

    def rollback(self) -> None:
        """Another rank could not decode the parcel: everything is as before."""
        if self._arrived is not None:
            self._arrived[1].unbind(self.namespace)
        self._arrived = None
        self._extra = None

    def _settle(self, settle: dict[str, Any], bound: set[str]) -> None:
        """Act on what the notebook has found out about the last return."""
        self._provisional.settle(settle["confirm"], settle["reject"].get(self.rank, ()))
        for token in settle["drop"]:
            self._table.drop(token)
        for name in settle["unbind"]:
            if name not in bound:
                self.namespace.pop(name, None)
        for key in settle.get("unpin", ()):
            self._pins.pop(key, None)

    def _put_in_parts(self, digests: dict[Token, Any]) -> None:
        """What came whole stands for tensors of which this rank has a part."""
        table = self._table
        pairs, spread.exchanged[:] = list(spread.exchanged), []
        optimizer = torch_if_loaded().optim.Optimizer
        for value in [value for value in table.objects.values() if isinstance(value, optimizer)]:
            pairs += spread.whole_states(value)
        table.replace(pairs)
        for token, digest in digests.items():
            value = table.objects.get(token)
            if spread.is_spread(value):
                spread.agreed(value, digest)

    def replaced(self, module: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        """A strategy has put parameters of a module, or what belongs to them (new), in the place of others (old): the
        notebook's stand for them, and nothing here keeps the old ones.
        """
        self._table.kinds.spread = True
        if module is not None:
            self._sharded.add(module)
        self._table.replace(pairs)

    def own(self, key: str, name: str) -> Any:
        """The object of a handle."""
        try:
            return self._look(key, name)
        except NameError:
            raise LookupError(f"this rank has no {name}") from None

    # -- the run of a cell

    def begin(
        self, stores: Iterable[str], reads: Iterable[str], lead: bool | None = None, again: Iterable[str] = ()
    ) -> None:
        """A cell is about to run.

        Args:
            stores: names that it binds; those that it does not read as well are taken out of the namespace, so that
                an old value of this rank's is not taken for what the cell made.
            reads: names that it can see (`Shipment.names`).
            lead: whether this rank will lead; by default rank 0 does.
            again: names that count as assigned, though the cell does nothing to them.
        """
        self._modules.look()
        self._names.begin(stores, reads)
        if lead is None:
            lead = self.rank == 0
        if lead and len(self._table.snapshots) < len(self._table.objects):
            self._take_snapshots()
        self._tracks = lead
        for name in again:
            self._names.before.pop(name, None)

    def _take_snapshots(self) -> None:
        """Where this rank has not compared before, because another one led."""
        table, names = self._table, self._names
        walked = table.walker.walk([(name, names.before[name]) for name in names.reads if name in names.before])
        for key, node in walked.nodes.items():
            token = table.tokens.get(key)
            if token is not None:
                table.snapshots.setdefault(token, node.snapshot)

    def reach(
        self,
        *,
        lead: bool,
        only: frozenset[str] | None = None,
        hide: frozenset[str] = frozenset(),
        extra: Any = None,
    ) -> dict[str, Any] | None:
        """Before `give`: what the run that `begin` started has reached of what is spread over the ranks, for the
        notebook; None where there is nothing. Arguments as for `give`.
        """
        self._reached = Reached()
        table = self._table
        if not table.kinds.spread:
            return None
        spread.put_back_in_parts(self._sharded)
        assigned, _ = self._names.ended()
        roots = self._roots(assigned, only, hide, extra)
        walked = table.walker.walk(roots, light=True, place=True)
        self._reached = reached(walked, table.tokens, table.snapshots if lead else None)
        if not self._reached.values:
            return None
        return {**self._reached.report(), "stand_for": stand_for(table) if lead else []}

    def gather(
        self,
        which: Sequence[int],
        left: Mapping[int, str],
        replaced: Iterable[tuple[Token, str, Token]],
        tokens: Sequence[Token],
        *,
        lead: bool,
    ) -> None:
        """Bring these of what `reach` told together, and know why the others are left; on all ranks at once.

        Args:
            replaced: what the lead rank told as "stand_for".
            tokens: under which the lead rank knows the tensors, where all ranks have the same.
        """
        adopt(self._table, replaced)
        take_the_places(self._table, self._reached.values, tokens)
        for place, reason in left.items():
            self._reached.stay([place], reason)
        gather([self._reached.values[place] for place in which], keep=lead)

    def leave(self, which: Iterable[int], reason: str) -> None:
        """Of what `reach` told these are left all the same: bringing them together has failed."""
        self._reached.stay(which, reason)

    def _roots(
        self, assigned: list[str], only: frozenset[str] | None, hide: frozenset[str], extra: Any
    ) -> list[tuple[str, Any]]:
        namespace = self.namespace
        reads = [name for name in self._names.reads if name in namespace and (name not in hide or name in assigned)]
        roots = [(name, namespace[name]) for name in sorted({*assigned, *reads})]
        if self._extra is not None:
            roots.append(("\0in", self._extra))
        if extra is not None:
            roots.append(("\0out", extra))
        if only is not None:
            roots = [(name, value) for name, value in roots if name in only or name == "\0out"]
        return roots

    def give(
        self,
        *,
        lead: bool,
        ran: bool = True,
        looks: bool = True,
        limit: int = _LIMIT,
        only: frozenset[str] | None = None,
        stay: Mapping[str, str] | None = None,
        hide: frozenset[str] = frozenset(),
        extra: Any = None,
    ) -> Parcel:
        """End the run that `begin` started, and pack what goes back.

        Args:
            lead: pack everything; the other ranks pack a report of their structure only.
            ran: False for a rank that did not run the cell.
            looks: False for one that did, and may not take the time to look at what it has: nothing in it is then
                taken for the same as the lead rank's.
            limit: bytes; beyond it the largest names stay here.
            only: names to which the return is limited.
            stay: names that stay here whatever they are, with the reason.
            hide: names that are not the cell's, unless it has bound them.
            extra: travels in the same graph.
        """
        names = self._names
        assigned, deleted = names.ended()
        roots = self._roots(assigned, only if lead else None, hide, extra)
        late = names.replaced(hide) if only is None or not lead else []
        try:
            if lead:
                parcel = self._give_all(assigned, deleted, roots, late, limit, only, dict(stay or {}), extra)
            else:
                parcel = self._report(assigned, deleted, roots if looks else [], ran)
        finally:
            self._modules.look()
        # Only now: when this was interrupted, it is called again for what can be said without the values.
        names.close()
        self._extra = None
        let_go(self._reached.values)
        self._reached = Reached()
        return parcel

    def _report(self, assigned: list[str], deleted: list[str], roots: list[tuple[str, Any]], ran: bool) -> Parcel:
        table = self._table
        signs: dict[str, int] = {}
        if ran:
            walked = table.walker.walk(roots, light=True, place=True)
            self._reached.expected(walked)
            signs = walked.signatures()
            self._provisional.give(walked, self._cell)
            self._tracks = False
            table.snapshots.clear()
        report = {
            "cell": self._cell, "ran": ran, "signs": signs, "given": self._provisional.groups if ran else [],
            "present": self._names.present(assigned), "deleted": deleted,
        }  # fmt: skip
        return Parcel(pickle.dumps(report, 5))

    def _give_all(
        self,
        assigned: list[str],
        deleted: list[str],
        roots: list[tuple[str, Any]],
        late: list[Any],
        limit: int,
        only: frozenset[str] | None,
        stay: dict[str, str],
        extra: Any,
    ) -> Parcel:
        table = self._table
        walked = walk_with_what_was(table, roots, late)
        self._reached.expected(walked)
        paths: dict[int, str] = {}
        for name, value in sorted(roots, key=lambda root: root[0] not in self._names.reads):
            paths.setdefault(id(value), name)
        giving = Giving(self._encoder, table.tokens.get, self._describe, paths)
        giving.take_up(table, walked)
        named = assigned if only is None else [name for name in assigned if name in only]
        binds = giving.binds = {name: self.namespace[name] for name in named}
        for name, reason in stay.items():
            if name in binds:
                giving.stays(name, reason)
        for name in list(binds):
            kind = table.kinds.of(binds[name])
            if isinstance(kind, Stays):  # also when the notebook knows the object, from before it was sharded
                giving.stays(name, kind.reason)

        def name_born(key: int) -> Token:
            group, position = walked.places[key]
            return (self._cell, group, position)

        packed, send_extra = giving.pack(walked, name_born, extra, limit)
        for token, node in packed.born:
            table.put(token, node.value, node.snapshot)
        giving.notes += self._reached.notes(giving.handles)
        for token, (node, _) in giving.updates.items():
            if token not in giving.again:
                table.snapshots[token] = node.snapshot
            digest = content_digest(node)
            if digest is not None:
                packed.digests[token] = digest
        described = {name: self._describe(name, value, "") for name, value in binds.items()}
        if send_extra:
            described[""] = self._describe("", extra, "")
        envelope = {
            **packed.envelope(),
            "cell": self._cell,
            "rank": self.rank,
            "handles": giving.handles,
            "described": described,
            "deleted": [name for name in deleted if only is None or name in only],
            "kept": [] if only is None else [name for name in assigned if name not in only],
            "notes": giving.notes,
            "signs": walked.signatures(),
            "hooks": hook_counter(),
        }
        self._provisional.begin(self._cell)
        self._tracks = True
        return Parcel(pickle.dumps(envelope, 5), packed.files)

    def _describe(self, name: str, value: Any, reason: str, size: int | None = None) -> dict[str, Any]:
        key = f"{name}@{self._cell}"
        if reason:
            self._pins[key] = value
        return {"type": type(value).__name__, "key": key, "reason": reason, "size": size, "label": name}

    # -- looking in from outside

    def peek(self, name: str, attributes: tuple[str, ...] = (), limit: int = _LIMIT, whole: bool = False) -> Parcel:
        """A free-standing copy of a value of this rank's, for `Home.unpack`.

        Args:
            name: a name, or the key of a handle.
            attributes: to be read one after the other.
            whole: bring together what is spread over the ranks, as `reach_of` told; all ranks must.
        """
        there, self._reached = self._reached, Reached()
        try:
            if whole:
                gather(there.values, keep=True)
            return peek(self._encoder, self._table, self._look, self.rank, name, attributes, limit)
        finally:
            let_go(there.values)

    def reach_of(self, name: str, attributes: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """Before `peek`: what is spread over the ranks in this value; None for nothing."""
        self._reached = Reached()
        if not self._table.kinds.spread:
            return None
        spread.put_back_in_parts(self._sharded)
        try:
            value = self._look(name, name.split("@")[0])
            for attribute in attributes:
                value = getattr(value, attribute)
        except Exception:  # peek tells it
            return None
        walked = self._table.walker.walk([("", value)], light=True, place=True)
        self._reached = reached(walked, {}, None)
        return self._reached.report() if self._reached.values else None

    def raised(self, error: BaseException, *, lead: bool, limit: int = _LIMIT) -> list[Parcel]:
        """The exception that ended the run, for `Home.raised`; after `give`. More than one parcel: the second is for a
        notebook that does not know what the run has made.

        Args:
            lead: what this rank has made and changed is the notebook's; of another rank only functions and classes are.
        """
        tokens, objects = self._table.tokens, self._table.objects

        def known(key: int) -> Token:
            token = tokens.get(key)
            return token if token is not None and (lead or isinstance(objects[token], type | FunctionType)) else None

        def before(key: int) -> Token:
            token = known(key)
            return None if isinstance(token, tuple) and token[0] == self._cell else token

        parcels = [pack_raised(self._encoder, self._table, error, known, limit)]
        if known(id(type(error))) != before(id(type(error))):
            parcels.append(pack_raised(self._encoder, self._table, error, before, limit))
        return parcels

    def _look(self, key: str, name: str) -> Any:
        value = self._pins.get(key, MISSING)
        if value is MISSING:
            value = self.namespace.get(name, MISSING)
        if value is MISSING:
            raise NameError(f"name {name!r} is not defined on rank {self.rank}")
        return value
