"""The Accelerator's arguments: which are known, which come later, and what the handlers say."""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any, TypeVar

from nbdist import checks, kwargs, state
from nbdist.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from nbdist.plugins import FullyShardedDataParallelPlugin

H = TypeVar("H")

_HANDLERS = (
    kwargs.AutocastKwargs,
    kwargs.DistributedDataParallelKwargs,
    kwargs.GradScalerKwargs,
    kwargs.InitProcessGroupKwargs,
    kwargs.ProfileKwargs,
)


class Handlers:
    """The `kwargs_handlers`: at most one of each kind.

    Raises:
        TypeError: an object of another kind. ValueError: two of one kind.
    """

    def __init__(self, handlers: list[Any] | None) -> None:
        self._by_type: dict[type, Any] = {}
        known = ", ".join(one.__name__ for one in _HANDLERS)
        wants = f"a list of options, at most one of each of {known}"
        checks.kind(handlers, list | tuple | None, "Accelerator: kwargs_handlers", wants)
        for handler in handlers or ():
            if not isinstance(handler, _HANDLERS):
                raise TypeError(f"kwargs_handlers: {checks.short(handler)} is not known; there is {known}")
            if type(handler) in self._by_type:
                raise ValueError(f"kwargs_handlers has two {type(handler).__name__}; give one")
            self._by_type[type(handler)] = checks.fields(handler)

    def get(self, kind: type[H]) -> H | None:
        """The handler of this kind, if one was given."""
        return self._by_type.get(kind)


def given(handler: Any) -> dict[str, Any]:
    """A handler's fields that are not None."""
    if handler is None:
        return {}
    return {
        field.name: value
        for field in dataclasses.fields(handler)
        if (value := getattr(handler, field.name)) is not None
    }


def without_effect(name: str, why: str) -> None:
    """Say once that an argument changes nothing."""
    state.note_once(f"{name} has no effect: {why}")


def loading(config: kwargs.DataLoaderConfiguration | None, split_batches: bool) -> kwargs.DataLoaderConfiguration:
    """How loaders are prepared, from both places where it may be said.

    Raises:
        TypeError: the configuration is something else, or its seed no integer.
    """
    split_batches = checks.flag(split_batches, "Accelerator: split_batches")
    if config is None:
        return kwargs.DataLoaderConfiguration(split_batches=split_batches)
    checks.kind(
        config, kwargs.DataLoaderConfiguration, "Accelerator: dataloader_config", "a nbdist.DataLoaderConfiguration"
    )
    if config.data_seed is not None:
        config = dataclasses.replace(config, data_seed=state.whole_seed(config.data_seed, "data_seed"))
    checks.fields(config)
    if not config.even_batches:
        without_effect("even_batches=False", "tails are uneven anyway, and weighed")
    if not config.use_seedable_sampler:
        without_effect("use_seedable_sampler=False", "the order always is a function of (seed, epoch)")
    if config.custom_classes:
        without_effect("custom_classes", "a prepared loader is of the user's own class")
    return dataclasses.replace(config, split_batches=config.split_batches or split_batches)


def window_steps(steps: Any) -> int:
    """A number of micro-batches a window.

    Raises:
        TypeError: it is no whole number. ValueError: it is less than 1.
    """
    return checks.whole(
        steps, "gradient_accumulation_steps", "how many micro-batches make one step, a whole number of at least 1", 1
    )


def accumulation(steps: int, plugin: kwargs.GradientAccumulationPlugin | None) -> dict[str, Any]:
    """The options of accumulation windows.

    Raises:
        ValueError: the argument and the plugin name different numbers of steps.
    """
    wants = "a nbdist.utils.GradientAccumulationPlugin"
    checks.kind(plugin, kwargs.GradientAccumulationPlugin | None, "Accelerator: gradient_accumulation_plugin", wants)
    checks.fields(plugin)
    if plugin is None:
        asked = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")  # a launcher's: it comes first, as there
        return {"steps": window_steps(int(asked) if asked and asked.strip().isdigit() else asked or steps)}
    if plugin.num_steps is not None and steps not in (1, plugin.num_steps):
        raise ValueError(
            f"gradient_accumulation_steps={steps}, and the gradient_accumulation_plugin says {plugin.num_steps}: "
            "give one"
        )
    return {
        "steps": window_steps(steps if plugin.num_steps is None else plugin.num_steps),
        "with_loader": plugin.sync_with_dataloader,
        "each_batch": plugin.sync_each_batch,
    }


