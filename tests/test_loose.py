"""Parameters that are trained and belong to no named or prepared model: they are their window's, and all ranks'."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nbdist import Accelerator
from nbdist.kwargs import GradientAccumulationPlugin
from tests import training
from tests.ranks import run_ranks
from tests.training import linear_at_zero

CASES = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 20),
        "batch": st.integers(1, 4),
        "sampler": st.just("in order"),
        "drop_last": st.just(False),
        "tokens": st.booleans(),
        "accumulation": st.integers(1, 3),
        "epochs": st.just(2),
        "prepared": st.sets(st.sampled_from(["first", "second", "criterion"])),
        "named": st.sampled_from(["first", "all"]),
        "optimizers": st.sampled_from(["one", "the temperature's own"]),
        "wiped_by": st.sampled_from(["optimizer", "models"]),
        "clip": st.sampled_from([0.0, 0.3]),
    }
)


class Parts:
    """Two models, a criterion with weights, and a temperature that belongs to none of them."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.modules = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2), "criterion": nn.Linear(2, 1)}
        self.temperature = nn.Parameter(torch.ones(()))
        self.called = dict(self.modules)

    def parameters(self) -> list[Any]:
        return [*(one for module in self.modules.values() for one in module.parameters()), self.temperature]

    def optimizers(self, case: dict[str, Any]) -> list[torch.optim.Optimizer]:
        *models, temperature = self.parameters()
        if case["optimizers"] == "one":
            return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)]
        return [torch.optim.SGD(one, lr=0.1, momentum=0.5) for one in (models, [temperature])]

    def loss(self, rows: torch.Tensor, tokens: bool) -> tuple[torch.Tensor, Any]:
        hidden = self.called["second"](self.called["first"](rows[:, :3] / 10).tanh()) * self.temperature
        each = self.called["criterion"](hidden).pow(2).mean(1)
        if not tokens:
            return each.mean(), None
        counts = rows[:, 3]
        return (each * counts).sum() / counts.sum(), counts.sum()

    def flat(self) -> list[float]:
        return torch.cat([one.detach().flatten() for one in self.parameters()]).tolist()


def prepared(case: dict[str, Any]) -> tuple[list[float], list[list[list[int]]]]:
    accelerator = Accelerator(gradient_accumulation_steps=case["accumulation"])
    parts = Parts()
    for name in sorted(case["prepared"]):
        parts.called[name] = accelerator.prepare(parts.modules[name])
    optimizers = [accelerator.prepare(one) for one in parts.optimizers(case)]
    batches = accelerator.prepare(training.loader(case))
    named = [parts.called["first"]] if case["named"] == "first" else list(parts.called.values())
    seen = []
    for _ in range(case["epochs"]):
        steps = []
        for batch in batches:
            with accelerator.accumulate(*named):
                if case["wiped_by"] == "models":
                    for module in parts.called.values():
                        module.zero_grad()
                    optimizers[-1].zero_grad()
                loss, weight = parts.loss(batch, case["tokens"])
                accelerator.backward(loss, weight=weight)
                if case["clip"]:
                    accelerator.clip_grad_norm_(parts.parameters(), case["clip"])
                for optimizer in optimizers:
                    optimizer.step()
                if case["wiped_by"] == "optimizer":
                    for optimizer in optimizers:
                        optimizer.zero_grad()
            steps.append(batch[: accelerator._live[-1].local, 0].int().tolist())  # type: ignore[union-attr]
        seen.append(steps)
    return parts.flat(), seen


