"""fp16 with loss scaling: real on the CPU, where torch has half precision and a GradScaler for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nbdist import Accelerator
from nbdist.kwargs import GradScalerKwargs
from nbdist.scaling import Scaler
from tests.ranks import run_ranks
from tests.training import flat, network

KINDS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def fp16(**options: Any) -> Accelerator:
    scaling = GradScalerKwargs(**{"init_scale": 2.0**10, "growth_interval": 1000, **options.pop("scaling", {})})
    return Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling], **options)


def _rows() -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def _train(accelerator: Accelerator, kind: dict[str, Any], steps: int = 4) -> list[float]:
    own = network()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, **kind))
    for _ in range(steps):
        accelerator.backward(model(_rows()).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return flat(own)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scaling_changes_nothing_but_what_half_precision_rounds(kind: dict[str, Any]) -> None:
    accelerator = fp16()
    assert _train(accelerator, kind) == pytest.approx(_train(Accelerator(), kind), abs=2e-3)
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 2.0**10
    assert Accelerator().scaler is None and Accelerator(mixed_precision="bf16").scaler is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_that_overflows_is_left_out_and_seen_and_the_scheduler_waits(kind: dict[str, Any]) -> None:
    accelerator = fp16()
    own = network()
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0, **kind)
    model, optimizer, scheduler = accelerator.prepare(own, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    seen = []
    for step in range(3):
        before = flat(own)
        loss = model(_rows()).mean()
        accelerator.backward(loss * float("inf") if step == 1 else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, flat(own) == before, scheduler.get_last_lr()[0]))
    assert seen == [(False, False, 0.1), (True, True, 0.1), (False, False, pytest.approx(0.01))]
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 2.0**9


def test_two_optimizers_of_one_backward_have_one_scale_and_skip_for_themselves() -> None:
    accelerator = fp16(scaling={"growth_interval": 1, "init_scale": 8.0})
    one, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    models = accelerator.prepare(one, other)
    first, second = accelerator.prepare(
        torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(other.parameters(), lr=1.0)
    )
    rows = torch.ones(2, 1)
    before = one.weight.item(), other.weight.item()
    accelerator.backward(models[0](rows).mean() + models[1](rows).mean() * float("inf"))
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)
    assert one.weight.item() == pytest.approx(before[0] - 1.0, abs=1e-3) and other.weight.item() == before[1]
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 8.0  # until the next backward
    first.zero_grad()
    second.zero_grad()
    accelerator.backward(models[0](rows).mean() + models[1](rows).mean())
    assert accelerator.scaler.get_scale() == 4.0
    accelerator.unscale_gradients(second)
    accelerator.unscale_gradients()
    assert one.weight.grad.item() == other.weight.grad.item() == pytest.approx(1.0, abs=1e-3)
    first.step()
    first.step()  # again, on the same gradients, as in plain torch
    assert one.weight.item() == pytest.approx(before[0] - 3.0, abs=2e-3)


def test_a_window_has_one_scale_also_beside_another_model_that_steps() -> None:
    accelerator = fp16(gradient_accumulation_steps=3, scaling={"growth_interval": 1, "init_scale": 4.0})
    slow, quick = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    models = accelerator.prepare(slow, quick)
    one = accelerator.prepare(torch.optim.SGD(slow.parameters(), lr=1.0))
    other = accelerator.prepare(torch.optim.SGD(quick.parameters(), lr=1.0))
    rows, scales, start = torch.ones(2, 1), [], slow.weight.item() + quick.weight.item()
    for _ in range(2):
        for _ in range(3):
            with accelerator.accumulate(models[0]):
                accelerator.backward(models[0](rows).mean())
                one.step()
                one.zero_grad()
            with accelerator.accumulate(models[1], last=True):
                accelerator.backward(models[1](rows).mean())
                other.step()
                other.zero_grad()
            scales.append(accelerator.scaler.get_scale())  # type: ignore[union-attr]
    assert slow.weight.item() + quick.weight.item() == pytest.approx(start - 2.0 - 6.0, abs=9e-3)
    assert scales[0] == scales[1] == scales[2] / 2 and scales[3] == scales[4], scales


def test_windows_over_a_loader_are_as_in_full_precision() -> None:
    def train(accelerator: Accelerator) -> list[float]:
        own = network()
        model, optimizer, loader = accelerator.prepare(
            own, torch.optim.SGD(own.parameters(), lr=0.5), DataLoader(_rows(), batch_size=1)
        )
        for rows in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).pow(2).mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return flat(own)

    scaled = train(fp16(gradient_accumulation_steps=4, scaling={"growth_interval": 1}))
    assert scaled == pytest.approx(train(Accelerator(gradient_accumulation_steps=4)), abs=3e-3)


def test_a_loss_in_half_precision_is_scaled_in_full() -> None:
    accelerator = fp16(output_dtype="keep", scaling={"init_scale": 2.0**17})  # more than float16 holds
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    skipped = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).mean()
        assert loss.dtype is torch.float16
        accelerator.backward(loss)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [True, True, False] and model.weight.grad.item() == 1.0


def test_what_cannot_go_with_it_says_so() -> None:
    accelerator = fp16()
    model, optimizer = accelerator.prepare(own := network(), torch.optim.SGD(own.parameters(), lr=1.0))
    optimizer.step()  # no gradients yet: as torch
    with pytest.raises(RuntimeError, match=r"SGD.step\(closure\) cannot go with mixed_precision='fp16'.*Use 'bf16'"):
        optimizer.step(lambda: 0.0)
    half = nn.Linear(1, 1).half()
    model, optimizer = accelerator.prepare(half, torch.optim.SGD(half.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).mean())
    with pytest.raises(ValueError, match=r"unscale FP16 gradients.*load the model in float32"):
        optimizer.step()


def test_clipping_without_a_step_spoils_nothing() -> None:
    accelerator = fp16()
    model, optimizer = accelerator.prepare(
        own := nn.Linear(1, 1, bias=False), torch.optim.SGD(own.parameters(), lr=1.0)
    )
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).mean())
        assert accelerator.clip_grad_norm_(model.parameters(), 10.0).item() == pytest.approx(1.0)


def test_without_scaling_on_request() -> None:
    accelerator = fp16(scaling={"enabled": False})
    assert _train(accelerator, {}) == pytest.approx(_train(Accelerator(), {}), abs=2e-3)


def test_without_the_scalers_own_word_the_gradients_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.amp.GradScaler, "_found_inf_per_device")
    scaler = Scaler(torch.device("cpu"))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for bad in (False, True):
        weight.grad = None
        torch.autograd.backward(weight.sum(), scaler.seed(1.0))
        if bad:
            weight.grad = torch.full((1,), float("nan"))
        _, skipped = scaler.step(optimizer)
        assert skipped is bad


def _on_rank(rank: int, ranks: int) -> list[Any]:
    accelerator = fp16()
    own = nn.Linear(1, 1, bias=False)
    nn.init.ones_(own.weight)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    told: list[Any] = []
    for bad in (False, True):  # on one rank alone
        loss = model(torch.full((1, 1), 1.0 + 2 * rank)).mean()
        accelerator.backward(loss * float("inf") if bad and rank else loss)
        optimizer.step()
        optimizer.zero_grad()
        told += [optimizer.step_was_skipped, own.weight.item()]
    return told


@pytest.mark.ranks
def test_all_ranks_skip_together() -> None:
    assert run_ranks(_on_rank, 2) == [[False, -1.0, True, -1.0]] * 2
