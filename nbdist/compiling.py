"""torch.compile through `prepare`: what is asked for, and how a model gets it."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import torch

from nbdist import checks, views
from nbdist.kwargs import DynamoBackend, TorchDynamoPlugin
from nbdist.precision import Precision

_PREFIX = "ACCELERATE_DYNAMO_"  # as Accelerate's launchers set it
_YES, _NO = ("1", "true", "yes", "y", "on", "t"), ("0", "false", "no", "n", "off", "f", "")


@dataclasses.dataclass(frozen=True)
class Compiling:
    """How prepared models are compiled.

    Attributes:
        options: the arguments of torch.compile.
        regional: compile repeated blocks, each kind once, instead of the whole model.
    """

    options: dict[str, Any]
    regional: bool = False


def resolve(backend: str | None, plugin: TorchDynamoPlugin | None) -> Compiling | None:
    """What the arguments ask for, and where they say nothing the environment (ACCELERATE_DYNAMO_BACKEND, _MODE,
    _USE_FULLGRAPH, _USE_DYNAMIC, _USE_REGIONAL_COMPILATION). None: nothing is compiled.

    Raises:
        ValueError: both arguments, or a value that is not known.
    """
    wants = "a nbdist.utils.TorchDynamoPlugin"
    checks.fields(checks.kind(plugin, TorchDynamoPlugin | None, "Accelerator: dynamo_plugin", wants))
    if not callable(backend):
        checks.kind(backend, str | None, "Accelerator: dynamo_backend", "the name of a backend of torch.compile")
    if backend is not None and plugin is not None:
        raise ValueError("dynamo_backend and dynamo_plugin are both given; the plugin has a backend of its own")
    asked = plugin or TorchDynamoPlugin(backend=backend or os.environ.get(f"{_PREFIX}BACKEND") or DynamoBackend.NO)
    name: Any = asked.backend if callable(asked.backend) else str(asked.backend).lower()
    if name == DynamoBackend.NO or asked.disable:
        return None
    if not callable(name) and name not in tuple(DynamoBackend):
        known = {*DynamoBackend, *torch.compiler.list_backends(exclude_tags=())}  # which imports dynamo
        if name not in known:
            raise ValueError(f"dynamo_backend={name!r}: takes one of {', '.join(sorted(known))}")
    mode = asked.mode or os.environ.get(f"{_PREFIX}MODE")
    full, dynamic, regional = asked.fullgraph, asked.dynamic, asked.use_regional_compilation
    options = {
        "backend": name,
        "mode": None if mode in (None, "", "default") else mode,
        "fullgraph": full if full is not None else _flag("USE_FULLGRAPH"),
        "dynamic": dynamic if dynamic is not None else _flag("USE_DYNAMIC"),
        "options": asked.options,
    }
    return Compiling(
        {key: value for key, value in options.items() if value is not None},
        regional or bool(_flag("USE_REGIONAL_COMPILATION")),
    )


def view(model: torch.nn.Module, precision: Precision, compiling: Compiling | None) -> torch.nn.Module:
    """What is called in place of the user's module; the module itself where there is nothing to add.

    A module that the user has compiled is not compiled again.
    """
    whole = None
    if compiling is not None and not _is_compiled(model):
        whole = compiling.options
        if compiling.regional and compile_blocks(model, compiling.options):
            whole = None
    return views.view(model, precision, whole) if precision.mixed or whole is not None else model


def _is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _flag(name: str) -> bool | None:
    text = os.environ.get(_PREFIX + name)
    if text is None:
        return None
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(f"{_PREFIX}{name}={text!r}: takes true or false")
    return text.lower() in _YES


def compile_blocks(model: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Compile the repeated blocks of a model in place, as `block.compile()` does. Returns whether there are any.

    Blocks are the modules of one class that a ModuleList or a Sequential has more than once; torch compiles the first
    of a kind, and the others use what it has. A block inside a block is part of that.
    """
    found = False
    waiting = [model]
    while waiting:
        children = list(waiting.pop().children())
        kinds = Counter(type(child) for child in children)
        for child in children:
            if kinds[type(child)] > 1 and any(True for _ in child.children()):
                found = True
                if getattr(child, "_compiled_call_impl", None) is None:
                    child.compile(**options)
            else:
                waiting.append(child)
    return found