def refuse_later(**later: Any) -> None:
    """Arguments of Accelerate that a later version brings: None asks for what happens now."""
    for name, value in later.items():
        if value is not None:
            told = checks.short(value)
            raise NotImplementedError(f"Accelerator({name}={told}) is not available in this version of nbdist yet")


def refuse_unknown(unknown: dict[str, Any], accelerator: type) -> None:
    """Arguments that nobody knows."""
    if unknown:
        known = [
            name for name, one in inspect.signature(accelerator).parameters.items() if one.kind is not one.VAR_KEYWORD
        ]
        name = next(iter(unknown))
        raise TypeError(f"Accelerator has no argument {name!r}; it has: {', '.join(known)}")


def strategy(name: str | None, known: tuple[str, ...]) -> str | None:
    """The name of a strategy.

    Raises:
        TypeError: it is something else.
    """
    return checks.kind(name, str | None, "Accelerator: strategy", f"one of {', '.join(map(repr, known))}")


def sharding(
    plugin: FullyShardedDataParallelPlugin | None,
    tp_plugin: TorchTensorParallelPlugin | None,
    config: ParallelismConfig | None,
) -> tuple[FullyShardedDataParallelPlugin | None, ParallelismConfig | None]:
    """How models are sharded and over what sizes, looked at once more: fields may have been set since.

    Raises:
        TypeError: an argument of another class. ValueError: torch_tp_plugin and parallelism_config differ.
    """
    checks.kind(
        plugin,
        FullyShardedDataParallelPlugin | None,
        "Accelerator: fsdp_plugin",
        "a nbdist.FullyShardedDataParallelPlugin",
    )
    checks.kind(config, ParallelismConfig | None, "Accelerator: parallelism_config", "a nbdist.ParallelismConfig")
    wants = "a nbdist.utils.TorchTensorParallelPlugin"
    checks.kind(tp_plugin, TorchTensorParallelPlugin | None, "Accelerator: torch_tp_plugin", wants)
    for one in (plugin, tp_plugin, config):
        if one is not None:
            one.__post_init__()
    if tp_plugin is not None and tp_plugin.tp_size > 1:
        if config is not None and config.tp_size != tp_plugin.tp_size:
            raise ValueError(
                f"torch_tp_plugin has tp_size={tp_plugin.tp_size}, and the parallelism_config {config.tp_size}: "
                "give one"
            )
        config = config or ParallelismConfig(tp_size=tp_plugin.tp_size)
    return plugin, config


def project(
    folder: str | os.PathLike[str] | None, configuration: kwargs.ProjectConfiguration | None
) -> kwargs.ProjectConfiguration:
    """The project's folders: those of the configuration; `folder` where it names none."""
    wants = "a nbdist.utils.ProjectConfiguration"
    checks.kind(configuration, kwargs.ProjectConfiguration | None, "Accelerator: project_config", wants)
    checks.kind(folder, str | os.PathLike | None, "Accelerator: project_dir", "the path of a folder")
    checks.fields(configuration)
    chosen = configuration or kwargs.ProjectConfiguration()
    if folder is not None and chosen.project_dir is None:
        chosen.project_dir = os.fspath(folder)
    if chosen.logging_dir is None:
        chosen.logging_dir = chosen.project_dir
    return chosen


def note_rng_types(rng_types: list[Any] | None) -> None:
    """Say once that they have no effect.

    Raises:
        ValueError: one that does not exist.
    """
    checks.kind(rng_types, list | tuple | None, "Accelerator: rng_types", "a list of kinds of generators")
    if rng_types:
        from nbdist.rng import kind_of

        told = [str(kind_of(one)) for one in rng_types]
        state.note_once(
            f"rng_types={told} has no effect: the order of prepared loaders is a function of (seed, epoch). "
            "nbdist.synchronize_rng_states makes generators of your own equal"
        )
