"""An accumulation window: which micro-batches make one optimizer step, and what each of them weighs in it.

    IDLE -- enter --> OPEN(1) -- enter --> OPEN(n + 1)      the loop whose loader it is goes on
    OPEN -- enter --> dropped, OPEN(1)                      that loop is over, or a new one began inside it
    OPEN -- exit at the boundary --> IDLE                   n == steps, or the loader's last batch, or the user said so
    OPEN -- exit by an exception --> dropped, IDLE

Each micro-batch enters as weight * reference, where the reference is a constant that is the same on all ranks. What the
window really held is known at its boundary; the gradients are then multiplied by ranks / (reference * all weights).
The reference is chosen so that in most windows this is 1 and nothing has to be done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nbdist.beside import Beside, runs_inside
from nbdist.data.cursor import Cursor
from nbdist.held import Noted, around, parameters_of
from nbdist.weighing import times

if TYPE_CHECKING:
    from nbdist.accumulation import Accumulation


class Window:
    """The micro-batches of one optimizer step of some models; `with window:` is one micro-batch. Used again and again.

    Attributes:
        boundary: this micro-batch is the last one of the window.
        count: micro-batches so far; 0: it is not open, or an optimizer has acted on it.
        holds: there are gradients of micro-batches whose window has not come to its boundary.
        outer: the window whose with-block is around this one's.
        said: what the user has said about this micro-batch being the last; None: nothing.
    """

    __slots__ = (
        "_amount", "_at", "_beside", "_by", "_calls", "_cursor", "_ending", "_explicit", "_home", "_local",
        "_measured", "_models", "_noted", "_of", "_only", "_parts", "_ref", "_rows", "_slice_rows",
        "_slices", "_total", "_weighed", "_wrong", "boundary", "count", "holds", "outer", "said",
    )  # fmt: skip

    def __init__(
        self, of: Accumulation, models: tuple[torch.nn.Module, ...], gone: Callable[[Any], Any] | None = None
    ) -> None:
        self._of = of
        self._models = [weakref.ref(model, gone) for model in models]
        self.said: bool | None = None
        self.boundary, self.holds = True, False
        self.outer: Window | None = None
        self.count = 0
        self._cursor: Cursor | None = None  # the batch in hand at the last enter, and its number
        self._at = -1
        self._by: Cursor | None = None  # the one that it is weighed by: another one may deliver beside it (zip)
        self._beside = Beside()
        self._ending = False  # it is the last one of its loader
        self._home: Any = None  # that loader; how often we were entered with this batch, and with the one before
        self._calls, self._rows, self._slices, self._slice_rows = 1, 0, 1, 0
        self._ref: Any = 1.0
        self._local: Any = 0.0  # all weights so far on this rank, and on all ranks if they are known
        self._total = 0
        self._parts = 0  # micro-batches that called backward
        self._only = self._measured = self._explicit = self._weighed = False
        self._amount: Any = 0.0
        self._wrong = ""
        self._noted = Noted()

    def __enter__(self) -> None:
        of = self._of
        live = of.live
        cursor = live[-1]
        if (
            cursor is self._cursor
            and cursor is not None
            and not self.count
            and cursor.step != self._at
            and of.steps == self._calls == self._slices == 1
            and self.said is None
            and len(live) == 2
        ):  # a window of one, for one more batch of the same loader: the rest says the same of it, at more length
            self._at, self._rows, self._by, self._ending = cursor.step, cursor.local, cursor, cursor.last
            cursor.position.used = True
            self.count, self._parts, self._only, self.boundary, self._weighed = 1, 0, True, True, False
            outer = of.inside
            self.outer = outer if outer is not self else None
            of.newest = of.inside = self
            return
        if self.count and cursor is not self._cursor:
            self._look_at_owner(cursor)
        ends = False
        if cursor is not None:
            if cursor is self._cursor and cursor.step == self._at:
                self._calls += 1
            else:
                if cursor.position is self._home:
                    self._slices, self._slice_rows = self._calls, self._rows
                else:
                    self._home, self._slices, self._slice_rows = cursor.position, 1, 0
                by, self._ending = cursor, cursor.last
                if len(live) > 2:
                    by, self._ending = self._beside.look(live, self._cursor, self._at)
                self._at, self._rows, self._calls, self._by = cursor.step, by.local, 1, by
            cursor.position.used = True
            if self._ending and of.with_loader:
                ends = self._slices == 1 or self._calls >= self._expected()
        else:
            self._by = None
        self._cursor = cursor
        steps, said = of.steps, self.said
        if not self.count:
            self.count, self._parts, self._local, self._total, self._wrong = 1, 0, 0.0, 0, ""
            self._measured = self.holds = False
            self._noted.clear()
            self._only = self.boundary = (ends or steps == 1) if said is None else said
            rows, weigher = None, self._by
            if weigher is not None:
                rows = weigher.total if steps == 1 else weigher.ahead(steps)
            self._ref = of.weights.ranks / rows if rows else 1.0 / steps
        else:
            self.count += 1
            self._only = False
            self.boundary = (ends or self.count >= steps) if said is None else said
        if of.weights.ranks > 1:  # with or without a backward: that one was left out here the others cannot know
            self._total += self._rows_of_all()
        self._weighed = False
        if self._calls > 1 or self._slices > 1 or said is not None:
            self._measured = True
            self._only = self._only and said is None
        if not self.boundary:
            of.unfinished()
            if of.switches:
                self._set_sync(False)
        elif of.defers and self.count > 1:
            self._set_sync(True)
        self.outer = of.inside if of.inside is not self else None
        of.newest = of.inside = self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        of = self._of
        of.inside, self.outer = self.outer, None
        if kind is not None:
            self.abandon("an exception left it" if self.count > 1 else "")
        elif self.boundary:
            self.count, self.holds = 0, False
        else:
            self.holds = True
            if of.switches:  # a backward outside is complete by itself
                for model in self.alive():
                    of.strategy.release(model)

    @property
    def parts(self) -> int:
        """How many micro-batches are in it."""
        return self.count and self._parts

    def unfinished(self) -> tuple[int, Any, bool]:
        """The micro-batches of the window that is open, 0 where none is; the position of the loader that they are of;
        and whether each was a batch of it.
        """
        if self.is_over():
            return 0, None, False
        cursor = self._by
        return self.count, None if cursor is None else cursor.position, self._calls == self._slices == 1

    # ------------------------------------------------------------------ whose it is, and where it ends
    def is_over(self) -> bool:
        """Whether the loop that opened it is over, so that it can never come to its boundary."""
        return self._of.with_loader and self._cursor is not None and self._cursor not in self._of.live

    def has_a_loop(self) -> bool:
        """Whether a prepared loader's loop has opened it, whose end is known."""
        return self._of.with_loader and self._cursor is not None

    def _look_at_owner(self, newest: Cursor | None) -> None:
        """Another loader is in front than at the last micro-batch: go on when both run side by side, else drop."""
        owner = self._cursor
        if not self._of.with_loader:
            return
        if owner is None:
            self.abandon("a loader's loop began in it")
        elif owner not in self._of.live:
            self.abandon("its loop has ended")
        elif owner.step == self._at and runs_inside(newest, owner):
            self.abandon("another loader's loop began in it")

    def _expected(self) -> int:
        """How often the user will come with this batch, by how often he came with the one before."""
        if not self._slice_rows or not self._rows:
            return self._slices
        return min(self._slices, max(1, -(-self._rows * self._slices // self._slice_rows)))

    def abandon(self, why: str) -> None:
        """Drop what was gathered, and be as before the first micro-batch.

        Args:
            why: for the note; "" gives none.
        """
        if not self.count:
            return
        self.count, self.boundary, self.holds = 0, True, False
        self._noted.clear()
        for parameter in self.parameters():
            parameter.grad = None
        for model in self.alive():
            self._of.strategy.drop(model)
        if self._of.switches:
            self._set_sync(True)
        if why:
            self._of.note(why)

    def parameters(self) -> list[torch.Tensor]:
        """Those whose gradients it gathers, together with the windows around it: see `nbdist.held`."""
        return parameters_of(self._of, around(self), unclaimed=True)

    def alive(self) -> list[torch.nn.Module]:
        """Its models, as far as there still are any."""
        return [model for ref in self._models if (model := ref()) is not None]

    def _set_sync(self, sync: bool) -> None:
        for ref in self._models:
            if (model := ref()) is not None:
                self._of.strategy.set_sync(model, sync)

    # ------------------------------------------------------------------ weights
    def weigh(self, weight: Any) -> tuple[Any, Callable[[], None] | None]:
        """A backward begins.

        Returns:
            The factor for its seed; and what is to be called behind it, None for nothing.

        Raises:
            ValueError, RuntimeError: see `Accelerator.backward`.
        """
        of, cursor = self._of, self._by
        of.began = True
        weights = of.weights
        if self._only and weight is None and cursor is not None and cursor.total:  # as below, for most steps
            self._weighed = True
            return cursor.local * weights.ranks / cursor.total, None
        if weight is None and cursor is not None and not cursor.total:  # what the other ranks have, only they can tell
            weight = cursor.local if self._slices == 1 else cursor.local / self._expected()
        if self._only:
            self._weighed = True
            if weight is not None:  # each of several backward calls is weighed by itself, and they add up
                return weights.share(weight, cursor is None or cursor.local > 0), None
            return 1.0, None
        if self._weighed:
            return times(self._again(weight), self._ref), None if self.boundary else self.note
        if self._parts and self._explicit is (weight is None):
            raise RuntimeError(
                "some micro-batches of this accumulation window have an explicit weight and some do not: pass "
                "backward(loss, weight=...) in all of them or in none"
            )
        self._weighed, self._explicit = True, weight is not None
        if self._parts:
            self._noted.put_back()
        self._parts += 1
        if weight is not None:
            self._amount, wrong = weights.amount(weight, cursor is None or cursor.local > 0)
            self._wrong = self._wrong or wrong
            if wrong and weights.ranks == 1:
                raise ValueError(wrong)
        elif cursor is None:
            self._amount = 1.0
        else:
            self._amount = cursor.local if self._slices == 1 else cursor.local / self._expected()
        if weights.ranks == 1:
            self._total += self._rows_of_all()
        elif self.boundary and self._parts < self.count and not self._explicit:
            of.tell_left_out()
        self._local = self._local + self._amount
        if not self.boundary:
            self.holds = True
            return times(self._amount, self._ref), self.note
        self.holds = False
        self._noted.clear()
        reference = self._ref
        late = self._late()
        if self.count == 1:
            return times(self._amount, self._ref), None
        # What was gathered before has this reference too.
        return times(self._amount, reference), None if late is None else partial(self.scale, late)

    def _rows_of_all(self) -> int:
        """What the micro-batch in hand weighs on all ranks, when nothing is said."""
        return self._of.weights.ranks if self._by is None else self._by.total

    def _again(self, weight: Any) -> Any:
        """One more backward in a micro-batch that was weighed already: the losses add up."""
        self._noted.put_back()
        mine = self._amount
        same = (weight is not None) is self._explicit
        # Tensors are not compared, that could wait for a device; nor what is bad, which is told at the boundary.
        if same and isinstance(weight, int | float) and isinstance(mine, float) and mine > 0:
            same = weight == mine
        if not same:
            raise RuntimeError(
                f"this micro-batch of an accumulation window weighs {mine} already, and {weight} now: its "
                "losses add up and weigh once. Add them and call backward once, or give both the same weight"
            )
        return mine

    def _late(self) -> Any:
        """At the boundary: what was really in the window is known. None when the reference was right."""
        weights = self._of.weights
        total: Any = self._total
        if self._explicit or self._measured:
            total = weights.joint(self._local, self._wrong)
        correction = weights.correction(self._ref, total)
        if not isinstance(correction, torch.Tensor) and abs(correction - 1) < 1e-12:
            return None
        self._ref = self._ref * correction
        return correction

    def note(self) -> None:
        """Its gradients are what they are now: what a model's zero_grad takes away is put back."""
        self._noted.note(self, self._of)

    def scale(self, factor: Any) -> None:
        """Multiply the gradients gathered so far."""
        self._of.strategy.scale_gradients(self.parameters(), factor)

    def settle(self) -> None:
        """An optimizer is about to act at the boundary, though the last micro-batch has called no backward.

        Raises:
            RuntimeError: over several ranks; the gradients before it were not shared.
        """
        self.holds = False
        if not self._parts or self._weighed:  # all of it was torch's own loss.backward()
            return
        self._noted.put_back()
        self._noted.clear()
        if self._of.switches and self._of.weights.ranks > 1:
            raise RuntimeError(
                "the last micro-batch of this accumulation window has called no backward, so the gradients of those "
                "before it were not shared between the ranks. Call backward(loss, weight=0) there"
            )
        if (late := self._late()) is not None:
            self.scale(late)
        if self._of.loose is not None:
            self._of.loose.average()
