"""Tensors and modules that are spread over the ranks: each rank has a part, and the notebook has all of it.

Such a tensor (a DTensor) travels as the whole that it is a part of. Whether a part has changed each rank sees by
itself; to make the whole, all ranks must meet, so they first tell the notebook what they have (`reaching.Reached`), and
it says what is gathered (`nbdist.launchers.gathering`). What the notebook sends is a whole, and each rank cuts its part
out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import MethodType
from typing import Any

from nbdist.shipping.chunks import Patch
from nbdist.shipping.errors import StaysOnRank
from nbdist.shipping.kinds_memory import Content, Moved, TensorKind
from nbdist.shipping.lazy import torch_if_loaded

NOT_GATHERED = "its parts are on several ranks and were not brought together"


def is_spread(value: Any) -> bool:
    """Is this a DTensor?"""
    cls = _dtensor()
    return cls is not None and isinstance(value, cls)


def is_spread_class(cls: type) -> bool:
    found = _dtensor()
    return found is not None and issubclass(cls, found)


def _dtensor() -> Any:
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


# ---------------------------------------------------------------------- what is known of each tensor


class Image:
    """What a rank knows of the whole of a tensor.

    Attributes:
        local: the hash of this rank's part when all ranks last had the whole in common with the notebook.
        digest: the whole's, as `TensorKind.digest` gives it; None where this rank has not seen it.
        whole: it itself, while it is packed.
        reason: why it was not gathered.
    """

    __slots__ = ("digest", "local", "reason", "whole")

    def __init__(self) -> None:
        self.local: Any = None
        self.digest: Any = None
        self.whole: Any = None
        self.reason = NOT_GATHERED


@cache
def _images() -> Any:
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def image_of(value: Any) -> Image:
    images = _images()
    image: Image | None = images.get(value)
    if image is None:
        image = images[value] = Image()
    return image


def part_of(value: Any) -> Any:
    """This rank's part: the tensor that the optimizer steps on."""
    return value.detach().to_local()


def local_digest(value: Any) -> Any:
    part = part_of(value)
    return tuple(part.shape), TENSOR.digest(part)


def whole_of(value: Any) -> Any:
    """The whole that was gathered.

    Raises:
        StaysOnRank: it was not.
    """
    image = image_of(value)
    if image.whole is None:
        raise NotGathered(image.reason)
    return image.whole


class NotGathered(StaysOnRank):
    """The whole of a tensor is not here."""


def own_of(value: Any) -> dict[str, Any]:
    """The user's attributes of such a tensor."""
    return {name: content for name, content in value.__dict__.items() if name not in _TORCHS}


_TORCHS = frozenset({"_is_param", "_fsdp_orig_uid"})


def is_parameter(value: Any) -> bool:
    torch: Any = torch_if_loaded()
    return isinstance(value, torch.nn.Parameter)


# ---------------------------------------------------------------------- a whole that comes from the notebook


def cut(whole: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """This rank's part of a tensor, without a word to the others. A view of `whole` as a rule."""
    at = mesh.get_coordinate()
    part = whole
    if at is None:
        return whole.new_empty(0)
    cuts = [(dim, one) for dim, one in enumerate(placements) if hasattr(one, "dim")]
    # A strided shard is cut from what the mesh's later dimensions have left of the tensor: they go first.
    ordered = [one for one in cuts if not hasattr(one[1], "split_factor")]
    ordered += [one for one in reversed(cuts) if hasattr(one[1], "split_factor")]
    for dim, placement in ordered:
        pieces = part.chunk(mesh.size(dim), placement.dim)
        part = pieces[at[dim]] if at[dim] < len(pieces) else part.narrow(placement.dim, 0, 0)
    if any(one.is_partial() and at[dim] for dim, one in enumerate(placements)):
        part = part * 0  # the parts of a sum: the first has all of it
    return part


def spread_like(whole: Any, like: Any) -> Any:
    """A tensor that is spread as another one, with the values of a whole of the same shape."""
    torch: Any = torch_if_loaded()
    with torch.no_grad():
        part = cut(whole.detach(), like.device_mesh, like.placements)
        part = part.to(part_of(like).device, copy=True, memory_format=torch.contiguous_format)
    return _dtensor().from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=tuple(like.stride())
    )


def write_whole(value: Any, whole: Any) -> None:
    """Put a whole's values into this rank's part."""
    torch: Any = torch_if_loaded()
    if tuple(whole.shape) != tuple(value.shape):
        raise TypeError(
            f"it is spread over the ranks with the shape {tuple(value.shape)}, and the notebook has given it "
            f"{tuple(whole.shape)}: prepare the model again"
        )
    with torch.no_grad():
        part_of(value).copy_(cut(whole, value.device_mesh, value.placements))


def agreed(value: Any, digest: Any) -> None:
    """This tensor is now as the notebook's, which has this digest."""
    image = image_of(value)
    image.local, image.digest = local_digest(value), digest


# ---------------------------------------------------------------------- modules that a strategy has changed


def home_class(cls: type) -> type:
    """The class that a module of this class has in the notebook: the user's, below what fully_shard puts on top."""
    return _home.get(cls) or cls


