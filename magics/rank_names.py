"""Names that a rank gives to a cell unless the notebook defines them."""

INJECTED = frozenset({"rank", "local_rank", "world_size", "device", "ranks"})
