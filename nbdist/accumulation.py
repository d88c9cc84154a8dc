"""The accumulation windows of one Accelerator: which models have one, and what is outside of all of them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nbdist import messages
from nbdist.bare import refuse_bare_steps
from nbdist.beside import Beside
from nbdist.data.cursor import Cursor
from nbdist.loose import Loose, trained_by
from nbdist.state import edit_hooks
from nbdist.strategies.base import Strategy
from nbdist.strategies.optimizer import PreparedOptimizer
from nbdist.strategies.watch import be_told, doubt
from nbdist.weighing import Weights
from nbdist.window import Window

_living: weakref.WeakSet[Accumulation] = weakref.WeakSet()


def _edited() -> None:
    """The notebook has changed objects here: who averages what is asked again at the next backward."""
    doubt()
    for one in list(_living):
        one.doubt()


class Accumulation:
    """The windows of one Accelerator.

    Args:
        strategy: how models are wrapped.
        weights: what amounts add up to over the ranks.
        live: the running iterators of prepared loaders, the newest last, None at the bottom.
        steps: micro-batches a window, at least 1.
        with_loader: a window ends with its loader.
        each_batch: gradients are shared at every micro-batch.

    Attributes:
        newest: the window whose turn it is, or was last; None when the last backward was outside of all.
        inside: the window whose with-block runs.
        scaler: the loss scaler of fp16, None without one (nbdist/scaling.py).
        began: a backward was called.
        models: what was prepared, by the identity of the user's own.
        optimizers: the prepared ones, by a number that is the same on all ranks.
        loose: the parameters that only the optimizers know, where there are some or may be; None in one process.
        made: the windows, by the identity of their models.
    """

    __slots__ = ("__weakref__", "_beside", "_count", "_depth", "_hand", "_loose", "_noted", "_said_left_out", "_told",
                 "_watched", "began", "defers", "inside", "live", "loose", "made", "models", "newest", "optimizers",
                 "scaler", "steps", "strategy", "switches", "weights", "with_loader")  # fmt: skip

    def __init__(
        self,
        strategy: Strategy,
        weights: Weights,
        live: list[Cursor | None],
        steps: int = 1,
        with_loader: bool = True,
        each_batch: bool = False,
    ) -> None:
        self.strategy, self.weights, self.live, self.steps = strategy, weights, live, steps
        self.with_loader = with_loader
        self.switches = strategy.shares_gradients and not each_batch
        self.defers = self.switches and strategy.defers
        self.newest: Window | None = None
        self.inside: Window | None = None
        self.scaler: Any = None
        self.began = False
        self.models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self.made: dict[Any, Window] = {}
        self.optimizers: weakref.WeakValueDictionary[int, PreparedOptimizer] = weakref.WeakValueDictionary()
        _living.add(self)
        if _edited not in edit_hooks:
            edit_hooks.append(_edited)
        self.loose: Loose | None = None
        self._loose = Loose(strategy, self.optimizers) if strategy.process.world_size > 1 else None
        self._count = self._depth = 0
        self._hand: tuple[Cursor | None, int, Cursor | None] = None, -1, None  # of the last backward outside of all
        self._beside = Beside()
        self._noted = self._told = self._watched = self._said_left_out = False

    def window(self, models: tuple[torch.nn.Module, ...]) -> Window:
        """The window of these models; of all prepared ones when none is named."""
        window = self.made.get(tuple(map(id, models))) if models else None
        return self._make(models) if window is None else window

    def _make(self, models: tuple[torch.nn.Module, ...]) -> Window:
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise TypeError(f"accumulate takes the models that are trained; this is a {type(model).__name__}")
        # By what they were prepared to: the user may name a module or what wraps it.
        known = dict(self.models)
        named = {id(one): one for one in (known.get(id(model), model) for model in models or tuple(known.values()))}
        wrapped = tuple(named.values())
        if self.weights.ranks > 1:
            self._check([model for model in wrapped if not any(model is one for one in known.values())])
        key: Any = id(wrapped[0]) if len(wrapped) == 1 else tuple(map(id, wrapped))
        window = self.made.get(key)
        if window is None:
            window = self.made[key] = Window(self, wrapped, lambda _: self.made.pop(key, None))
            doubt()  # it may have what others have had
        return window

    def _check(self, models: list[torch.nn.Module]) -> None:
        """Of models that were not prepared each rank would train its own, if nothing else shares their gradients."""
        if not models:
            return
        shared = {id(one) for one in self.strategy.averaged()}
        shared |= {id(one) for optimizer in list(self.optimizers.values()) for one in trained_by(optimizer)}
        for model in models:
            if any(one.requires_grad and id(one) not in shared for one in model.parameters()):
                raise RuntimeError(
                    f"this {type(model).__name__} is not prepared: each of the {self.weights.ranks} ranks would train "
                    "one of its own. Call model, optimizer = accelerator.prepare(model, optimizer) first; again when "
                    "they were made anew"
                )

    # ------------------------------------------------------------------ what the optimizers train
    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Models or optimizers are prepared in this block; behind the outermost one ranks agree on what is loose."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth and self.loose is not None:
            self.loose.look("prepare (what optimizers train)")
            self._settle()

    def admit(self, optimizer: PreparedOptimizer) -> None:
        """It attends to these windows from now on."""
        self._count += 1
        self.optimizers[self._count] = optimizer
        self.doubt()

    def doubt(self) -> None:
        """Optimizers or models have changed, on all ranks alike: ranks are to agree again on what is loose."""
        if self._loose is not None and self._count:
            self._loose.doubt()
            self.loose = self._loose

    def share(self, window: Window | None) -> None:
        """A backward in this window is done, or one outside of all: loose parameters' gradients are averaged."""
        if self.loose is not None:
            self.loose.share(window)
            self._settle()

    def _settle(self) -> None:
        """Ranks have agreed; where nothing is loose, nobody asks any more."""
        if self.loose is not None and not self.loose.parameters:
            self.loose = None

    def unfinished(self) -> None:
        """A window of more than one goes on."""
        if not self._watched:
            self._watched = True
            be_told()
            refuse_bare_steps(self)

    def forget(self) -> None:
        """Let go of all windows; gradients of open ones are dropped."""
        for window in list(self.made.values()):
            window.abandon("")
        self.made.clear()
        self.newest = None
        if not self.optimizers:
            self.loose, self._count = None, 0
            if self._loose is not None:
                self._loose.forget()
        self._hand, self._beside = (None, -1, None), Beside()

    def alone(self, weight: Any) -> Any:
        """The factor of a backward outside of all windows: it is a window of its own, and leaves the others open."""
        self.newest, self.began = None, True
        if self.steps > 1 and not self._told:
            self._tell_alone()
        live = self.live
        cursor = live[-1]
        if cursor is not None:
            before, at, by = self._hand
            if cursor is not before or cursor.step != at:
                by = cursor if len(live) == 2 else self._beside.look(live, before, at)[0]
                self._hand = cursor, cursor.step, by
            for one in live:
                if one is not None:
                    one.position.used = True
            cursor = by
            if weight is None and cursor is not None and not cursor.total:
                weight = cursor.local
        if weight is not None:
            return self.weights.share(weight, cursor is None or cursor.local > 0)
        return 1.0 if cursor is None else cursor.local * self.weights.ranks / cursor.total

    def complete(self) -> bool:
        """Whether the gradients are those of a whole window: optimizers, clipping and schedulers act only then."""
        window = self.newest
        if window is None or window.boundary:
            return True
        if window is self.inside or not window.is_over():
            return False
        window.abandon("its loop has ended")
        return True

    def ready(self) -> bool:
        """`complete`, with gradients that are as they should be."""
        if not self.complete():
            return False
        if self.newest is not None and self.newest.holds:
            self.newest.settle()
        return True

    def holds_gradients(self) -> bool:
        """Whether an unfinished window has gradients from before the micro-batch that runs now."""
        return any(
            window.parts > (window is self.inside) and not window.is_over() for window in list(self.made.values())
        )

    def _tell_alone(self) -> None:
        """Say once that a backward outside of all windows is not divided; not to those who have used a window."""
        self._told = True
        if not any(window._weighed for window in list(self.made.values())):
            warnings.warn(
                f"backward outside of `accumulate` is a window of one: gradient_accumulation_steps={self.steps} does "
                "not divide its loss, and the optimizer steps each time. Put `with accelerator.accumulate(model):` "
                "around forward, backward and step; or leave gradient_accumulation_steps at 1. (Said once.)",
                stacklevel=messages.depth(),
            )

    def tell_left_out(self) -> None:
        """Say once that a micro-batch without a backward counts."""
        if not self._said_left_out:
            self._said_left_out = True
            warnings.warn(
                "this rank has called no backward in a micro-batch of an accumulation window. Over several ranks its "
                "rows count all the same, with a gradient of 0, as the other ranks cannot know. Where they are not to "
                "count give weights, backward(loss, weight=...), in the others. (Said once.)",
                stacklevel=messages.depth(),
            )

    def note(self, why: str) -> None:
        """Say once that gradients were dropped."""
        if not self._noted:
            self._noted = True
            warnings.warn(
                f"the gradients of an unfinished accumulation window were dropped: {why}. Windows end after "
                f"{self.steps} micro-batches and with the loader; accumulate(model, last=True) ends one earlier. "
                "(Said once.)",
                stacklevel=messages.depth(),
            )
