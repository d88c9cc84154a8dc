"""nbdist: a notebook cell that runs on every device you have, and leaves your notebook as if it had run here.

In a notebook::

    %load_ext nbdist

    %%distributed -n 2
    model, loader = accelerator.prepare(model, loader)

In a script::

    import nbdist
    nbdist.launch(train, config, ranks=2)

Importing this package imports neither torch nor IPython: names are looked up when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist import logging as logging
    from nbdist import utils as utils
    from nbdist.accelerator import Accelerator as Accelerator
    from nbdist.batch_size import find_executable_batch_size as find_executable_batch_size
    from nbdist.data.resume import skip_first_batches as skip_first_batches
    from nbdist.kwargs import AutocastKwargs as AutocastKwargs
    from nbdist.kwargs import DataLoaderConfiguration as DataLoaderConfiguration
    from nbdist.kwargs import DDPCommunicationHookType as DDPCommunicationHookType
    from nbdist.kwargs import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from nbdist.kwargs import GradScalerKwargs as GradScalerKwargs
    from nbdist.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
    from nbdist.kwargs import ProfileKwargs as ProfileKwargs
    from nbdist.launchers.launch import launch as launch
    from nbdist.launchers.notebook import debug_launcher as debug_launcher
    from nbdist.launchers.notebook import notebook_launcher as notebook_launcher
    from nbdist.local_sgd import LocalSGD as LocalSGD
    from nbdist.parallelism import ParallelismConfig as ParallelismConfig
    from nbdist.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from nbdist.processes import PartialState as PartialState
    from nbdist.rng import synchronize_rng_states as synchronize_rng_states
    from nbdist.state import DistributedType as DistributedType
    from nbdist.state import set_seed as set_seed

__version__ = "0.1.0.dev0"

_HOME_OF = {
    "Accelerator": "nbdist.accelerator",
    "AutocastKwargs": "nbdist.kwargs",
    "DDPCommunicationHookType": "nbdist.kwargs",
    "DataLoaderConfiguration": "nbdist.kwargs",
    "DistributedDataParallelKwargs": "nbdist.kwargs",
    "DistributedType": "nbdist.state",
    "FullyShardedDataParallelPlugin": "nbdist.plugins",
    "GradScalerKwargs": "nbdist.kwargs",
    "InitProcessGroupKwargs": "nbdist.kwargs",
    "LocalSGD": "nbdist.local_sgd",
    "ParallelismConfig": "nbdist.parallelism",
    "PartialState": "nbdist.processes",
    "ProfileKwargs": "nbdist.kwargs",
    "debug_launcher": "nbdist.launchers.notebook",
    "find_executable_batch_size": "nbdist.batch_size",
    "launch": "nbdist.launchers.launch",
    "notebook_launcher": "nbdist.launchers.notebook",
    "set_seed": "nbdist.state",
    "skip_first_batches": "nbdist.data.resume",
    "synchronize_rng_states": "nbdist.rng",
}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605
_MODULES = ("logging", "utils")  # there after a bare `import nbdist`


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise import_module("nbdist.later").missing(__name__, name, __all__)
    if home.startswith("nbdist.launchers"):
        import_module("nbdist.system").refuse_windows()
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nbdist`: register the magics and warm the supervisor in the background. torch is not imported."""
    import_module("nbdist.system").refuse_windows()
    import_module("nbdist.magics").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbdist`: end every rank and take the magics away."""
    import_module("nbdist.magics").unload(shell)
