"""The device mesh: whatever the sizes, right on every rank or one error; made once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist import ParallelismConfig, state
from nbdist.messages import DistributedOperationException
from nbdist.parallelism import DIMENSIONS
from tests.ranks import run_ranks


def _every_size(rank: int, ranks: int) -> tuple[int, int]:
    made = refused = 0
    process = state.current()
    for sizes in itertools.product((1, 2, 3, 4), repeat=4):
        config = ParallelismConfig(**{f"{name}_size": size for name, size in zip(DIMENSIONS, sizes, strict=True)})
        product = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        try:
            mesh = config.mesh(process)
        except ValueError as error:
            told = f"= {product}, and there are {ranks} ranks"
            assert product != ranks and told in str(error), (sizes, error)
            refused += 1
            continue
        made += 1
        assert product == ranks and mesh is config.mesh(process), sizes
        at = config.coordinates(rank)
        names = tuple(name for name, size in zip(DIMENSIONS, sizes, strict=True) if size > 1)
        assert mesh.mesh_dim_names == names and mesh.shape == tuple(size for size in sizes if size > 1)
        for name in names:
            assert mesh.get_local_rank(name) == at[name], (sizes, name)
            beside = [one for one in range(ranks) if {**config.coordinates(one), name: 0} == {**at, name: 0}]
            assert dist.get_process_group_ranks(mesh.get_group(name)) == beside, (sizes, name)
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=mesh.get_group(name))
            assert total.item() == sum(beside), (sizes, name)
    return made, refused


@pytest.mark.ranks
def test_any_sizes_give_a_right_mesh_or_one_error() -> None:
    assert run_ranks(_every_size, 4) == [(10, 246)] * 4


def _not_alike(rank: int, ranks: int) -> tuple[str, bool, Any]:
    process = state.current()
    mine = ParallelismConfig(dp_shard_size=2) if rank == 0 else ParallelismConfig(tp_size=2)
    with pytest.raises(DistributedOperationException) as raised:
        mine.mesh(process)
    both = ParallelismConfig(dp_shard_size=2)
    mesh = both.mesh(process)
    if rank == 1:  # as if it had been stopped while it made one
        from nbdist import parallelism

        parallelism._meshes.clear()
    again = ParallelismConfig(dp_shard_size=2).mesh(process)
    total = torch.ones(1)
    dist.all_reduce(total, group=again.get_group())
    return str(raised.value), again is not mesh, total.item()


@pytest.mark.ranks
def test_ranks_that_differ_are_named_and_a_mesh_that_one_has_not_is_made_again() -> None:
    for told, new, total in run_ranks(_not_alike, 2):
        assert told == "the ranks make device meshes of different sizes: rank 0: dp_shard 2; rank 1: tp 2"
        assert new and total == 2


def _alone(rank: int, ranks: int) -> tuple[Any, Any, bool]:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        state.os.environ.pop(name)
    process = state.current()
    mesh = ParallelismConfig().mesh(process)
    tensor = ParallelismConfig().mesh(process, "dp_shard", "tp")
    before = ParallelismConfig().mesh(state.current()) is mesh
    dist.destroy_process_group()  # new ranks: another mesh
    assert ParallelismConfig().mesh(state.current()) is not mesh
    return mesh.mesh_dim_names, tensor.mesh_dim_names, before


@pytest.mark.ranks
def test_one_process_alone_has_a_mesh_too() -> None:
    assert run_ranks(_alone, 1) == [(("dp_shard",), ("dp_shard", "tp"), True)]
