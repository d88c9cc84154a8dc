"""The members of the Accelerator that say where its rank stands in the grid of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbdist import context
from nbdist.parallelism import ParallelismConfig

if TYPE_CHECKING:
    import torch

    from nbdist.processes import AcceleratorState


class Grid:
    """Reads `self.state`."""

    state: AcceleratorState

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the grid; None where the model is whole on every rank and no sizes were given."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of the strategy; None where it has none."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded: then tensor parallelism may be within."""
        return self.state.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index among those that share its layers."""
        return self._index("tp", "tensor_parallel_rank")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's index among those that share its sequences."""
        return self._index("cp", "context_parallel_rank")

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's replica."""
        return self._index("dp_replicate", "data_parallel_rank")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's index among those that hold the shards of its replica."""
        return self._index("dp_shard", "data_parallel_shard_rank")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Always 0: no strategy has stages.

        Raises:
            RuntimeError: there are no sizes.
        """
        return self._index("", "pipeline_parallel_rank")

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """In this block, around forward and backward of a step, `buffers` are this rank's part of their sequences, and
        attention goes over the parts of all. Without `cp_size` above 1 nothing changes.

        Args:
            buffers: what has a sequence, whole: inputs, labels, position embeddings. Changed in place.
            buffer_seq_dims: the dimension of each that is the sequence's; its length is a multiple of 2 * cp_size.
            no_restore_buffers: those of them that need not be whole again behind the block.

        Raises:
            ValueError: these do not go together.
        """
        config = self.state.parallelism_config
        if config is None or not config.cp_enabled:
            yield
            return
        given = context.checked(buffers, buffer_seq_dims, no_restore_buffers, config.sizes["cp"])
        way = getattr(config.cp_handler, "cp_comm_strategy", None) or "allgather"
        with context.sharing(config.mesh(self.state._process)["cp"], way, *given):
            yield

    def _index(self, dimension: str, asked: str) -> int:
        config = self.state.parallelism_config
        if config is None:
            raise RuntimeError(
                f"Accelerator.{asked}: this Accelerator has no sizes. Make it with parallelism_config="
                "nbdist.ParallelismConfig(...), or with strategy='fsdp', 'hybrid' or 'tp'"
            )
        return config.coordinates(self.state.process_index).get(dimension, 0)
