"""In how many ways a model and its batches are spread over the ranks, and the device mesh of it.

The ranks stand in a grid. Its dimensions are, the outermost first: `dp_replicate` (whole replicas), `dp_shard`
(parameters in shards), `cp` (a sequence in parts) and `tp` (layers in parts): ranks beside each other share layers.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import TYPE_CHECKING, Any

from nbdist import alone, checks, messages, variables
from nbdist.state import Process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
# Those over which a batch is split; the ranks of the others see the same one.
DATA = ("dp_replicate", "dp_shard")
# Where launchers say that a configuration is in the environment, and how its variables begin.
USED, PREFIX = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
_WAYS = ("allgather", "alltoall")


@dataclasses.dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    `enable_async_tp` has no effect: torch.compile decides that by itself. `plan`: how layers are split, a dict from the
    names of modules, or patterns of them with `*`, to styles of torch.distributed.tensor.parallel ("colwise",
    "rowwise", `SequenceParallel()` ...). Default: the plan that the model brings, its attribute `tp_plan` or
    `_tp_plan`.
    """

    enable_async_tp: bool = False
    plan: Any = None

    def __post_init__(self) -> None:
        checks.fields(self)


@dataclasses.dataclass
class TorchContextParallelConfig:
    """Options of context parallelism.

    `cp_comm_strategy`: how ranks get the keys and values of the others: "allgather" at once, or "alltoall" in turn.
    Default: the environment variable PARALLELISM_CONFIG_CP_COMM_STRATEGY, else "allgather".
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = variables.one_of(f"{PREFIX}CP_COMM_STRATEGY", _WAYS) or _WAYS[0]
        _one_of(self.cp_comm_strategy, "TorchContextParallelConfig.cp_comm_strategy", _WAYS)


@dataclasses.dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism over so many ranks: the same as `ParallelismConfig(tp_size=...)`.

    `torch_device_mesh` has no effect: the mesh is made once, from all sizes.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        self.tp_size = _size("TorchTensorParallelPlugin.tp_size", self.tp_size)


@dataclasses.dataclass
class ParallelismConfig:
    """The sizes of the grid of ranks. Their product is the number of ranks.

    Args:
        dp_replicate_size: replicas, among which gradients are averaged. Default 1, or what is left of the ranks where
            the strategy "hybrid" is asked for.
        dp_shard_size: ranks that hold the shards of one replica (FSDP). Default 1, or what is left of the ranks where
            the model is sharded.
        tp_size: ranks that share each layer (tensor parallel). Default 1.
        cp_size: ranks that share each sequence (context parallel). Default 1.
        cp_backend: "torch".
        sp_size, sp_backend, sp_handler: of sequence parallelism by DeepSpeed, which is not available yet: size 1.
        tp_handler: a `TorchTensorParallelConfig`. cp_handler: a `TorchContextParallelConfig`.

    What is not given comes from a launcher's environment variables (PARALLELISM_CONFIG_DP_SHARD_SIZE ...).

    Raises:
        TypeError: a size is no whole number, or a handler of another class. ValueError: a size below 1, or a backend
            that is not known. NotImplementedError: sp_size above 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: None = None

    def __post_init__(self) -> None:
        # The dimensions whose size was not given; it may be looked at again later.
        self.left_open = {one for one in vars(self).get("left_open", ()) if getattr(self, f"{one}_size") == 1}
        for name in (*DIMENSIONS, "sp"):
            size = getattr(self, f"{name}_size")
            if size is None:
                size = variables.whole(f"{PREFIX}{name}_size".upper(), 1)
            if size is None:
                self.left_open.add(name)
            setattr(self, f"{name}_size", _size(f"ParallelismConfig.{name}_size", 1 if size is None else size))
        for field, known in (("cp_backend", ("torch",)), ("sp_backend", ("deepspeed",))):
            chosen = getattr(self, field) or variables.one_of(f"{PREFIX}{field.upper()}", known) or known[0]
            setattr(self, field, _one_of(chosen, f"ParallelismConfig.{field}", known))
        if self.sizes["sp"] > 1 or self.sp_handler is not None:
            raise NotImplementedError(
                f"ParallelismConfig(sp_size={self.sp_size}) is DeepSpeed's sequence parallelism, and not available in "
                "this version of nbdist yet; cp_size shares sequences by torch's own means"
            )
        for handler, kind in (("tp_handler", TorchTensorParallelConfig), ("cp_handler", TorchContextParallelConfig)):
            wants = f"a nbdist.utils.{kind.__name__}"
            checks.kind(getattr(self, handler), kind | None, f"ParallelismConfig.{handler}", wants)
            if self.sizes[handler[:2]] > 1 and getattr(self, handler) is None:
                setattr(self, handler, kind())

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension, by its name."""
        return {name: getattr(self, f"{name}_size") for name in (*DIMENSIONS, "sp")}

    @property
    def total_size(self) -> int:
        """How many ranks it is for."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """How many ways a batch is split."""
        return math.prod(self.sizes[name] for name in DATA)

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks see the same samples."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        return False

    def filled(self, ranks: int, name: str | None = None) -> ParallelismConfig:
        """A copy for so many ranks.

        Args:
            name: the dimension that takes what is left of the ranks, where its size was not given.

        Raises:
            ValueError: the sizes do not make up the ranks.
        """
        sizes: dict[str, Any] = {f"{one}_size": size for one, size in self.sizes.items() if one != "sp"}
        others = math.prod(size for one, size in self.sizes.items() if one != name)
        if name in self.left_open and ranks % others == 0:
            sizes[f"{name}_size"] = ranks // others
        new = dataclasses.replace(self, **sizes)
        new.check(ranks)
        return new

    def check(self, ranks: int) -> None:
        """Raise a ValueError unless the sizes make up so many ranks."""
        if self.total_size == ranks:
            return
        told = " * ".join(f"{name}_size {size}" for name, size in self.sizes.items() if name != "sp")
        counted = f"there {'is 1 rank' if ranks == 1 else f'are {ranks} ranks'}"
        way = f"start {self.total_size} ranks, or give sizes whose product is {ranks}"
        if ranks % self.total_size == 0:
            shards, replicas = (self.sizes[name] * (ranks // self.total_size) for name in ("dp_shard", "dp_replicate"))
            way = f"dp_shard_size={shards} makes {ranks}, and so does dp_replicate_size={replicas}"
        raise ValueError(f"ParallelismConfig: {told} = {self.total_size}, and {counted}: {way}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands in the grid: its index in each dimension, by name."""
        found = {}
        for name in reversed(DIMENSIONS):
            rank, found[name] = divmod(rank, self.sizes[name])
        return found

    def data_parallel_rank(self, rank: int) -> int:
        """Which part of a split batch is this rank's."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.sizes["dp_shard"] + at["dp_shard"]

    def mesh(self, process: Process, *also: str) -> DeviceMesh:
        """The device mesh, made once in a process for each shape; all ranks call it alike.

        Args:
            process: the facts about this process; one that is alone gets a process group of itself.
            *also: dimensions that it has even where their size is 1. Default: those larger than 1, or "dp_shard".

        Raises:
            ValueError: the sizes do not make up the ranks. DistributedOperationException: ranks have other sizes.
        """
        self.check(process.world_size)
        sizes = self.sizes
        names = tuple(name for name in DIMENSIONS if sizes[name] > 1 or name in also) or ("dp_shard",)
        return _mesh(process, names, tuple(sizes[name] for name in names))


# By device, names and shape; for the process group whose ranks they are over.
_meshes: dict[tuple[str, tuple[str, ...], tuple[int, ...]], DeviceMesh] = {}
_group: weakref.ref[Any] | None = None


def _mesh(process: Process, names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
    global _group
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    alone.start(process)
    if _group is None or _group() is not dist.group.WORLD:
        _meshes.clear()
        _group = weakref.ref(dist.group.WORLD)
    key = process.device.type, names, shape
    # A rank that was stopped while it was made has none; then all make another.
    answers = messages.agree("making a device mesh", (key, key in _meshes))
    if any(answer[0] != key for answer in answers):
        told = "; ".join(f"rank {rank}: {_told(names, shape)}" for rank, ((_, names, shape), _) in enumerate(answers))
        raise messages.DistributedOperationException(f"the ranks make device meshes of different sizes: {told}")
    if not all(there for _, there in answers):
        _meshes[key] = init_device_mesh(process.device.type, shape, mesh_dim_names=names)
    return _meshes[key]


def _told(names: tuple[str, ...], shape: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


def _size(where: str, value: Any) -> int:
    return checks.whole(value, where, "a number of ranks, 1 or more", 1)


def _one_of(value: Any, where: str, known: tuple[str, ...]) -> str:
    if value not in known:
        wants = " or ".join(map(repr, known))
        if not isinstance(value, str):
            raise checks.wrong(where, value, wants)
        raise ValueError(f"{where} is {checks.short(value)}; it takes {wants}")
    return value
