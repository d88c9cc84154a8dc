"""Names of Accelerate that a later version brings: asked for now, they say so."""

from __future__ import annotations

# By the module that will have them.
_NAMES = {
    "nbdist": "cpu_offload cpu_offload_with_hook DeepSpeedPlugin disk_offload dispatch_model "
    "FullyShardedDataParallelPlugin infer_auto_device_map init_empty_weights init_on_device "
    "load_checkpoint_and_dispatch load_checkpoint_in_model ParallelismConfig prepare_pippy",
    "nbdist.utils": "AimTracker align_module_device AORecipeKwargs BnbQuantizationConfig calculate_maximum_sizes "
    "ClearMLTracker CometMLTracker compute_module_sizes ComputeEnvironment DummyOptim DummyScheduler "
    "find_tied_parameters GeneralTracker get_balanced_memory get_max_layer_size load_and_quantize_model "
    "load_state_dict LoggerType MegatronLMPlugin merge_fsdp_weights MLflowTracker register_tracker_class "
    "retie_parameters set_module_tensor_to_device set_numa_affinity SwanLabTracker TensorBoardTracker TERecipeKwargs "
    "TrackioTracker WandBTracker write_basic_config",
}


def missing(module: str, name: str, there: list[str]) -> Exception:
    """The error for a name that a module of this package does not have.

    Args:
        there: the names that it has.

    Returns:
        An AttributeError; for a name that comes later an ImportError, because `from module import name` shows its own
        text in place of an AttributeError's.
    """
    if name in _NAMES[module].split():
        return ImportError(f"{module}.{name} is not available in this version of nbdist yet", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}; it has: {', '.join(sorted(there))}")
