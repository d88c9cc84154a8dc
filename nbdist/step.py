"""The members of the Accelerator that a training step is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from nbdist import arguments, checks, keeping, messages
from nbdist.accumulation import Accumulation
from nbdist.reach import weightless
from nbdist.state import step_boundary
from nbdist.strategies import Strategy
from nbdist.strategies.optimizer import PreparedOptimizer
from nbdist.window import Window


class Step:
    """Accumulation, backward, clipping. Reads what the Accelerator's constructor makes."""

    _strategy: Strategy
    _windows: Accumulation
    # What optimizers and schedulers were prepared to, by the identity of the user's own, which it keeps alive.
    _prepared: weakref.WeakValueDictionary[int, Any]
    # The last seed of backward and what it was made for: in most loops it is the same at every step.
    _seed: tuple[Any, torch.Tensor | None, bool] = (None, None, False)
    # The cell (StepBoundary.cell) in which models were looked at before the first backward; in which that and all else
    # that belongs to the first one is done.
    _looked: object = None
    _begun: object = None

    def accumulate(self, *models: torch.nn.Module, last: bool | None = None) -> Window:
        """`with accelerator.accumulate(model):` around one micro-batch: forward, backward, step, zero_grad.

        `gradient_accumulation_steps` of them are a window, and one optimizer step. A window also ends with its loader.
        A loop left in the middle of one, by `break` or an exception, loses that window's gradients, and this is said
        once.

        Args:
            *models: those that are trained; several when one loss goes through them. Models that are trained
                apart, as in a GAN, each have a window of their own. Default: all prepared ones.
            last: whether this micro-batch ends the window, said by hand: then neither the number of steps nor the
                loader counts. Needed when a loader of one batch is cut into slices.
        """
        windows = self._windows
        window = windows.made.get(id(models[0])) if len(models) == 1 else None
        if window is None:
            window = windows.window(models)
        window.said = last if last is None else checks.flag(last, "accumulate: last")
        return window

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Backward, so that the ranks together have the gradient that one process would have from all their samples.
        Outside of `accumulate` that is the gradient of this loss alone, as if the window had one micro-batch.

        Args:
            loss: a mean, with one element. Of float32, as losses are under autocast: in a half precision its factor
                is rounded to that (1/3 in bfloat16 becomes 0.33398).
            weight: how many things it is the mean of, a number or a 0-dim tensor. Default: the real rows of the
                batch in hand of the newest running prepared loader (its ranks' sizes are known without
                communication), or the same for every rank when there is none. An explicit weight costs one tiny
                all-reduce a window, so pass it on all ranks or on none, and in all micro-batches of a window or in
                none. On a rank whose batch is only a stand-in it counts as 0. A micro-batch weighs once, however many
                backward calls are in it. Where the weight is 0 the loss may be 0/0; but for a tensor on a device,
                which is not synchronised, it must be finite.
            **kwargs: retain_graph, create_graph, inputs, as torch has them.

        Raises:
            ValueError: a negative weight, or one that is no number; on all ranks, at the end of the window.
            RuntimeError: the loss has more than one element; weights in some micro-batches of a window only.
            DistributedOperationException: weights on some ranks only, in the first backward of a cell or script that
                shares gradients; on all ranks. Later in it nobody looks.
            TypeError: the loss is no tensor.
        """
        boundary = step_boundary
        if boundary.made != boundary.counted:
            boundary.passed()
        boundary.midway = True
        windows = self._windows
        window, behind = windows.inside, None
        if self._begun is not boundary.cell:
            self._begin(loss, weight is not None)
        if window is None:
            factor = windows.alone(weight)
        else:
            factor, behind = window.weigh(weight)
        silent = False
        try:
            if windows.scaler is not None:
                silent = not isinstance(factor, torch.Tensor) and not factor
                factor = windows.scaler.seed(factor)
                loss = loss.float() if loss.dtype in _HALF else loss  # the scale alone is more than float16 holds
            if isinstance(factor, torch.Tensor):  # made anew at each step, and comparing it would wait for the device
                seed = factor.to(loss.dtype).expand(_one_element(loss))
            else:
                known, seed, silent = self._seed
                kind = factor, loss.dtype, loss.dim() and loss.shape, loss.get_device()  # all cheap to ask for
                if known != kind or seed is None:
                    seed = torch.full(_one_element(loss), factor, dtype=loss.dtype, device=loss.device)
                    silent = not factor
                    self._seed = kind, seed, silent
        except AttributeError:
            if isinstance(loss, torch.Tensor):
                raise
            raise TypeError(
                f"backward needs a loss that is a tensor, a mean; this one is {checks.short(loss)}, from which no "
                "gradient comes. Pass what the loss function returned, without .item()"
            ) from None
        # Another window than this one may have gathered gradients that are to be left alone.
        guard = None if len(windows.made) <= (window is not None) else keeping.guard(windows, window)
        try:
            if silent:
                with guard or nullcontext(), weightless(loss, list(windows.models.values())):
                    self._strategy.backward(loss, seed, **kwargs)
            elif guard is None:
                self._strategy.backward(loss, seed, **kwargs) if kwargs else self._strategy.backward(loss, seed)
            else:
                with guard:
                    self._strategy.backward(loss, seed, **kwargs)
            if behind is not None:
                behind()
            if windows.loose is not None:
                windows.share(window)
        except RuntimeError as error:
            if (lost := messages.of_a_lost_rank(error)) is not None:
                raise lost from None
            raise

    def _begin(self, loss: torch.Tensor, weighs: bool) -> None:
        """What the first backward of a cell needs; also those after it, until the first that shares gradients."""
        cell, window = step_boundary.cell, self._windows.inside
        if self._looked is not cell:
            self._looked, step_boundary.begun = cell, True
            self._strategy.look_again()
        alone = self._windows.weights.ranks == 1
        if alone or ((window is None or window.boundary) and self._agree(loss, weighs)):
            self._begun = cell

    def _agree(self, loss: torch.Tensor, weighs: bool) -> bool:
        """Where one rank gives a weight and another does not, their exchanges are not the same, which ends processes.

        Returns:
            Whether the ranks have told each other; not where this backward shares nothing.
        """
        tensor = isinstance(loss, torch.Tensor)  # if not, what is shared does not matter any more
        if not weighs and self._windows.loose is None and not (tensor and self._strategy.shares(loss)):
            return False
        answers = messages.agree("backward", weighs)
        if len(set(answers)) > 1:
            told = "; ".join(f"rank {rank} {'gives one' if one else 'gives none'}" for rank, one in enumerate(answers))
            raise messages.DistributedOperationException(
                f"backward(loss, weight=...): a weight is given by all ranks or by none: {told}. A rank with nothing "
                "to weigh gives weight=0"
            )
        return True

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of these parameters, in place, by their joint norm. Returns the norm before, a 0-dim
        tensor. In the middle of an accumulation window nothing is clipped: the norm is that of what there is so far.
        """
        whole = self._ready()
        try:
            if not whole:
                return self._strategy.gradient_norm(parameters, norm_type)
            return self._strategy.clip(parameters, max_norm, norm_type)
        except (AttributeError, TypeError, ValueError):
            _clippable("clip_grad_norm_", parameters, max_norm=max_norm, norm_type=norm_type)
            raise

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each value of these parameters' gradients, in place, to [-clip_value, clip_value]; nothing in the
        middle of an accumulation window.
        """
        if self._ready():
            try:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            except (AttributeError, TypeError, ValueError):
                _clippable("clip_grad_value_", parameters, clip_value=clip_value)
                raise

    def _ready(self) -> bool:
        """Whether the gradients are those of a whole window; then they are what they are in fp32."""
        if not self._windows.ready():
            return False
        self.unscale_gradients()
        return True

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch completes its window: optimizers, clipping and schedulers act then. True outside of
        `accumulate`.
        """
        return self._windows.complete()

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an accumulation window; may be set at any time, and counts from the next micro-batch on."""
        return self._windows.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._windows.steps = arguments.window_steps(steps)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward calls in this block leave gradients to each rank, those of the model and those that belong to no
        model; the next one outside shares all.
        """
        with self._syncing(model, False):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward calls in this block share gradients also in the middle of an accumulation window: those of the model
        and those that belong to no model.
        """
        with self._syncing(model, True):
            yield

    @contextmanager
    def _syncing(self, model: torch.nn.Module, sync: bool) -> Iterator[None]:
        where = "trigger_sync_in_backward: model" if sync else "no_sync: model"
        checks.kind(model, torch.nn.Module, where, "what prepare returned for the model")
        model = self._windows.models.get(id(model), model)
        self._strategy.set_sync(model, sync)
        loose = self._windows.loose
        if loose is not None:
            before, loose.sync = loose.sync, sync
        try:
            yield
        finally:
            if loose is not None:
                loose.sync = before
            window = self._windows.inside
            self._strategy.set_sync(model, window is None or window.boundary or not self._windows.switches)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Under fp16: gradients without the factor of loss scaling, to look at or to change before the step; clipping
        does it by itself. Nothing in the middle of an accumulation window, and in other precisions.

        Args:
            optimizer: one, or a list of them. Default: all prepared ones.
        """
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []:
            checks.kind(one, torch.optim.Optimizer, "unscale_gradients: optimizer", "an optimizer, or a list of them")
        scaler = self._windows.scaler
        if scaler is None or not self._windows.ready():
            return
        if optimizer is None:
            optimizer = [one for one in list(self._prepared.values()) if isinstance(one, PreparedOptimizer)]
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            scaler.unscale(one.optimizer if isinstance(one, PreparedOptimizer) else one)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer left its last step out, because gradients had overflowed (fp16)."""
        return any(getattr(one, "step_was_skipped", False) for one in list(self._prepared.values()))


def _clippable(where: str, parameters: Any, **numbers: Any) -> None:
    """Raises for what cannot be clipped, or by that."""
    if isinstance(parameters, torch.nn.Module):
        raise checks.wrong(f"{where}: parameters", parameters, "the parameters of a model: model.parameters()")
    each = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if not isinstance(each, Iterable) or any(not isinstance(one, torch.Tensor) for one in each):
        raise checks.wrong(f"{where}: parameters", parameters, "the parameters of a model: model.parameters()")
    for name, number in numbers.items():
        if not isinstance(number, int | float) and getattr(number, "shape", None) != ():
            raise checks.wrong(f"{where}: {name}", number, "one number")


_HALF = frozenset({torch.float16, torch.bfloat16})


def _one_element(loss: torch.Tensor) -> torch.Size:
    if loss.numel() != 1:
        raise RuntimeError(f"backward needs a loss with one element, a mean; this one has shape {tuple(loss.shape)}")
    return loss.shape
