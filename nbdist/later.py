"""Names of Accelerate that are not here: those that a later version brings, and those that have another one in their
place. Asked for, they say so.
"""

from __future__ import annotations

import opcode
import sys

# By what will have them.
_LATER = {
    "nbdist": "cpu_offload cpu_offload_with_hook DeepSpeedPlugin disk_offload dispatch_model "
    "infer_auto_device_map init_empty_weights init_on_device "
    "load_checkpoint_and_dispatch load_checkpoint_in_model prepare_pippy",
    "nbdist.utils": "AimTracker align_module_device AORecipeKwargs BnbQuantizationConfig calculate_maximum_sizes "
    "ClearMLTracker CometMLTracker compute_module_sizes ComputeEnvironment DummyOptim DummyScheduler "
    "find_tied_parameters GeneralTracker get_balanced_memory get_max_layer_size load_and_quantize_model "
    "load_state_dict LoggerType MegatronLMPlugin MLflowTracker register_tracker_class "
    "retie_parameters set_module_tensor_to_device set_numa_affinity SwanLabTracker TensorBoardTracker TERecipeKwargs "
    "TrackioTracker WandBTracker write_basic_config",
    "Accelerator": "fp8_backend get_tracker init_trackers log log_with trackers",
}

_GRADIENTS = (
    "flags of the last batch go stale, so nothing holds them. Accelerator.sync_gradients says whether this micro-batch "
    "completes its window, gather_for_metrics leaves out what was no sample"
)
_INSTEAD = {
    "nbdist": {},
    "nbdist.utils": {
        "AcceleratorState": "there is no global state: PartialState() reads this process, accelerator.state also the "
        "precision",
        "GradientState": _GRADIENTS,
        "tqdm": "use tqdm's own: tqdm(..., disable=not accelerator.is_main_process)",
    },
    "Accelerator": {
        "gradient_state": _GRADIENTS,
        "lomo_backward": "LOMO steps inside of backward, before gradients are those of all ranks",
        "native_amp": "Accelerator.mixed_precision says in what models compute",
    },
}


def names(home: str) -> frozenset[str]:
    """What a later version brings there."""
    return frozenset(_LATER[home].split())


def missing(home: str, name: str, there: list[str]) -> Exception:
    """The error for a name that a module of this package does not have, for its `__getattr__` to raise.

    Args:
        there: the names that it has.

    Returns:
        An AttributeError. Only where `from module import name` asks for a name that comes later or has another one in
        its place an ImportError: Python would put a text of its own in place of an AttributeError's.
    """
    told = _told(home, name)
    if told is None:
        return AttributeError(f"module {home!r} has no attribute {name!r}; it has: {', '.join(sorted(there))}")
    asking = sys._getframe(2)
    if asking.f_lasti >= 0 and asking.f_code.co_code[asking.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(told, name=home)
    return AttributeError(told)


def missing_member(name: str, owner: object) -> AttributeError:
    """The error for a member that the Accelerator does not have."""
    told = _told("Accelerator", name) or f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(told, name=name, obj=owner)


def _told(home: str, name: str) -> str | None:
    if name in names(home):
        return f"{home}.{name} is not available in this version of nbdist yet"
    instead = _INSTEAD[home].get(name)
    if home == "nbdist.utils" and name.startswith("is_") and name.endswith("available"):
        instead = (
            "importlib.util.find_spec says whether a package is there, torch.cuda.is_available whether a device is"
        )
    return None if instead is None else f"{home}.{name} is not there: {instead}"