def prepared_on_rank(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[Any]:
    return [prepared(case) for case in cases]


def in_plain_torch(case: dict[str, Any], epochs: list[list[list[int]]]) -> list[float]:
    parts, rows = Parts(), training.data(case)
    optimizers = parts.optimizers(case)
    for window in training.windows(case, epochs):
        parts.loss(rows[window], case["tokens"])[0].backward()
        if case["clip"]:
            nn.utils.clip_grad_norm_(parts.parameters(), case["clip"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parts.flat()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(CASES, min_size=40, max_size=40))
def test_they_train_as_in_one_process(ranks: int, cases: list[dict[str, Any]]) -> None:
    answers = [prepared_on_rank(0, 1, cases)] if ranks == 1 else run_ranks(prepared_on_rank, ranks, cases)
    for case, *by_rank in zip(cases, *answers, strict=True):
        epochs = zip(*(seen for _, seen in by_rank), strict=True)
        joined = [[[row for part in step for row in part] for step in zip(*epoch, strict=True)] for epoch in epochs]
        expected = in_plain_torch(case, joined)
        for parameters, _ in by_rank:
            worst = max(abs(one - other) for one, other in zip(parameters, expected, strict=True))
            assert worst < 1e-5, (worst, case)


def sgd(*parts: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [one for part in parts for one in (part.parameters() if isinstance(part, nn.Module) else [part])], lr=lr
    )


def at_zero() -> nn.Parameter:
    return nn.Parameter(torch.zeros(()))


# ---------------------------------------------------------------------- one process
def test_a_window_that_ends_by_hand_corrects_all_of_it() -> None:
    accelerator, model, own, other = Accelerator(), linear_at_zero(), at_zero(), at_zero()
    model, one, two = accelerator.prepare(model, sgd(model, own), sgd(other))
    for number, x in enumerate((1.0, 2.0, 6.0)):
        with accelerator.accumulate(model, last=number == 2):
            accelerator.backward(-(model(torch.full((1, 1), x)) + (own + other) * x).mean())
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
    assert model.weight.item() == own.item() == other.item() == 3


def test_a_window_that_is_dropped_leaves_nothing_of_it() -> None:
    accelerator, model, loose = Accelerator(gradient_accumulation_steps=2), linear_at_zero(), at_zero()
    model, _optimizer = accelerator.prepare(model, sgd(model, loose))
    with pytest.raises(ZeroDivisionError), accelerator.accumulate(model):
        accelerator.backward((model(torch.ones(1, 1)) + loose).mean())
        raise ZeroDivisionError
    assert model.weight.grad is None and loose.grad is None


def test_what_is_another_windows_is_left_alone() -> None:
    """A GAN whose critic has a temperature: in one optimizer with it, in one of its own, or all in one."""
    for together in (True, False):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        maker, critic, loose = linear_at_zero(), linear_at_zero(), at_zero()
        nn.init.ones_(critic.weight)
        if together:
            optimizers = [sgd(critic, loose), sgd(maker, lr=0.0)]
        else:
            optimizers = [sgd(critic), sgd(loose), sgd(maker, lr=0.0)]
        maker, critic, *optimizers = accelerator.prepare(maker, critic, *optimizers)
        for x in (torch.ones(1, 1), torch.full((1, 1), 3.0)):
            with accelerator.accumulate(critic):
                accelerator.backward((critic(x) + loose * x).mean())
                for optimizer in optimizers[:-1]:
                    optimizer.step()
                    optimizer.zero_grad()
            if together:
                with accelerator.accumulate(maker):
                    accelerator.backward(100 * (critic(maker(x)) + loose).mean())
                    optimizers[-1].step()
                    optimizers[-1].zero_grad()
        assert critic.weight.item() == 1 - 2 and loose.item() == -2


def test_two_windows_of_one_optimizer_correct_each_their_own() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = linear_at_zero(), linear_at_zero()
    first, second, optimizer = accelerator.prepare(first, second, sgd(first, second))
    for x, rows in ((1.0, 1), (5.0, 3)):
        for model in (first, second):
            with accelerator.accumulate(model):
                accelerator.backward(-model(torch.full((rows, 1), x)).mean(), weight=rows)
                if model is second:
                    optimizer.step()
                    optimizer.zero_grad()
    assert first.weight.item() == second.weight.item() == 4


@pytest.mark.parametrize("at", ["before", "behind"])
def test_a_models_zero_grad_does_not_wipe_an_open_window(at: str) -> None:
    accelerator, model = Accelerator(gradient_accumulation_steps=2), linear_at_zero()
    model, optimizer = accelerator.prepare(model, sgd(model))
    weights = []
    for x in (1.0, 2.0, 3.0, 4.0):
        with accelerator.accumulate(model):
            if at == "before":
                model.zero_grad()
            accelerator.backward(-model(torch.full((1, 1), x)).mean())
            optimizer.step()
            if at == "behind":
                model.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0, 1.5, 1.5, 5]


def test_zeros_that_are_written_into_them_are_told_once() -> None:
    accelerator, model = Accelerator(gradient_accumulation_steps=3), linear_at_zero()
    model, optimizer = accelerator.prepare(model, sgd(model))

    def micro() -> None:
        with accelerator.accumulate(model):
            model.zero_grad(set_to_none=False)
            accelerator.backward(-model(torch.ones(1, 1)).mean())
            optimizer.step()

    micro()
    with pytest.warns(UserWarning, match="wiped the gradients of an unfinished accumulation window"):
        micro()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        micro()


@pytest.mark.parametrize("inside", [True, False])
def test_a_bare_optimizer_in_an_unfinished_window_is_an_error(inside: bool) -> None:
    accelerator, model = Accelerator(gradient_accumulation_steps=2), linear_at_zero()
    optimizer, other = sgd(model), sgd(linear_at_zero())
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(torch.ones(4, 1)))
    with pytest.raises(
        RuntimeError, match=r"this SGD was not prepared .* \(micro-batch 1 of 2\).*prepare\(optimizer\)"
    ):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(-model(x).mean())
                other.step()
                if inside:
                    optimizer.step()
            optimizer.step()
    assert model.weight.item() == 0
    for _ in loader:
        optimizer.step()  # deliberately, outside of all windows


def test_a_bare_optimizer_may_step_when_a_loop_has_left_a_window_open() -> None:
    accelerator, model = Accelerator(gradient_accumulation_steps=2), linear_at_zero()
    optimizer = sgd(model)
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        accelerator.backward(-model(torch.ones(1, 1)).mean())
    optimizer.step()
    assert model.weight.item() == 0.5


