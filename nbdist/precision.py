"""Mixed precision: a value that is handed in, not a class tree.

Parameters stay float32; what autocast chooses is computed in half precision. fp16 needs a loss scaler besides
(nbdist.scaling).
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nbdist import checks
from nbdist.kwargs import PRECISION_VARIABLE, AutocastKwargs, PrecisionType

OUTPUTS = ("float32", "keep")

_DTYPES = {PrecisionType.FP16: torch.float16, PrecisionType.BF16: torch.bfloat16}
_HALF = frozenset(_DTYPES.values())


@dataclasses.dataclass(frozen=True)
class Precision:
    """In what a model computes.

    Attributes:
        kind: "no", "bf16" or "fp16", as the user writes it.
        device_type: where: autocast is by device.
        keep_outputs: leave what a model gives in half precision. Default: it becomes float32, so that a loss is
            computed in full precision.
        enabled, cache_enabled: those of torch.autocast.
    """

    kind: PrecisionType = PrecisionType.NO
    device_type: str = "cpu"
    keep_outputs: bool = False
    enabled: bool = True
    cache_enabled: bool | None = None

    @property
    def mixed(self) -> bool:
        return self.kind is not PrecisionType.NO

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, where autocast has a choice."""
        return _DTYPES.get(self.kind, torch.float32)

    def autocast(self) -> torch.autocast:
        """A new context in which operations run in this precision."""
        return torch.autocast(self.device_type, _DTYPES[self.kind], self.enabled, self.cache_enabled)

    def context(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """`autocast` with other options; without mixed precision a context that changes nothing."""
        if not self.mixed:
            return nullcontext()
        if options is None:
            return self.autocast()
        return dataclasses.replace(self, enabled=options.enabled, cache_enabled=options.cache_enabled).autocast()

    @property
    def active(self) -> bool:
        """Whether the code that asks runs in this precision already."""
        kind = self.device_type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is _DTYPES[self.kind]

    def output(self, value: Any) -> Any:
        """What a model has given, as the user gets it."""
        return value if self.keep_outputs else in_float32(value)


def resolve(
    asked: str | None, device: torch.device, output_dtype: str = "float32", autocast: AutocastKwargs | None = None
) -> Precision:
    """The precision of an Accelerator.

    Args:
        asked: "no", "bf16" or "fp16", or a member of PrecisionType. Default: the environment variable
            ACCELERATE_MIXED_PRECISION, else "no".
        device: where it computes.
        output_dtype: "float32" or "keep".
        autocast: options of torch.autocast.

    Raises:
        ValueError: a value that is not known. NotImplementedError: fp8. RuntimeError: the device cannot.
    """
    checks.kind(
        asked, str | None, "Accelerator: mixed_precision", f"one of {', '.join(map(repr, map(str, PrecisionType)))}"
    )
    given = "mixed_precision" if asked is not None else PRECISION_VARIABLE
    text = str(asked if asked is not None else os.environ.get(PRECISION_VARIABLE) or "no").lower()
    if text not in tuple(PrecisionType):
        raise ValueError(f"{given}={text!r}: takes one of {', '.join(one for one in PrecisionType)}")
    kind = PrecisionType(text)
    if output_dtype not in OUTPUTS:
        raise ValueError(f"output_dtype={checks.short(output_dtype)}: takes one of {', '.join(OUTPUTS)}")
    if kind is PrecisionType.FP8:
        # Its place is here: a kind of its own, whose layers are replaced before the model is wrapped.
        raise NotImplementedError(
            f"{given}='fp8' is not available in this version of nbdist yet: it replaces layers, which autocast does "
            "not. Use 'bf16'"
        )
    options = autocast or AutocastKwargs()
    precision = Precision(kind, device.type, output_dtype == "keep", options.enabled, options.cache_enabled)
    if precision.mixed and (obstacle := lacking(precision)) is not None:
        raise RuntimeError(f"{given}={text!r}: {obstacle}")
    return precision


def lacking(precision: Precision) -> str | None:
    """Why this device cannot compute so, and what to use; None when it can. It is asked by one tiny product."""
    kind, device = precision.kind, precision.device_type
    other = {PrecisionType.BF16: "'fp16' or 'no'", PrecisionType.FP16: "'bf16' or 'no'"}[kind]
    name = f"{torch.cuda.get_device_name()} (cuda)" if device == "cuda" else device
    if device == "cuda" and kind is PrecisionType.BF16 and not torch.cuda.is_bf16_supported(False):
        if not torch.cuda.is_bf16_supported():
            return f"the device, {name}, has no bfloat16 (it needs compute capability 8.0); use {other}"
        warnings.warn(
            f"mixed_precision='bf16': the device, {name}, has no bfloat16 of its own, and torch does it in software, "
            "slowly. mixed_precision='fp16' is fast there",
            stacklevel=4,
        )
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with dataclasses.replace(precision, enabled=True).autocast(), torch.no_grad():
                one = torch.ones(1, 1, device=device)
                found = torch.mm(one, one).dtype
    except RuntimeError as error:
        return f"the device, {name}, cannot: {str(error).splitlines()[0]}. Use {other}"
    if found is _DTYPES[kind]:
        return None
    why = f": {str(said[0].message).splitlines()[0]}" if said else ""
    return f"torch {torch.__version__} has no such autocast for the device, {name}{why}. Use {other}"


def in_float32(value: Any) -> Any:
    """The half-precision tensors inside a value as float32; the very object where there are none.

    Tuples, lists, mappings, dataclasses and what derives from them (named tuples, a library's own output classes) are
    gone through. Parameters stay what they are.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF and not isinstance(value, torch.nn.Parameter) else value
    if isinstance(value, tuple | list):
        items = [in_float32(item) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        if type(value) is list or type(value) is tuple:
            return type(value)(items)
        if isinstance(value, tuple):  # a named tuple takes its fields one by one
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        new: Any = copy.copy(value)
        new[:] = items
        return new
    if isinstance(value, Mapping):
        changed = _changed(value.items())
        if not changed:
            return value
        if type(value) is dict:
            return {**value, **changed}
        new = copy.copy(value)
        for key, item in changed.items():
            new[key] = item
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        changed = _changed((name, getattr(value, name)) for name in names)
        if not changed:
            return value
        new = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(new, name, item)  # also where it is frozen
        return new
    return value


def _changed(items: Any) -> dict[Any, Any]:
    """Those of the items that become other objects."""
    new = {}
    for key, item in items:
        other = in_float32(item)
        if other is not item:
            new[key] = other
    return new
