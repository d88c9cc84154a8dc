"""How objects travel between the notebook and the ranks.

Two copies of one object graph are kept equal: `Home` in the notebook's process, `Away` in each rank. Both know
objects by tokens, keep a shallow snapshot of each, and send what has changed as changes that are written into the
very objects on the other side.

Names are looked up when they are first used (PEP 562): a training script needs `exporters`, and nothing else of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.shipping.away import Away as Away
    from nbdist.shipping.errors import CannotReceive as CannotReceive
    from nbdist.shipping.errors import CannotShip as CannotShip
    from nbdist.shipping.errors import NeedsMore as NeedsMore
    from nbdist.shipping.errors import NotEnoughMemory as NotEnoughMemory
    from nbdist.shipping.exporters import register_exporter as register_exporter
    from nbdist.shipping.handle import RankedValue as RankedValue
    from nbdist.shipping.handle import handle_facts as handle_facts
    from nbdist.shipping.home import Home as Home
    from nbdist.shipping.memory import Parcel as Parcel
    from nbdist.shipping.names import Names as Names
    from nbdist.shipping.names import analyse as analyse
    from nbdist.shipping.names import code_names as code_names
    from nbdist.shipping.reaching import Unforeseen as Unforeseen
    from nbdist.shipping.shipment import Arrival as Arrival
    from nbdist.shipping.shipment import Shipment as Shipment

_HOME_OF = {
    "Arrival": "shipment",
    "Away": "away",
    "CannotReceive": "errors",
    "CannotShip": "errors",
    "Home": "home",
    "Names": "names",
    "NeedsMore": "errors",
    "NotEnoughMemory": "errors",
    "Parcel": "memory",
    "RankedValue": "handle",
    "Shipment": "shipment",
    "Unforeseen": "reaching",
    "analyse": "names",
    "code_names": "names",
    "handle_facts": "handle",
    "register_exporter": "exporters",
}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'nbdist.shipping' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nbdist.shipping.{home}"), name)
    return value
