"""Gradients of DDP that are sent compressed: torch's own communication hooks, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.kwargs import DDPCommunicationHookType as Kind

OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
_POWER = (Kind.POWER_SGD, Kind.BATCHED_POWER_SGD)
_WRAPPERS = (Kind.NO, Kind.FP16, Kind.BF16)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a hook out of those of DDP, which keep the rest. Empty: no hook.

    Raises:
        ValueError: a name that is not known, or a combination that would do nothing.
    """
    given = {name: options.pop(name) for name in OPTIONS if name in options}
    hook = _kind("comm_hook", given.get("comm_hook", Kind.NO), tuple(Kind))
    wrapper = _kind("comm_wrapper", given.get("comm_wrapper", Kind.NO), _WRAPPERS)
    state = dict(given.get("comm_state_option") or {})
    if hook is Kind.NO and wrapper is not Kind.NO:
        raise ValueError(
            f"comm_wrapper={wrapper.value!r} changes what a comm_hook sends, and there is none. To send gradients as "
            f"{wrapper.value} give comm_hook={wrapper.value!r}"
        )
    if state and hook not in _POWER:
        raise ValueError(
            f"comm_state_option={state} is for comm_hook='power_sgd' or 'batched_power_sgd', and comm_hook is "
            f"{hook.value!r}"
        )
    return {} if hook is Kind.NO else {"comm_hook": hook, "comm_wrapper": wrapper, "comm_state_option": state}


def _kind(name: str, value: Any, allowed: tuple[Kind, ...]) -> Kind:
    text = getattr(value, "value", value)
    if text not in [kind.value for kind in allowed]:
        raise ValueError(f"{name}={text!r}: takes one of {', '.join(kind.value for kind in allowed)}")
    return Kind(text)


def register(model: DistributedDataParallel, hook: dict[str, Any]) -> None:
    """Compress this wrapper's gradients as `checked` has said."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    functions: dict[Kind, Callable[..., Any]] = {
        Kind.FP16: default_hooks.fp16_compress_hook,
        Kind.BF16: default_hooks.bf16_compress_hook,
        Kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[Kind, Callable[..., Any]] = {
        Kind.FP16: default_hooks.fp16_compress_wrapper,
        Kind.BF16: default_hooks.bf16_compress_wrapper,
    }
    kind, options = hook["comm_hook"], hook["comm_state_option"]
    if kind is Kind.BATCHED_POWER_SGD:
        _refuse_a_broken_one(powerSGD_hook)
    function = functions[kind]
    if hook["comm_wrapper"] is not Kind.NO:
        function = wrappers[hook["comm_wrapper"]](function)
    state = None
    if kind in _POWER:
        try:
            state = powerSGD_hook.PowerSGDState(model.process_group, **options)
        except TypeError as error:
            raise ValueError(f"comm_state_option={options}: {error}") from None
    model.register_comm_hook(state, _renamed(function))


def _refuse_a_broken_one(hooks: Any) -> None:
    """The batched hook hands single matrices to a function that takes stacks of them alone, since
    https://github.com/pytorch/pytorch/pull/75157: it fails in the first iteration that is compressed, the thousandth.
    """
    orthogonalize = getattr(hooks, "_orthogonalize", None)
    if orthogonalize is None:
        return
    try:
        orthogonalize(torch.ones(2, 1))
    except AssertionError:
        raise NotImplementedError(
            f"comm_hook='batched_power_sgd': this hook fails in torch {torch.__version__} itself. Use "
            "comm_hook='power_sgd'; comm_state_option={'batch_tensors_with_same_shape': True} batches there too"
        ) from None


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook under our name: by its name torch refuses the one for bfloat16 without NCCL, and gloo can do it."""

    def compressed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return function(state, bucket)

    compressed.__annotations__.clear()  # torch compares them with classes, and here they are strings
    return compressed


def start_again(state: Any) -> None:
    """What a hook remembers, as at its start: buckets have changed, and ranks may have been stopped in different
    iterations. Of other hooks' states nothing is known, and they stay.
    """
    if type(state).__name__ != "PowerSGDState":
        return
    for remembered in ("error_dict", "p_memory_dict", "q_memory_dict"):
        getattr(state, remembered).clear()
    state.iter = 0
    state.rng.seed(0)  # any, if it is the same on all ranks
