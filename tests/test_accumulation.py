"""Accumulation windows in one process: which micro-batches are a step, what weighs what, what is dropped.

The numbers of the cases (GA3 ...) are those of what went wrong for users elsewhere; the values here are the right ones.
With SGD(lr=1) and the loss -m(x).mean() every mean gradient of ones adds 1 to a weight that starts at 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nbdist import Accelerator
from nbdist.kwargs import GradientAccumulationPlugin
from tests.training import linear_at_zero


@pytest.fixture(autouse=True)
def _no_notes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the gradients of an unfinished")
        yield


def ones(rows: int, batch: int = 1) -> DataLoader:
    return DataLoader(torch.ones(rows, 1), batch_size=batch)


class Run:
    """One model and one optimizer under an Accelerator; `flags` says at which micro-batches it stepped."""

    def __init__(self, steps: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
        self.own = linear_at_zero()
        self.model, self.optimizer = self.accelerator.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=1.0))
        self.flags = ""

    def loader(self, rows: int, batch: int = 1) -> Any:
        return self.accelerator.prepare(ones(rows, batch))

    def micro(self, rows: torch.Tensor, factor: float = 1.0, weight: Any = None, last: bool | None = None) -> None:
        with self.accelerator.accumulate(self.model, last=last):
            self.accelerator.backward(-factor * self.model(rows).mean(), weight)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.flags += "01"[self.accelerator.sync_gradients]

    @property
    def weight(self) -> float:
        return round(self.own.weight.item(), 5)


# ---------------------------------------------------------------------- which micro-batches are a step
def test_a_short_last_window_divides_by_what_was_in_it() -> None:
    """GA3."""
    run = Run(4)
    weights = []
    for batch in run.loader(5):
        run.micro(batch)
        weights.append(run.weight)
    assert weights == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "rows", "flags"), [(4, 8, "00010001"), (3, 11, "00100100101"), (3, 7, "0010011"), (2, 9, "010101011")]
)
def test_rows_of_a_batch_as_micro_batches(steps: int, rows: int, flags: str) -> None:
    """GA4: batches of 4, cut into rows; the loader's last batch ends a window with its last row only."""
    run = Run(steps)
    for batch in run.loader(rows, 4):
        for row in batch:
            run.micro(row)
    assert run.flags == flags
    assert run.weight == flags.count("1")


def test_a_loader_of_one_batch_cut_into_slices() -> None:
    """The first time nothing tells how many slices there will be: `last=` does. Later epochs know by themselves."""
    run = Run(2)
    loader = run.loader(4, 4)
    for batch in loader:
        for number, row in enumerate(batch):
            run.micro(row, last=number in (1, 3))
    assert run.flags == "0101" and run.weight == 2
    for batch in loader:
        for row in batch:
            run.micro(row)
    assert run.flags == "01010101" and run.weight == 4
    run.flags = ""
    for batch in loader:  # `last` alone decides: one window of all four, whatever the number of steps
        for number, row in enumerate(batch):
            run.micro(row, last=number == 3)
    assert run.flags == "0001" and run.weight == 5


def test_the_end_of_a_loader_is_over_when_its_loop_is() -> None:
    """GA6."""
    run = Run(2)
    for number, batch in enumerate(run.loader(6)):
        run.micro(batch)
        if number == 5:
            break
    assert run.flags == "010101"
    run.flags = ""
    for _ in range(4):
        run.micro(torch.ones(1, 1))
    assert run.flags == "0101" and run.weight == 5


def test_the_number_of_steps_may_change_at_any_time() -> None:
    run = Run(4)
    for number in range(7):
        run.micro(torch.ones(1, 1))
        if number == 0:
            run.accelerator.gradient_accumulation_steps = 2
        elif number == 1:
            run.accelerator.gradient_accumulation_steps = 3
    assert run.flags == "0100100" and run.weight == 2
    assert run.accelerator.gradient_accumulation_steps == 3
    for bad in (0, 1.5, "2", None):
        with pytest.raises((TypeError, ValueError), match="at least 1"):
            run.accelerator.gradient_accumulation_steps = bad  # type: ignore[assignment]


