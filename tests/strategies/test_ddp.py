"""DDP beyond plain DDP: several backward calls after one forward, the bare module, left-out parameters, interrupts."""

from __future__ import annotations

import functools
import random
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.strategies import healing
from tests.training import flat, linear_at_zero

pytestmark = pytest.mark.ranks


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(rows).tanh()
        return self.left(hidden), self.right(hidden)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return sum(out.pow(2).mean() for out in self(rows))  # type: ignore[return-value]


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(1 + 2 * rank, 3, generator=torch.Generator().manual_seed(rank))


def _gradients(module: nn.Module) -> list[float]:
    return torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None]).tolist()


def _expected(ranks: int) -> list[float]:
    model = TwoHeads()
    model.loss(torch.cat([_rows(rank) for rank in range(ranks)])).backward()
    return _gradients(model)


def _close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6


def _several_ways(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator
    from nbdist.utils import DistributedDataParallelKwargs

    rows, weight, found = _rows(rank), len(_rows(rank)), {}

    accelerator = Accelerator()
    model = accelerator.prepare(TwoHeads())
    for _ in range(2):
        model.zero_grad()
        total = sum(out.pow(2).mean() for out in model(rows))
        accelerator.backward(total * 0.25, weight, retain_graph=True)
        accelerator.backward(total * 0.75, weight)
    found["two backward calls after one forward"] = _gradients(model)

    model = accelerator.prepare(TwoHeads())
    accelerator.backward(accelerator.unwrap_model(model).loss(rows), weight)
    found["the bare module"] = _gradients(model)

    model = accelerator.prepare(TwoHeads())
    left, _ = model(rows)
    try:
        accelerator.backward(left.mean(), weight)
    except RuntimeError as error:
        found["error"] = str(error)
    accelerator.backward(model.module.loss(rows), weight)  # and it can go on
    found["after the error"] = _gradients(model)

    finding = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = finding.prepare(TwoHeads())
    for _ in range(2):
        model.zero_grad()
        left, right = model(rows)
        finding.backward(left.pow(2).mean(), weight, retain_graph=True)
        finding.backward(right.pow(2).mean(), weight)
    found["a loss for each head"] = _gradients(model)
    return found


def test_every_way_to_backward_gives_the_joint_gradient() -> None:
    expected = _expected(2)
    for found in run_ranks(_several_ways, 2):
        message = found.pop("error")
        assert "TwoHeads" in message and "right.weight" in message and "find_unused_parameters" in message
        for way, gradient in found.items():
            assert _close(gradient, expected), way


def _masked(rank: int, ranks: int) -> dict[str, list[float]]:
    """Two windows of two micro-batches; in half of them, others on each rank, nothing counts and the loss is 0/0."""
    from torch.utils.checkpoint import checkpoint

    from nbdist import Accelerator
    from nbdist.utils import DistributedDataParallelKwargs

    found = {}
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        for reentrant in (None, False) if "find_unused_parameters" in options else (None, False, True):
            handler = DistributedDataParallelKwargs(**options)
            accelerator = Accelerator(kwargs_handlers=[handler], gradient_accumulation_steps=2)
            own = nn.Sequential(_deep(), nn.Linear(2, 1))
            nn.init.ones_(own[1].weight)
            nn.init.zeros_(own[1].bias)
            if reentrant is not None:
                inner = own[0]
                inner.forward = functools.partial(checkpoint, inner.forward, use_reentrant=reentrant)
            model = accelerator.prepare(own)
            for number in range(4):
                with accelerator.accumulate(model):
                    rows = torch.full((2, 3), 1.0 + rank, requires_grad=True)
                    mask = torch.full((2,), float((rank + number) % 2))
                    loss = (model(rows).squeeze(1) * mask).sum() / mask.sum()
                    accelerator.backward(loss, weight=mask.sum())
            found[f"{options} {reentrant}"] = _gradients(own)
    return found


def test_a_loss_that_weighs_nothing_adds_zeros_in_every_engine() -> None:
    own = nn.Sequential(_deep(), nn.Linear(2, 1))
    nn.init.ones_(own[1].weight)
    (2 * sum(own(torch.full((2, 3), 1.0 + rank)).mean() for rank in range(2)) / 2).backward()
    for found in run_ranks(_masked, 2):
        assert len(found) == 11
        for way, gradient in found.items():
            assert _close(gradient, _gradients(own)), way


def _unlike(rank: int, ranks: int) -> list[str]:
    """Pairs of models, one for each rank."""
    from torch.nn.parallel import DistributedDataParallel

    from nbdist import Accelerator

    accelerator = Accelerator()
    frozen = nn.Linear(2, 3).requires_grad_(False)
    told = []
    for pair in (
        (nn.Linear(2, 3), nn.Linear(2, 3).double()),
        (nn.Linear(2, 3), nn.Linear(3, 3)),
        (nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3))),
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.Linear(2, 3))),
        (frozen, nn.Linear(2, 3)),
        [nn.Sequential(OrderedDict((name, nn.Linear(1, 1)) for name in names)) for names in ("ab", "ba")],
    ):
        try:
            accelerator.prepare(pair[rank])
        except ValueError as error:
            told.append(str(error).split(". ")[1])
    left_out = nn.Sequential(nn.Linear(2, 3 + rank, bias=False), nn.Linear(1, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(left_out, ["0.weight"])
    accelerator.prepare(left_out)
    return told


def test_models_that_differ_between_the_ranks_are_told_on_all_of_them() -> None:
    one, other = run_ranks(_unlike, 2)
    assert one == other
    assert one == [
        "weight: rank 0 has float32 (3, 2), trained; rank 1 has float64 (3, 2), trained",
        "weight: rank 0 has float32 (3, 2), trained; rank 1 has float32 (3, 3), trained",
        "0.weight: rank 0 has nothing of that name; rank 1 has float32 (3, 2), trained",
        "1.weight: rank 0 has float32 (3,), trained; rank 1 has nothing of that name",
        "weight: rank 0 has float32 (3, 2); rank 1 has float32 (3, 2), trained",
        "Their order: rank 0 has a.weight; rank 1 has b.weight",
    ]


def _other_things(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator

    accelerator = Accelerator()
    with torch.no_grad():
        frozen = linear_at_zero().requires_grad_(False)
        frozen.weight.fill_(float(rank + 5))
    trained = linear_at_zero()
    nn.init.constant_(trained.weight, float(rank + 1))
    wrapped = accelerator.prepare(trained)
    return {
        "frozen stays bare": accelerator.prepare(frozen) is frozen,
        "frozen": frozen.weight.item(),
        "trained": trained.weight.item(),
        "once": accelerator.prepare(trained) is wrapped and accelerator.prepare(wrapped) is wrapped,
        "own object": accelerator.unwrap_model(wrapped) is trained,
        "through compile": accelerator.unwrap_model(torch.compile(wrapped)) is trained,
    }


def test_models_start_equal_and_are_wrapped_once() -> None:
    right = {"frozen stays bare": True, "frozen": 5.0, "trained": 1.0, "once": True, "own object": True}
    assert run_ranks(_other_things, 2) == [{**right, "through compile": True}] * 2


def _deep() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def _interrupted(rank: int, ranks: int, options: dict[str, Any]) -> tuple[float, list[str]]:
    """Interrupts at random places, the same on both ranks or different ones; then training must equal plain torch's."""
    from torch.nn.parallel import DistributedDataParallel

    from nbdist import state
    from nbdist.strategies import repair

    hooked = options.pop("hook", None)
    model, reference = _deep(), _deep()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)  # several buckets
    if hooked == "built in":
        wrapped._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    elif hooked == "python":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        wrapped.register_comm_hook(None, allreduce_hook)
    repair.track(wrapped)
    steppers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference)]
    draw, base, worst, log = random.Random(7), healing.store(), 0.0, []

    def train(rows: torch.Tensor) -> None:
        wrapped(rows[rank * 4 : rank * 4 + 4]).pow(2).mean().backward()
        reference(rows).pow(2).mean().backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()

    for round in range(1, 9):
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(round))
        for _ in range(draw.randint(0, 2)):
            train(rows)
        places = [draw.choice(["forward", "backward", "backward", "waiting"]) for _ in range(ranks)]
        depths = [draw.randrange(6) for _ in range(ranks)]
        if set(places) == {"waiting"}:
            places[0] = "backward"
        log.append(_interrupt(wrapped, rows[rank * 4 : rank * 4 + 4], places[rank], depths[rank]))
        healing.heal(round, base)
        for hook in list(state.interrupt_hooks):
            hook()
        for _ in range(2):
            train(rows)
        pairs = zip(flat(model), flat(reference), strict=True)
        worst = max(worst, max(abs(one - other) for one, other in pairs))
    return worst, log


def _interrupt(wrapped: Any, rows: torch.Tensor, place: str, depth: int) -> str:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if place == "forward":
        handle: Any = wrapped.module[2].register_forward_pre_hook(interrupt)
    elif place == "backward":
        handle = list(wrapped.module.parameters())[depth].register_hook(interrupt)
    else:  # this rank's all-reduce waits for the other one: as on a Stop, its connections are cut
        handle = threading.Timer(0.3, healing.cut)
        handle.start()
    try:
        wrapped(rows).pow(2).mean().backward()
        return "ended"
    except KeyboardInterrupt:
        return "interrupted"
    except RuntimeError:
        return "cut"
    finally:
        handle.join() if place == "waiting" else handle.remove()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"hook": "built in"}, {"hook": "python"}],
    ids=str,
)
def test_a_wrapper_trains_on_rightly_after_interrupts_anywhere(options: dict[str, Any]) -> None:
    answers = run_ranks(_interrupted, 2, options)
    for worst, _ in answers:
        assert worst < 1e-6, answers
    assert {"interrupted", "cut"} <= {how for _, log in answers for how in log}
