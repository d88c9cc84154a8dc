"""A model under DDP: attributes, methods other than forward, compressed gradients, precision."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.training import flat, linear_at_zero

pytestmark = pytest.mark.ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config, self.temperature = linear_at_zero(), {"size": 1}, 1.0
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(rows)) * self.temperature

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows).mean() * self.temperature

    def normed_loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).mean()

    def bare_loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.linear.weight).mean()

    def describe(self) -> str:
        return f"{len(list(self.parameters()))} parameters"

    def generate(self, rows: torch.Tensor) -> Any:
        for _ in range(2):
            rows = self(rows)
            yield rows

    @torch.no_grad()
    def sample(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(rows)

    @property
    def size(self) -> int:
        return self.config["size"]


class Cells(nn.Sequential):
    dim = 8


def _methods(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator
    from nbdist.utils import DistributedDataParallelKwargs

    accelerator, rows, found = Accelerator(), torch.full((1, 1), 1.0 + 2 * rank), {}

    model = accelerator.prepare(Model())
    accelerator.backward(model.loss(rows))  # DD1
    found["loss"] = model.module.linear.weight.grad.item()

    model = accelerator.prepare(Model())
    accelerator.backward(model.bare_loss(rows))
    found["without a module's call"] = model.module.linear.weight.grad.item()

    for unused in (False, True):
        options = DistributedDataParallelKwargs(find_unused_parameters=unused)
        model = Accelerator(kwargs_handlers=[options]).prepare(Model())
        model.loss(rows).backward()  # without an Accelerator, as DDP alone does it
        found[f"plain backward, {unused}"] = model.module.linear.weight.grad.item()

    own = Model()
    model = accelerator.prepare(own)
    own.norm.running_mean.fill_(float(rank + 5))
    own.eval()
    if rank == 1:  # on one rank alone: nothing that all ranks would have to join
        assert model.describe() == "1 parameters"
        assert model.sample(torch.ones(1, 1)).shape == (1, 1)
        assert len(list(model.generate(rows))) == 2
    assert own.norm.running_mean.item() == rank + 5
    model.normed_loss(rows)
    found["buffers"] = own.norm.running_mean.item()  # rank 0's, as DDP makes them in forward

    found["statistics"] = []
    for _ in range(2):
        own.train()
        accelerator.backward(model(rows.expand(2, 1)).mean())
        found["statistics"].append(own.norm.running_mean.item())
        own.eval()
        with torch.no_grad():
            _ = rank == 0 and model(rows)  # also on one rank alone
    own.norm.running_mean.fill_(5.0)

    found["attributes"] = (model.config is own.config, model.size, model.linear is own.linear, "loss" in dir(model))
    model.temperature = 3.0
    model.linear = linear_at_zero()
    found["set"] = (own.temperature, own.linear is model.linear, list(model.state_dict())[:1])
    try:
        _ = model.nothing
    except AttributeError as error:
        found["error"] = str(error)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cells = accelerator.prepare(Cells(nn.Linear(1, 1), nn.Tanh()))
    found["special"] = (len(cells), cells[0] is cells.module[0], [type(one).__name__ for one in cells])
    found["said"] = [str(one.message) for one in said]
    found["no length"] = hasattr(model, "__len__")
    return found


def test_dd1_what_the_module_has_the_prepared_model_has() -> None:
    """DD1: m.loss(x) exists, and its gradient is the mean over the ranks."""
    for found in run_ranks(_methods, 2):
        for way in ("loss", "without a module's call", "plain backward, False", "plain backward, True"):
            assert found[way] == 2.0, way
        assert found["buffers"] == 5.0
        assert found["statistics"] == pytest.approx([0.9 * 5 + 0.1, 0.9**2 * 5 + 0.9 * 0.1 + 0.1])  # rank 0's
        assert found["attributes"] == (True, 1, True, True)
        assert found["set"] == (3.0, True, ["linear.weight"])
        assert "'Model' object has no attribute 'nothing'" in found["error"]
        assert found["special"] == (2, True, ["Linear", "Tanh"]) and not found["no length"]
        (said,) = found["said"]
        assert said.startswith("Cells has dim, and so has DistributedDataParallel") and "model.module.dim" in said


def _deep() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def _compressed(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator, state
    from nbdist.kwargs import DDPCommunicationHookType as Hook
    from nbdist.utils import DistributedDataParallelKwargs

    found = {}
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))[rank * 4 : rank * 4 + 4]
    few = {"start_powerSGD_iter": 3, "matrix_approximation_rank": 4}
    for hook, wrapper, options in (
        ("no", "no", {}),
        ("fp16", "no", {}),
        (Hook.BF16, "no", {}),
        ("power_sgd", "no", few),
        ("power_sgd", Hook.FP16, few),
        ("power_sgd", "bf16", few),
    ):
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
        accelerator = Accelerator(kwargs_handlers=[handler])
        own = _deep()
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05))
        for step in range(8):
            if step == 6 and rank == 0:  # one rank is ahead when both are stopped
                model._comm_hooks[0:] and setattr(model._comm_hooks[0][1] or own, "iter", 99)
            if step == 6:
                for after in list(state.interrupt_hooks):
                    after()
            optimizer.zero_grad()
            accelerator.backward(model(rows).pow(2).mean())
            optimizer.step()
        assert accelerator.prepare(own) is model
        found[f"{hook} {wrapper}"] = flat(own)
    return found


def test_compressed_gradients_train_also_after_an_interrupt_and_ranks_stay_equal() -> None:
    one, other = run_ranks(_compressed, 2)
    start, exact = flat(_deep()), one["no no"]
    moved = max(abs(a - b) for a, b in zip(start, exact, strict=True))
    assert moved > 1e-3
    for name, parameters in one.items():
        assert parameters == other[name], name
        far = max(abs(a - b) for a, b in zip(parameters, exact, strict=True))
        assert far < moved * 0.6, (name, far, moved)
        assert name == "no no" or far > 0, f"{name} has compressed nothing"


def _names(rank: int, ranks: int) -> None:
    from torch.distributed.checkpoint import state_dict as checkpoint
    from torch.optim.swa_utils import AveragedModel

    from nbdist import Accelerator

    own = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(own, torch.optim.Adam(own.parameters()))
    names = list(own.state_dict())
    rest = nn.Linear(1, 1)
    for module, single, where in (
        (model, own, ""),
        (nn.ModuleDict({"a": model, "b": rest}), nn.ModuleDict({"a": own, "b": rest}), "a."),
        (AveragedModel(model), AveragedModel(own), "module."),
        (pickle.loads(pickle.dumps(model)), own, ""),
        (torch.compile(model), torch.compile(own), "_orig_mod."),
    ):
        for kind in ("named_modules", "named_parameters", "named_buffers", "state_dict"):
            these, those = (dict(getattr(one, kind)()) for one in (module, single))
            assert list(these) == list(those), (type(module), kind)
        with_prefix = {
            name.replace(where, f"{where}module.", 1 if name.startswith(where) else 0): one
            for name, one in those.items()
        }
        for state in (those, these, with_prefix):
            module.load_state_dict({name: torch.full_like(one, 2) for name, one in state.items()})
            assert all((one == 2).all() for one in module.state_dict().values())
    assert model.state_dict()._metadata.items() >= own.state_dict()._metadata.items()
    assert set(model.modules()) == {model, *own.modules()}

    wrong = {**model.state_dict(), "more": torch.ones(1)}
    del wrong["0.bias"]
    found = model.load_state_dict(wrong, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["more"])
    inner = accelerator.prepare(
        nn.Sequential(OrderedDict(part=nn.Sequential(OrderedDict(module=nn.Linear(1, 1))))).part
    )
    inner.load_state_dict(accelerator.unwrap_model(inner).state_dict())
    inner.load_state_dict({f"module.{name}": one for name, one in inner.state_dict().items()})

    accelerator.backward(model(torch.randn(4, 2)).mean())
    optimizer.step()
    for module in (model, torch.compile(model)):
        state = checkpoint.get_model_state_dict(module)
        assert sorted(state) == sorted(names)
        checkpoint.set_model_state_dict(module, {name: torch.ones_like(one) for name, one in state.items()})
        assert all((one == 1).all() for one in own.state_dict().values())
    for one in (optimizer, optimizer.optimizer):
        state = checkpoint.get_optimizer_state_dict(model, one)
        assert "2.0.weight" in state["state"]
        checkpoint.set_optimizer_state_dict(model, one, state)


def test_names_and_state_are_those_of_the_module_and_torchs_checkpoints_work() -> None:
    run_ranks(_names, 2)


def _refused(rank: int, ranks: int) -> list[str]:
    from nbdist import Accelerator
    from nbdist.utils import DistributedDataParallelKwargs

    found = []
    for options in (
        {"comm_hook": "fp17"},
        {"comm_wrapper": "fp16"},
        {"comm_hook": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}},
        {"comm_hook": "fp16", "comm_wrapper": "power_sgd"},
        {"comm_hook": "power_sgd", "comm_state_option": {"start": 2}},
        {"comm_hook": "batched_power_sgd"},
    ):
        handler = DistributedDataParallelKwargs(**options)  # type: ignore[arg-type]
        try:
            Accelerator(kwargs_handlers=[handler], strategy="ddp").prepare(nn.Linear(1, 1))
        except (ValueError, NotImplementedError) as error:
            found.append(str(error))
    silently = DistributedDataParallelKwargs(comm_hook="fp17")  # type: ignore[arg-type]
    Accelerator(kwargs_handlers=[silently], strategy="single")
    return found


def test_hooks_that_do_not_go_together_are_refused_and_one_process_has_none() -> None:
    ((name, wrapper, state, wrapped, field, broken),) = run_ranks(_refused, 1)
    assert name == "comm_hook='fp17': takes one of no, fp16, bf16, power_sgd, batched_power_sgd"
    assert "comm_wrapper='fp16' changes what a comm_hook sends, and there is none" in wrapper
    assert "comm_hook is 'fp16'" in state and "takes one of no, fp16, bf16" in wrapped
    assert "unexpected keyword argument 'start'" in field
    assert "this hook fails in torch" in broken and "comm_hook='power_sgd'" in broken


def _precise(rank: int, ranks: int, name: str) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from nbdist import Accelerator
    from nbdist.shipping.exporters import exporter_of

    accelerator = Accelerator(mixed_precision="bf16", output_dtype="keep", strategy=name)
    own, rows = Model(), torch.full((2, 1), 1.0 + 2 * rank)
    model = accelerator.prepare(own)
    found: dict[str, Any] = {"dtypes": [str(one.dtype) for one in (model(rows), model.loss(rows), own(rows))]}
    accelerator.backward(model.loss(rows))
    found["gradient"] = own.linear.weight.grad.item()
    found["own"] = accelerator.unwrap_model(model) is own
    exporter = exporter_of(type(model))
    found["shipped"] = exporter is not None and exporter.unwrap is not None and exporter.unwrap(model) is own

    theirs = DistributedDataParallel(linear_at_zero()) if name == "ddp" else linear_at_zero()
    taken = accelerator.prepare(theirs)
    found["taken over"] = [str(taken(rows).dtype), taken is theirs or name == "single"]
    plain = Accelerator(strategy=name, mixed_precision="no").prepare(theirs)
    found["and again without"] = str(plain(rows).dtype)
    frozen = accelerator.prepare(linear_at_zero().requires_grad_(False))
    found["frozen"] = str(frozen(rows).dtype)
    with torch.no_grad():
        found["no parameters"] = str(accelerator.prepare(nn.Tanh())(rows).dtype)
    return found


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2)])
def test_precision_is_the_same_under_every_strategy(name: str, ranks: int) -> None:
    for found in run_ranks(_precise, ranks, name):
        assert found == {
            "dtypes": ["torch.bfloat16", "torch.bfloat16", "torch.float32"],
            "gradient": 1.0 if ranks == 1 else 2.0,
            "own": True,
            "shipped": True,
            "taken over": ["torch.bfloat16", True],
            "and again without": "torch.float32",
            "frozen": "torch.bfloat16",
            "no parameters": "torch.float32",
        }