def test_a_window_without_the_loader(recwarn: pytest.WarningsRecorder) -> None:
    """sync_with_dataloader=False: neither the loader's end nor the next loader ends it or drops it."""
    run = Run(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    loader = run.loader(3)
    for _ in range(2):
        for batch in loader:
            run.micro(batch)
    assert run.flags == "010101" and run.weight == 3


def test_how_many_steps_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3
    assert Accelerator(gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin).sync_gradients
    with pytest.raises(ValueError, match="=2, and the gradient_accumulation_plugin says 3"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)
    none = GradientAccumulationPlugin(adjust_scheduler=False)
    assert (
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=none).gradient_accumulation_steps == 2
    )
    with pytest.raises(ValueError, match="at least 1"):
        Accelerator(gradient_accumulation_steps=0)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 5
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(TypeError, match="'many'"):
        Accelerator()


# ---------------------------------------------------------------------- several loaders, several models
@pytest.mark.parametrize("short", ["first", "second"])
@pytest.mark.parametrize("rows", [1, 5])
def test_zip_either_way_round(short: str, rows: int) -> None:
    run = Run(2)
    for _ in range(2):
        pair = run.loader(rows), run.loader(9)
        for one, other in zip(*(pair if short == "first" else pair[::-1]), strict=False):
            assert len(one) == len(other)
            run.micro(one)
    # zip asks the longer one once more when it stands first: that batch is nobody's
    assert run.flags == ("01011" if rows == 5 else "1") * 2
    assert run.weight == run.flags.count("1")


def test_loops_inside_loops() -> None:
    """An evaluation in the middle of a window changes nothing; a loop of training ends with its own loader."""
    run = Run(2)
    evaluation = run.loader(3)
    for batch in run.loader(5):
        for _ in evaluation:
            break
        for _ in evaluation:
            pass
        run.micro(batch)
    assert run.flags == "01011" and run.weight == 3
    run = Run(2)
    inner = run.loader(3)
    for _ in run.loader(1):  # its last batch, which is not the last of the loop inside
        for batch in inner:
            run.micro(batch)
    assert run.flags == "011"


def test_one_loader_cycled_beside_another() -> None:
    run = Run(3)
    cycled = run.loader(2)
    other = iter(cycled)
    for batch in run.loader(7):
        extra = next(other, None)
        if extra is None:
            other = iter(cycled)
            extra = next(other)
        run.micro(batch + extra - 1)
    assert run.flags == "0101011" and run.weight == 4  # each end of the short one ends a window, as the end of the long


def test_a_loader_that_is_asked_now_and_then_ends_nothing() -> None:
    run = Run(2)
    other = iter(run.loader(2))
    for number, batch in enumerate(run.loader(8)):
        if number % 4 == 0:
            next(other)
        run.micro(batch)
    # number 4 took the other's last batch, which ends a window; from then on it is asked no more
    assert run.flags == "01011011" and run.weight == 5


