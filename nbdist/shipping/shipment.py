"""What is on its way: a shipment to the ranks, and what arrived from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbdist.shipping.handle import RankedValue
from nbdist.shipping.kinds import Snapshot
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import Packed
from nbdist.shipping.table import Token
from nbdist.shipping.walk import Node


@dataclass
class Shipment:
    """What is ready to be sent. Nothing counts as known until `Home.commit`.

    Attributes:
        parcels: (ranks, parcel) pairs; every rank is in exactly one.
        names: all names that the cell can see, given and found.
        left_out: names of `maybe` (or found in functions) that could not be shipped, and why.
        size: bytes.
        notes: one line each, for the user: what is left behind although the cell runs.
        modules: the user's modules whose version is news to the ranks.
        trivial: nothing is bound or changed, so that a rank cannot fail to decode it.
    """

    parcels: list[tuple[tuple[int, ...], Parcel]]
    names: frozenset[str]
    left_out: dict[str, str]
    size: int
    trivial: bool
    notes: list[str] = field(default_factory=list)
    modules: dict[str, Any] = field(default_factory=dict, repr=False)
    plans: list[Plan] = field(default_factory=list, repr=False)
    settled: dict[str, Any] = field(default_factory=dict, repr=False)
    asked: dict[str, Any] = field(default_factory=dict, repr=False)  # what `Home.ship` was called with


@dataclass
class Arrival:
    """What came back.

    Attributes:
        bound: names that were bound in the notebook.
        deleted: names that were removed.
        handles: names whose value stays on the ranks.
        notes: one line each, for the user.
        extra: what the lead passed as `extra`.
    """

    bound: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    handles: dict[str, RankedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    extra: Any = None


@dataclass
class Plan:
    """What some ranks get."""

    ranks: tuple[int, ...]
    binds: dict[str, Any]
    updates: dict[Token, tuple[Node, Snapshot | None]]  # the node, and the snapshot that these ranks have
    packed: Packed = field(default_factory=Packed)
    patches: dict[Token, tuple[int, int]] = field(default_factory=dict)  # bytes that are sent in pieces, of how many
