"""The kind of sources of random numbers."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import xxhash

from nbdist.shipping.kinds import Kind, Snapshot


class GeneratorKind(Kind):
    """Sources of random numbers: the state is read and written through the type's own calls."""

    letter = "R"

    def state(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Generator):
            return bytes(value.get_state().tolist())
        if numpy is not None and isinstance(value, numpy.random.Generator):
            return value.bit_generator.state
        if numpy is not None and isinstance(value, numpy.random.RandomState):
            return value.get_state(legacy=False)
        if numpy is not None and isinstance(value, numpy.random.BitGenerator):
            return value.state
        return value.getstate()

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        return () if light else (xxhash.xxh3_64_intdigest(pickle.dumps(self.state(value), 5)),), ()

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        return self.state(value)

    def apply(self, value: Any, change: Any) -> None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Generator):
            value.set_state(torch.tensor(list(change), dtype=torch.uint8))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            value.bit_generator.state = change
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            value.set_state(change)
        elif numpy is not None and isinstance(value, numpy.random.BitGenerator):
            value.state = change
        else:
            value.setstate(change)