def test_two_models_have_two_windows() -> None:
    """A GAN: two accumulate() a batch are not two micro-batches of one window; two losses in one add up."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    made = [linear_at_zero() for _ in range(2)]
    maker, critic, *optimizers = accelerator.prepare(
        *made, *(torch.optim.SGD(model.parameters(), lr=1.0) for model in made)
    )
    flags: list[list[bool]] = [[], []]
    for batch, _ in zip(accelerator.prepare(ones(9)), accelerator.prepare(ones(5)), strict=False):
        for number, (model, optimizer) in enumerate(zip((maker, critic), optimizers, strict=True)):
            with accelerator.accumulate(model):
                for _ in range(1 + number):
                    accelerator.backward(-model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                flags[number].append(accelerator.sync_gradients)
    assert flags == [[False, True, False, True, True]] * 2
    assert [model.weight.item() for model in made] == [3, 6]


def test_a_backward_outside_is_a_window_of_one_and_leaves_others_open() -> None:
    run = Run(2)
    other = linear_at_zero()
    critic, optimizer = run.accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
    for number in range(4):
        run.micro(torch.ones(1, 1))
        run.accelerator.backward(-critic(torch.ones(1, 1)).mean())
        assert run.accelerator.sync_gradients
        run.accelerator.clip_grad_norm_(critic.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert other.weight.item() == pytest.approx((number + 1) / 2, abs=1e-4)
    assert run.flags == "0101" and run.weight == 2


def test_a_backward_outside_is_said_once_not_to_be_divided() -> None:
    run = Run(4)
    with pytest.warns(UserWarning, match=r"_steps=4 does not divide its loss.*accumulate\(model\)"):
        run.accelerator.backward(run.model(torch.ones(1, 1)).mean())
    steps, used = Run(), Run(4)
    used.micro(torch.ones(1, 1))  # who uses windows knows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (run, steps, used):
            one.accelerator.backward(one.model(torch.ones(1, 1)).mean())


def test_a_backward_that_slipped_out_of_its_window_is_said() -> None:
    run = Run(2)
    with run.accelerator.accumulate(run.model):
        loss = run.model(torch.ones(1, 1)).mean()
    with pytest.warns(UserWarning, match="does not divide"):
        run.accelerator.backward(loss)


def test_without_models_all_prepared_ones_are_meant() -> None:
    run = Run(2)
    window = run.accelerator.accumulate()
    assert window is run.accelerator.accumulate(run.model) is run.accelerator.accumulate(run.own)
    other = run.accelerator.prepare(linear_at_zero())
    both = run.accelerator.accumulate()
    assert both is not window and both is run.accelerator.accumulate(run.model, other)
    with pytest.raises(TypeError, match="the models that are trained; this is a SGD"):
        run.accelerator.accumulate(run.optimizer.optimizer)
    del both
    run.accelerator._windows.models.pop(id(other))
    assert len(run.accelerator._windows.made) == 2
    del other
    assert len(run.accelerator._windows.made) == 1  # a window goes with its models


def test_one_loss_through_two_models_and_two_optimizers_of_one() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [
        torch.optim.SGD([first.weight], lr=0.1),
        torch.optim.SGD([first.bias], lr=0.2),
        torch.optim.SGD(second.parameters(), lr=0.3),
    ]
    start = [parameter.detach().clone() for model in (first, second) for parameter in model.parameters()]
    *prepared, one, two, loader = accelerator.prepare(*optimizers, first, second, DataLoader(torch.randn(5, 1)))
    batches = []
    for batch in loader:
        batches.append(batch)
        with accelerator.accumulate(one, two):
            accelerator.backward(two(one(batch)).pow(2).mean())
            for optimizer in prepared:
                optimizer.step()
            for optimizer in prepared:
                optimizer.zero_grad()
    found = [parameter.detach().clone() for model in (first, second) for parameter in model.parameters()]
    for parameter, value in zip([*first.parameters(), *second.parameters()], start, strict=True):
        parameter.data.copy_(value)
    for part in (batches[:2], batches[2:4], batches[4:]):
        second(first(torch.cat(part))).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    right = [parameter.detach().clone() for model in (first, second) for parameter in model.parameters()]
    for one_value, other in zip(found, right, strict=True):
        assert torch.allclose(one_value, other, atol=1e-6)


def test_a_teacher_and_a_frozen_part() -> None:
    run = Run(2)
    teacher = linear_at_zero()
    nn.init.ones_(teacher.weight)
    run.own.register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
    guide = run.accelerator.prepare(teacher.requires_grad_(False))
    for batch in run.loader(3):
        with torch.no_grad():
            target = guide(batch)
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward((run.model(batch) - target).pow(2).mean() / 2)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.weight == 1 and run.own.frozen.item() == 1 and teacher.weight.item() == 1


# ---------------------------------------------------------------------- what is dropped
def test_a_loop_left_in_the_middle_leaves_nothing_behind() -> None:
    run = Run(2)
    loader = run.loader(6)
    for batch in loader:
        run.micro(batch, 100.0)
        break
    assert run.own.weight.grad is not None
    with pytest.warns(UserWarning, match="unfinished accumulation window were dropped: its loop has ended") as told:
        for batch in loader:
            run.micro(batch)
    assert told[0].filename == __file__  # the user's line
    assert run.flags == "0010101" and run.weight == 3
    for batch in loader:  # said once
        run.micro(batch, 100.0)
        break
    run.micro(torch.ones(1, 1))
    run.micro(torch.ones(1, 1))
    assert run.weight == 4


def test_right_after_a_break_all_is_as_outside() -> None:
    run = Run(2)
    scheduler = run.accelerator.prepare(torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5))
    for batch in run.loader(6):
        run.micro(batch, 100.0)
        assert not run.accelerator.sync_gradients
        break
    with pytest.warns(UserWarning, match="dropped"):
        scheduler.step()  # that of the epoch
    assert scheduler.get_last_lr() == [0.5] and run.accelerator.sync_gradients
    run.optimizer.step()
    assert run.weight == 0


def test_an_exception_drops_the_window() -> None:
    run = Run(3)
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(run.loader(6)):
            run.micro(batch / number if number < 2 else 1 // 0, 100.0) if number else run.micro(batch, 100.0)
    assert len(run.accelerator._live) == 1
    with pytest.warns(UserWarning, match="dropped"):
        run.micro(torch.ones(1, 1))
    run.micro(torch.ones(1, 1))
    with pytest.raises(ZeroDivisionError), run.accelerator.accumulate(run.model):
        run.accelerator.backward(-100 * run.model(torch.ones(1, 1)).mean())
        raise ZeroDivisionError
    assert run.own.weight.grad is None and run.accelerator.sync_gradients
    for _ in range(3):
        run.micro(torch.ones(1, 1))
    assert run.weight == 1


def test_an_exception_after_the_step_drops_nothing() -> None:
    run = Run(2)
    run.micro(torch.ones(1, 1))
    with pytest.raises(ZeroDivisionError), run.accelerator.accumulate(run.model):
        run.accelerator.backward(-run.model(torch.ones(1, 1)).mean())
        run.optimizer.step()
        raise ZeroDivisionError
    assert run.weight == 1


def test_a_training_loop_begun_inside_a_window() -> None:
    run = Run(2)
    inner = run.loader(2)
    outer = iter(run.loader(3))
    run.micro(next(outer), 100.0)
    with pytest.warns(UserWarning, match="another loader's loop began in it"):
        for batch in inner:
            run.micro(batch)
    assert run.flags == "001" and run.weight == 1


# ---------------------------------------------------------------------- zero_grad, clip
def test_zero_grad_never_wipes_an_open_window() -> None:
    run = Run(2)
    for batch in run.loader(5):
        with run.accelerator.accumulate(run.model):
            run.optimizer.zero_grad()
            run.accelerator.backward(-run.model(batch).mean())
            run.optimizer.step()
    assert run.weight == 3
    run = Run(2)
    for batch in run.loader(4):
        run.optimizer.zero_grad()  # in front of the block
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(-run.model(batch).mean())
        run.optimizer.step()  # and behind it
    assert run.weight == 2


@pytest.mark.parametrize("first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_with_torchs_own_backward(first: bool) -> None:
    """Nobody weighs it, so the losses of a window add up, as in plain torch; the gates hold all the same."""
    run = Run(2)
    for batch in run.loader(4):
        with run.accelerator.accumulate(run.model):
            if first:
                run.optimizer.zero_grad()
            (-run.model(batch).mean()).backward()
            run.optimizer.step()
            if not first:
                run.optimizer.zero_grad()
    assert run.weight == 4


def test_clipping_waits_for_the_boundary() -> None:
    """GA8: the mean gradient is 0.5, so there is nothing to clip; clipped one by one the sign would be wrong."""
    run = Run(2)
    norms = []
    for value in (9.0, -8.0):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(torch.tensor([[value]])).sum())
            norms.append(run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0))
            run.accelerator.clip_grad_value_(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.weight == -0.5
    assert [norm.item() for norm in norms] == [4.5, 0.5] and all(norm.dim() == 0 for norm in norms)
    for value in (9.0, 9.0):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(torch.tensor([[value]])).sum())
            run.accelerator.clip_grad_value_(run.model.parameters(), 0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.weight == -1.0


# ---------------------------------------------------------------------- weights
def test_explicit_weights_over_a_window() -> None:
    run = Run(3)
    values, weights = [1.0, 2.0, 4.0, 5.0, 7.0], [1, 5, 2.5, torch.tensor(3), 0]
    for value, weight in zip(values, weights, strict=True):
        run.micro(torch.full((2, 1), value), weight=weight)
    assert run.flags == "00100"
    assert run.weight == pytest.approx((1 * 1 + 2 * 5 + 4 * 2.5) / 8.5, abs=1e-5)


def test_all_weights_zero_is_a_step_of_nothing() -> None:
    for steps in (1, 2):
        run = Run(steps)
        run.optimizer.optimizer.param_groups[0]["momentum"] = 0.5
        for _ in range(steps):
            run.micro(torch.ones(1, 1))
        assert run.weight == 1
        for _ in range(steps):
            run.micro(torch.ones(1, 1), weight=0)
        assert run.weight == 1.5  # the momentum goes on


def test_a_loss_that_weighs_nothing_may_be_no_number() -> None:
    run = Run(steps=2)
    beside = nn.Parameter(torch.ones(()))  # of no prepared model
    for mask in (torch.ones(1), torch.zeros(1)):
        with run.accelerator.accumulate(run.model):
            loss = (beside * run.model(torch.ones(1, 1))[0] * mask).sum() / mask.sum()
            run.accelerator.backward(loss, weight=mask.sum())
    assert run.own.weight.grad.item() == 1 and beside.grad is not None and beside.grad.item() == 0
    run.accelerator.backward(run.model(torch.ones(1, 1)).mean())  # and nothing is silenced any more
    assert run.own.weight.grad.item() == 2


def test_weights_in_some_micro_batches_only() -> None:
    run = Run(2)
    warnings.simplefilter("ignore")
    run.micro(torch.ones(1, 1), weight=3)
    with pytest.raises(RuntimeError, match=r"some micro-batches .* have an explicit weight and some do not"):
        run.micro(torch.ones(1, 1))
    run.micro(torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="some micro-batches"):
        run.micro(torch.ones(1, 1), weight=3)


def test_several_backward_calls_in_a_micro_batch_weigh_once() -> None:
    """Their losses add up; each micro-batch weighs what it is said to."""
    run = Run(2)
    for weight, value in ((1, 1.0), (3, 2.0)):
        with run.accelerator.accumulate(run.model):
            for _ in range(2):
                run.accelerator.backward(-run.model(torch.full((1, 1), value)).mean(), weight)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.weight == 2 * (1 + 3 * 2) / 4
    with pytest.raises(RuntimeError, match=r"weighs 3\.0 already, and 4 now"), run.accelerator.accumulate(run.model):
        run.accelerator.backward(-run.model(torch.ones(1, 1)).mean(), 3)
        run.accelerator.backward(-run.model(torch.ones(1, 1)).mean(), 4)
    alone = Run(1)
    with alone.accelerator.accumulate(alone.model):  # alone in its window, each is the mean it says it is
        alone.accelerator.backward(-alone.model(torch.ones(1, 1)).mean(), 3)
        alone.accelerator.backward(-alone.model(torch.ones(1, 1)).mean(), 4)
        alone.optimizer.step()
    assert alone.weight == 2


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("weight", "told"),
    [(-1, "weight is -1"), (float("nan"), "weight is nan"), (float("inf"), "weight is inf"), ("x", "weight is 'x'"),
     ("3", "weight is '3'"), (True, "weight is True"),
     (torch.ones(2), r"shape \(2,\)")],
)  # fmt: skip
def test_a_weight_that_is_none(steps: int, weight: Any, told: str) -> None:
    run = Run(steps)
    with pytest.raises(ValueError, match=told):
        run.micro(torch.ones(1, 1), weight=weight)
    for _ in range(steps):
        run.micro(torch.ones(1, 1))
    assert run.weight == 1


def test_a_loss_of_nan_is_as_in_plain_torch() -> None:
    run = Run(2)
    for factor in (float("nan"), 1.0):
        run.micro(torch.ones(1, 1), factor)
    assert run.flags == "01" and torch.isnan(run.own.weight).all()


def test_a_micro_batch_without_a_backward() -> None:
    """Skipped by the user: the window is the mean of the others, also when the last one is skipped."""
    for skipped in range(2):
        run = Run(2)
        for number in range(2):
            with run.accelerator.accumulate(run.model):
                if number != skipped:
                    run.accelerator.backward(-run.model(torch.ones(1, 1)).mean())
                run.optimizer.step()
                run.optimizer.zero_grad()
        assert run.weight == 1


def test_half_losses() -> None:
    """Their factor is rounded as they are: 1/3 is 0.33398 in bfloat16."""
    run = Run(3)
    for _ in range(3):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(-run.model(torch.ones(1, 1)).mean().to(torch.bfloat16))
            run.optimizer.step()
    assert run.own.weight.item() == pytest.approx(1, abs=0.004)


# ---------------------------------------------------------------------- the optimizer
def test_an_optimizer_that_would_train_nothing() -> None:
    accelerator, model, other = Accelerator(), linear_at_zero(), linear_at_zero()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=1.0))
    optimizer.step()  # before any backward: as in plain torch
    accelerator.backward(-prepared(torch.ones(1, 1)).mean())
    with pytest.raises(RuntimeError, match="this SGD would train nothing: none of its 1 parameters has a gradient"):
        optimizer.step()
    other.weight.grad = torch.full_like(other.weight, -1.0)
    optimizer.step()
    assert other.weight.item() == 1


def test_preparing_twice_is_preparing_once() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    once = accelerator.prepare(model, optimizer, scheduler)
    assert all(one is other for one, other in zip(once, accelerator.prepare(model, optimizer, scheduler), strict=True))
    assert all(one is other for one, other in zip(once, accelerator.prepare(*once), strict=True))
    another = Accelerator(gradient_accumulation_steps=2)
    again = another.prepare(*once)
    assert all(one is other for one, other in zip(once, again, strict=True))
    with another.accumulate(model):
        another.backward(-model(torch.ones(1, 1)).mean())
        again[1].step()
    assert model.weight.item() == 0  # the windows that count are those of the Accelerator that prepared last


def test_a_closure() -> None:
    run = Run(1)
    inner = torch.optim.LBFGS(run.own.parameters(), lr=0.5, max_iter=3)
    optimizer = run.accelerator.prepare(inner)
    right = linear_at_zero()
    plain = torch.optim.LBFGS(right.parameters(), lr=0.5, max_iter=3)

    def closure(model: Any, own: Any, backward: Callable[[Any], None]) -> Any:
        def again() -> Any:
            own.zero_grad()
            loss = (model(torch.ones(1, 1)) - 1).pow(2).mean()
            backward(loss)
            return loss

        return again

    for batch in run.loader(3):
        with run.accelerator.accumulate(run.model):
            assert len(batch) == 1
            optimizer.step(closure(run.model, optimizer, run.accelerator.backward))
        plain.step(closure(right, plain, lambda loss: loss.backward()))
    assert run.weight == pytest.approx(right.weight.item(), abs=1e-5) and run.weight > 0.5
