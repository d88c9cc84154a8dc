"""A face: names of `accelerate.utils`, from where they live here. Each is looked up when it is first used (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.batch_size import find_executable_batch_size as find_executable_batch_size
    from nbdist.checkpoint.merging import merge_fsdp_weights as merge_fsdp_weights
    from nbdist.collectives import broadcast as broadcast
    from nbdist.collectives import broadcast_object_list as broadcast_object_list
    from nbdist.collectives import gather as gather
    from nbdist.collectives import gather_object as gather_object
    from nbdist.collectives import pad_across_processes as pad_across_processes
    from nbdist.collectives import reduce as reduce
    from nbdist.data.move import send_to_device as send_to_device
    from nbdist.kwargs import AutocastKwargs as AutocastKwargs
    from nbdist.kwargs import DataLoaderConfiguration as DataLoaderConfiguration
    from nbdist.kwargs import DDPCommunicationHookType as DDPCommunicationHookType
    from nbdist.kwargs import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from nbdist.kwargs import DynamoBackend as DynamoBackend
    from nbdist.kwargs import GradientAccumulationPlugin as GradientAccumulationPlugin
    from nbdist.kwargs import GradScalerKwargs as GradScalerKwargs
    from nbdist.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
    from nbdist.kwargs import PrecisionType as PrecisionType
    from nbdist.kwargs import ProfileKwargs as ProfileKwargs
    from nbdist.kwargs import ProjectConfiguration as ProjectConfiguration
    from nbdist.kwargs import TorchDynamoPlugin as TorchDynamoPlugin
    from nbdist.local_sgd import LocalSGD as LocalSGD
    from nbdist.logging import get_logger as get_logger
    from nbdist.messages import DistributedOperationException as DistributedOperationException
    from nbdist.parallelism import ParallelismConfig as ParallelismConfig
    from nbdist.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
    from nbdist.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
    from nbdist.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from nbdist.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from nbdist.rng import RNGType as RNGType
    from nbdist.rng import synchronize_rng_state as synchronize_rng_state
    from nbdist.rng import synchronize_rng_states as synchronize_rng_states
    from nbdist.saving import load as load
    from nbdist.saving import save as save
    from nbdist.state import DistributedType as DistributedType
    from nbdist.state import set_seed as set_seed
    from nbdist.state import wait_for_everyone as wait_for_everyone
    from nbdist.strategies.unwrapping import extract_model_from_parallel as extract_model_from_parallel

# Each home with its names.
_HOMES = {
    "nbdist.batch_size": "find_executable_batch_size",
    "nbdist.checkpoint.merging": "merge_fsdp_weights",
    "nbdist.collectives": "broadcast broadcast_object_list gather gather_object pad_across_processes reduce",
    "nbdist.data.move": "send_to_device",
    "nbdist.kwargs": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
    "DynamoBackend GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs PrecisionType ProfileKwargs "
    "ProjectConfiguration TorchDynamoPlugin",
    "nbdist.local_sgd": "LocalSGD",
    "nbdist.logging": "get_logger",
    "nbdist.messages": "DistributedOperationException",
    "nbdist.parallelism": "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig "
    "TorchTensorParallelPlugin",
    "nbdist.plugins": "FullyShardedDataParallelPlugin",
    "nbdist.rng": "RNGType synchronize_rng_state synchronize_rng_states",
    "nbdist.saving": "load save",
    "nbdist.state": "DistributedType set_seed wait_for_everyone",
    "nbdist.strategies.unwrapping": "extract_model_from_parallel",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise import_module("nbdist.later").missing(__name__, name, __all__)
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