_home: dict[type, type] = {}


def note_class(cls: type) -> None:
    """A class of modules is met for the first time."""
    sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharding is not None and issubclass(cls, sharding):
        _home[cls] = next(base for base in cls.__mro__ if not issubclass(base, sharding))


_RUNTIME = ("torch.distributed.", "nbdist.")


def _from_the_runtime(function: Any) -> bool:
    function = getattr(function, "hook", function)  # torch's own wrapper of a hook
    function = getattr(function, "__func__", function)
    function = getattr(function, "func", function)  # functools.partial
    scope = getattr(function, "__globals__", None)
    name = scope.get("__name__", "") if scope is not None else type(function).__module__
    return str(name).startswith(_RUNTIME)


def hides_hooks(parts: Iterable[Any]) -> bool:
    """Is any of the hooks in these dicts a strategy's? They belong to its rank."""
    return any(part and any(map(_from_the_runtime, part.values())) for part in parts if isinstance(part, dict))


def put_there_by_a_strategy(attributes: dict[str, Any]) -> list[str]:
    """Names of a module's attributes that a strategy has set on it."""
    if _IN_PLACE.isdisjoint(attributes):
        return []
    found = [name for name in attributes if name in _IN_PLACE or name.startswith("__composable_api_")]
    found += [
        name
        for name, content in attributes.items()
        if type(content) is MethodType and _from_the_runtime(content)  # register_fsdp_forward_method
    ]
    return found


_IN_PLACE = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied"})


def is_managed(value: Any) -> bool:
    """Is this a module that fully_shard looks after?"""
    return hasattr(type(value), "named_parameters") and "_is_fsdp_managed_module" in value.__dict__


def put_back_in_parts(modules: Iterable[Any]) -> None:
    """After a forward without a backward a module may still have whole parameters in the place of its parts."""
    for module in modules:
        sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        if sharding is not None and isinstance(module, sharding):
            module.reshard()


def whole_states(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Put parts in the place of whole tensors in an optimizer's state of parameters that are spread; (whole, new)."""
    torch: Any = torch_if_loaded()
    for parameter, state in optimizer.state.items():
        if not is_spread(parameter) or not isinstance(state, dict):
            continue
        for name, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or is_spread(value):
                continue
            if value.dim() and value.shape == parameter.shape:
                state[name] = spread_like(value, parameter)
                yield value, state[name]


# ---------------------------------------------------------------------- the kind


class SpreadKind(TensorKind):
    """A DTensor: a tensor's letter, facts and changes, so that the other side sees a tensor."""

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        torch: Any = torch_if_loaded()
        own = own_of(value)
        references = (
            value.grad if value.is_leaf else None,
            torch.nn.Parameter if is_parameter(value) else torch.Tensor,
            *own.values(),
        )
        if light:
            return (), references
        image = image_of(value)
        if digest is not None:
            image.digest = digest
        facts = (tuple(value.shape), value.dtype, value.layout, value.requires_grad and value.is_leaf, image.digest)
        return (*facts, tuple(own), None), references

    def shape(self, value: Any) -> Any:
        return tuple(value.shape), str(value.dtype), tuple(own_of(value))

    def digest(self, value: Any) -> Any:
        return image_of(value).digest

    def change(self, value: Any, old: Any, new: Any) -> Any:
        content: Any = None
        if old is None or old[0] != self.letter or old[1][:3] != new[1][:3] or old[1][4] != new[1][4]:
            content = Content(whole_of(value))
        grad = value.grad if value.is_leaf and not leaves_gradient(value) else None
        return content, value.requires_grad and value.is_leaf, grad, own_of(value)

    def apply(self, value: Any, change: Any) -> None:
        content, requires_grad, grad, own = change
        if type(content) is Patch:
            whole = _dense(content)
            content.write(whole.data_ptr())
            content = whole
        if content is not None:
            write_whole(value, content.value if type(content) is Moved else content)
        if value.is_leaf:
            if value.requires_grad != requires_grad:
                value.requires_grad_(requires_grad)
            if value.grad is not grad:
                value.grad = grad if grad is None or is_spread(grad) else _in_parts(grad, value)
        for name in [name for name in own_of(value) if name not in own]:
            del value.__dict__[name]
        value.__dict__.update({name: content for name, content in own.items() if name not in _TORCHS})


def leaves_gradient(value: Any) -> bool:
    """Is its gradient to be left on the ranks this time, although it comes itself?"""
    grad = value.grad if value.is_leaf else None
    return is_spread(grad) and image_of(grad).whole is None and image_of(grad).reason is not NOT_GATHERED


def _dense(patch: Patch) -> Any:
    torch: Any = torch_if_loaded()
    dtype, shape, stride, _ = patch.form
    return torch.empty_strided(shape, stride, dtype=dtype)


def _in_parts(whole: Any, like: Any) -> Any:
    new = spread_like(whole, like)
    exchanged.append((whole, new))
    return new


exchanged: list[tuple[Any, Any]] = []  # tensors that came whole, with those that stand for them on this rank


TENSOR = TensorKind()
SPREAD = SpreadKind()
