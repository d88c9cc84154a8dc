"""How objects travel between the notebook and the ranks.

Two copies of one object graph are kept equal: `Home` in the notebook's process, `Away` in each rank. Both know
objects by tokens, keep a shallow snapshot of each, and send what has changed as changes that are written into the
very objects on the other side.
"""

from __future__ import annotations

from nbdist.shipping.away import Away
from nbdist.shipping.errors import CannotReceive, CannotShip, NeedsMore, NotEnoughMemory
from nbdist.shipping.exporters import register_exporter
from nbdist.shipping.handle import RankedValue, handle_facts
from nbdist.shipping.home import Home
from nbdist.shipping.memory import Parcel
from nbdist.shipping.names import Names, analyse, code_names
from nbdist.shipping.shipment import Arrival, Shipment

__all__ = [
    "Arrival",
    "Away",
    "CannotReceive",
    "CannotShip",
    "Home",
    "Names",
    "NeedsMore",
    "NotEnoughMemory",
    "Parcel",
    "RankedValue",
    "Shipment",
    "analyse",
    "code_names",
    "handle_facts",
    "register_exporter",
]
