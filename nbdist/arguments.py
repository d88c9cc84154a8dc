"""The Accelerator's arguments: which are known, which come later, and what the handlers say."""

from __future__ import annotations

import dataclasses
import operator
import os
from typing import Any, TypeVar

from nbdist import kwargs, state

H = TypeVar("H")

# Accelerate's arguments that a later version brings, with the values that mean what happens now.
_LATER: dict[str, tuple[Any, ...]] = {
    "deepspeed_plugin": (None,),
    "deepspeed_plugins": (None,),
    "fsdp_plugin": (None,),
    "megatron_lm_plugin": (None,),
    "log_with": (None,),
    "parallelism_config": (None,),
}

# The public names of Accelerate's Accelerator that a later version brings.
LATER_MEMBERS = frozenset(
    {
        "get_state_dict",
        "get_tracker",
        "init_trackers",
        "load_state",
        "log",
        "register_for_checkpointing",
        "register_load_state_pre_hook",
        "register_save_state_pre_hook",
        "save_model",
        "save_state",
    }
)

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
        for handler in handlers or ():
            if not isinstance(handler, _HANDLERS):
                known = ", ".join(one.__name__ for one in _HANDLERS)
                raise TypeError(f"kwargs_handlers: {type(handler).__name__} is not known; there is {known}")
            if type(handler) in self._by_type:
                raise ValueError(f"kwargs_handlers has two {type(handler).__name__}; give one")
            self._by_type[type(handler)] = handler

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
    if config is None:
        return kwargs.DataLoaderConfiguration(split_batches=split_batches)
    if not isinstance(config, kwargs.DataLoaderConfiguration):
        raise TypeError(f"dataloader_config is of type {type(config).__name__}; it must be a DataLoaderConfiguration")
    if config.data_seed is not None:
        config = dataclasses.replace(config, data_seed=state.whole_seed(config.data_seed, "data_seed"))
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
        ValueError: it is not a whole number of at least 1.
    """
    try:
        number = operator.index(steps)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(
            f"gradient_accumulation_steps is {steps!r}; it is how many micro-batches make one step, at least 1"
        )
    return number


def accumulation(steps: int, plugin: kwargs.GradientAccumulationPlugin | None) -> dict[str, Any]:
    """The options of accumulation windows.

    Raises:
        ValueError: the argument and the plugin name different numbers of steps.
    """
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


def refuse_positional(positional: tuple[Any, ...]) -> None:
    if positional:
        raise TypeError(
            "Accelerator takes its arguments by name only, such as Accelerator(cpu=True); given without a name: "
            + ", ".join(map(repr, positional))
        )


def refuse_later(later: dict[str, Any]) -> None:
    """Arguments that are not there: an error, unless the value asks for what happens anyway."""
    for name, value in later.items():
        if name not in _LATER:
            known = (
                "device_placement, split_batches, cpu, dataloader_config, rng_types, project_dir, project_config, "
                "mixed_precision, output_dtype, dynamo_backend, dynamo_plugin, kwargs_handlers, strategy, "
                "gradient_accumulation_steps, gradient_accumulation_plugin, step_scheduler_with_optimizer"
            )
            raise TypeError(f"Accelerator has no argument {name!r}; it has: {known}")
        if not any(value is harmless or value == harmless for harmless in _LATER[name]):
            raise NotImplementedError(f"Accelerator({name}={value!r}) is not available in this version of nbdist yet")


def project(
    folder: str | os.PathLike[str] | None, configuration: kwargs.ProjectConfiguration | None
) -> kwargs.ProjectConfiguration:
    """The project's folders: those of the configuration; `folder` where it names none."""
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
    if rng_types:
        from nbdist.rng import kind_of

        told = [str(kind_of(one)) for one in rng_types]
        state.note_once(
            f"rng_types={told} has no effect: the order of prepared loaders is a function of (seed, epoch). "
            "nbdist.synchronize_rng_states makes generators of your own equal"
        )
