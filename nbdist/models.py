"""The members of the Accelerator that are about models: how they are prepared, in what they compute, and back again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from nbdist import arguments, checks, compiling, precision, views
from nbdist.accumulation import Accumulation
from nbdist.checkpoint.naming import Prepared
from nbdist.kwargs import AutocastKwargs, GradScalerKwargs, TorchDynamoPlugin
from nbdist.scaling import Scaler
from nbdist.strategies import Strategy
from nbdist.strategies.unwrapping import extract_model_from_parallel


class Models:
    """Preparing, precision, compilation. Reads what the Accelerator's constructor makes."""

    device: torch.device
    device_placement: bool
    _handlers: arguments.Handlers
    _strategy: Strategy
    _windows: Accumulation
    _named: Prepared
    _precision: precision.Precision
    _compiling: compiling.Compiling | None

    def _compute(
        self,
        mixed_precision: str | None,
        output_dtype: str,
        dynamo_backend: str | None,
        dynamo_plugin: TorchDynamoPlugin | None,
    ) -> None:
        """Set up in what models compute, and how they are compiled. Raises what the constructor raises."""
        options = self._handlers.get(AutocastKwargs)
        self._precision = precision.resolve(mixed_precision, self.device, output_dtype, options)
        self._compiling = compiling.resolve(dynamo_backend, dynamo_plugin)

    def _scale(self) -> None:
        """Give fp16 its loss scaler."""
        if self._precision.kind == "fp16":
            scaling = self._handlers.get(GradScalerKwargs)
            self._windows.scaler = Scaler(self.device, scaling, self._windows.holds_gradients)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """The model on this rank's device, wrapped by the strategy.

        Args:
            model: it is changed in nothing but its device; `unwrap_model` gives this very object back.
            device_placement: whether it is brought to the device. Default: as the Accelerator was told.
            evaluation_mode: nothing will be trained: it is not wrapped. Precision and compilation are as ever.
        """
        checks.kind(model, torch.nn.Module, "prepare_model: model", "a torch.nn.Module")
        self._named.note("models", model, self._strategy.unwrap(views.bare(model)))
        model = views.bare(model)
        evaluates = checks.flag(evaluation_mode, "prepare_model: evaluation_mode")
        placed = checks.flag(device_placement, "prepare_model: device_placement", self.device_placement)
        if placed and (evaluates or not self._strategy.places):
            model.to(self.device)
        if evaluates:
            return self._seen(model)
        with self._windows.preparing():
            wrapped = self._strategy.wrap(model, self._seen)
            self._windows.models[id(model)] = wrapped
            self._windows.doubt()
        return wrapped

    def _seen(self, model: torch.nn.Module) -> torch.nn.Module:
        """What is called in place of the user's module: a view, where precision or compilation ask for one."""
        return compiling.view(model, self._precision, self._compiling)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's own model object.

        Args:
            model: what `prepare` returned, or torch.compile of it, or a bare model (which comes back as it is).
            keep_fp32_wrapper: no effect: forward is never replaced.
            keep_torch_compile: False also takes off a torch.compile that the user had put on before. What `prepare`
                has compiled comes off in any case, but for blocks that were compiled in place (regional compilation).
        """
        checks.kind(model, torch.nn.Module, "unwrap_model: model", "what prepare returned, or a torch.nn.Module")
        keep_torch_compile = checks.flag(keep_torch_compile, "unwrap_model: keep_torch_compile", True)
        inner = self._strategy.unwrap(views.bare(model))
        return extract_model_from_parallel(inner, keep_fp32_wrapper, keep_torch_compile)

    @property
    def mixed_precision(self) -> str:
        """In what prepared models compute: "no", "bf16" or "fp16"."""
        return self._precision.kind.value

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context in which torch computes as prepared models do; without mixed precision it changes nothing.

        Args:
            autocast_handler: options for this context alone. Default: those of the Accelerator.
        """
        if autocast_handler is not None:
            where, wants = "autocast: autocast_handler", "a nbdist.AutocastKwargs"
            checks.fields(checks.kind(autocast_handler, AutocastKwargs, where, wants))
        return self._precision.context(autocast_handler)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None in other precisions. Its scale changes at the backward after a step."""
        scaler = self._windows.scaler
        return None if scaler is None else scaler.torch
