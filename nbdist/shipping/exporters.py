"""How special types travel: the registry through which strategies (and others) tell shipping about their wrappers.

A target is a type or its full name, "package.module.Class", so that nothing has to be imported to name it; it is
matched over the MRO of a value's type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exporter:
    """What is known of a type.

    Attributes:
        unwrap: gives the object that stands for a wrapper in the notebook; the rank keeps the wrapper.
        stays: why an object of this type never leaves its process.
        strip: gives the names of instance attributes that are left out of every message, from the instance's
            `__dict__`.
    """

    unwrap: Callable[[Any], Any] | None = None
    stays: str | None = None
    strip: Callable[[dict[str, Any]], Collection[str]] | None = None


_BY_TYPE: dict[type, Exporter] = {}
_BY_NAME: dict[str, Exporter] = {}
_version = [0]


def register_exporter(
    target: type | str,
    *,
    unwrap: Callable[[Any], Any] | None = None,
    stays: str | None = None,
    strip: Callable[[dict[str, Any]], Collection[str]] | None = None,
) -> None:
    """Say how values of a type (and of its subclasses) travel. A later registration for the same target replaces the
    earlier.

    Args:
        target: the type, or "module.QualName" of one that need not be imported.
        unwrap: what stands for the object in the notebook (`DDP` -> its `.module`). The rank keeps the wrapper, and
            reading the name in the next cell gives the wrapper again.
        stays: a reason, in words; the object is always a handle in the notebook.
        strip: the instance attributes to leave out of messages; each side keeps its own.
    """
    exporter = Exporter(unwrap, stays, strip)
    if isinstance(target, str):
        _BY_NAME[target] = exporter
    else:
        _BY_TYPE[target] = exporter
    _version[0] += 1


def registry_version() -> int:
    """Rises with every registration, for caches by type."""
    return _version[0]


def by_path() -> list[str]:
    """The types that are registered by their full name."""
    return sorted(_BY_NAME)


def exporter_of(cls: type) -> Exporter | None:
    """The exporter for instances of a class: that of the nearest registered class in its MRO, `strip` inherited
    separately.
    """
    found: Exporter | None = None
    for base in cls.__mro__:
        exporter = _BY_TYPE.get(base) or _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if exporter is None:
            continue
        if exporter.unwrap is not None or exporter.stays is not None:
            return exporter
        found = found or exporter
    return found


def _foreign_forward(attributes: dict[str, Any]) -> Collection[str]:
    # accelerate patches `forward` into the instance for mixed precision: the rank needs the patch, nobody else can
    # have it.
    return ("forward", "_original_forward") if "_original_forward" in attributes else ()


def _module_of(wrapper: Any) -> Any:
    return wrapper.module


def _compiled_module(wrapper: Any) -> Any:
    return wrapper._orig_mod


_SHARDED = "its parameters are sharded over the ranks"
register_exporter("torch.nn.modules.module.Module", strip=_foreign_forward)
register_exporter("torch.nn.parallel.distributed.DistributedDataParallel", unwrap=_module_of)
register_exporter("torch._dynamo.eval_frame.OptimizedModule", unwrap=_compiled_module)
register_exporter("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", stays=_SHARDED)
register_exporter("torch._subclasses.fake_tensor.FakeTensor", stays="it is a fake tensor, without memory")
register_exporter("torch._C._distributed_c10d.ProcessGroup", stays="a process group belongs to its process")
register_exporter("torch.distributed.distributed_c10d.ProcessGroup", stays="a process group belongs to its process")
register_exporter("torch.distributed.device_mesh.DeviceMesh", stays="a device mesh belongs to its process")
register_exporter("accelerate.accelerator.Accelerator", stays="an accelerator belongs to its process")
register_exporter("lightning.fabric.fabric.Fabric", stays="it is set up for the ranks")
register_exporter("lightning.pytorch.trainer.trainer.Trainer", stays="it is set up for the ranks")
# A bar pickles, and then its copy cannot be rebuilt.
register_exporter("tqdm.std.tqdm", stays="a progress bar belongs to its process")