# ---------------------------------------------------------------------- two ranks
def _shared(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    one = torch.full((1, 1), 1.0 + 2 * rank)

    def said(function: Any) -> str:
        try:
            function()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    def made(*loose: Any, **options: Any) -> tuple[Any, ...]:
        accelerator, model = Accelerator(**options), linear_at_zero()
        return accelerator, *accelerator.prepare(model, sgd(model, *loose))

    accelerator, forgotten = Accelerator(), linear_at_zero()
    optimizer = accelerator.prepare(sgd(forgotten))
    accelerator.backward(-forgotten(one).mean())
    optimizer.step()
    found["forgotten"] = forgotten.weight.item()

    accelerator, thawed = Accelerator(), linear_at_zero().requires_grad_(False)
    model, optimizer = accelerator.prepare(thawed, sgd(thawed))
    model.requires_grad_(True)
    accelerator.backward(-model(one).mean())
    optimizer.step()
    found["thawed"] = thawed.weight.item()

    loose = nn.Parameter(torch.full((2, 3), float(rank)).T)  # not contiguous
    accelerator, model, optimizer = made(loose)
    found["as on rank 0"] = loose.sum().item()
    later, nowhere = nn.Parameter(torch.tensor(1.0 + rank)), nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [later, nowhere]})
    accelerator.backward(-(model(one) + (later if rank else 0)).mean())
    found["one has it"] = later.item(), later.grad, loose.grad, nowhere.grad

    rows = nn.Embedding(4, 2, sparse=True)
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    accelerator, model, optimizer = made(rows, half)
    accelerator.backward((rows(torch.tensor([rank])).sum() + (half * one).sum() * rank) * model(one).mean().exp())
    gradient = rows.weight.grad
    assert gradient is not None and half.grad is not None
    found["kinds"] = str(gradient.layout), gradient.to_dense()[:, 0].tolist(), half.grad.tolist(), str(half.grad.dtype)

    for each in (False, True):
        loose = at_zero()
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        accelerator, model, optimizer = made(loose, gradient_accumulation_plugin=plugin)
        with accelerator.accumulate(model):
            accelerator.backward((model(one) + loose * one).mean())
            optimizer.step()
            first = loose.grad.item()
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward((model(one) + loose * one).mean())
            second = loose.grad.item()
        if each:
            with accelerator.accumulate(model):
                optimizer.step()
        else:
            with accelerator.accumulate(model), accelerator.no_sync(model):
                accelerator.backward((model(one) + loose * one).mean())
        found[f"in a window {each}"] = first, second, loose.grad.item()

    loose = at_zero()
    accelerator, model, optimizer = made(loose)
    (model(one) + loose).mean().backward()
    found["torch's own backward"] = said(optimizer.step)
    optimizer.zero_grad()
    accelerator.backward((model(one) + loose).mean())
    optimizer.step()

    apart = nn.Parameter(torch.zeros(rank + 1))
    some = [nn.Parameter(torch.zeros(1)) for _ in range(2 - rank)]
    found["on one rank"] = said(lambda: Accelerator().prepare(torch.optim.SGD(some, lr=1.0)))
    found["apart"] = said(lambda: Accelerator().prepare(sgd(apart)))
    accelerator, bare = Accelerator(), linear_at_zero()
    found["bare"] = said(lambda: accelerator.accumulate(bare))
    accelerator.prepare(sgd(bare))  # nobody keeps it
    found["bare and gone"] = said(lambda: accelerator.accumulate(bare))
    kept = accelerator.prepare(sgd(bare))
    found["bare and trained"] = said(lambda: accelerator.accumulate(bare)), len(kept.param_groups)
    return found


@pytest.mark.ranks
def test_what_no_wrapper_averages_is_averaged() -> None:
    for rank, found in enumerate(run_ranks(_shared, 2)):
        mine = 1.0 + 2 * rank
        assert found["forgotten"] == found["thawed"] == 2
        assert found["as on rank 0"] == 0
        assert found["one has it"] == (1, -0.5, None, None)
        assert found["kinds"] == ("torch.sparse_coo", [0.5, 0.5, 0, 0], [1.5] * 3, "torch.bfloat16")
        assert found["in a window False"] == (mine / 2, 2, 2 + mine / 2)
        assert found["in a window True"][1:] == (2.0, 2.0)  # the one without a backward counts
        assert "loss.backward() is each rank's own. Call accelerator.backward(loss)" in found["torch's own backward"]
        assert "parameter 1 of this SGD" in found["on one rank"] and "rank 1 has none" in found["on one rank"]
        assert "rank 0 has (1,) of torch.float32; rank 1 has (2,) of torch.float32" in found["apart"]
        assert "this Linear is not prepared: each of the 2 ranks would train one of its own" in found["bare"]
        assert found["bare and gone"] == found["bare"]
        assert found["bare and trained"] == ("", 1)
