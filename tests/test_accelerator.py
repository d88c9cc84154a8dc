"""The Accelerator as a training loop sees it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import nbdist
from nbdist import Accelerator, engine, later
from nbdist.data.loader import Prepared
from nbdist.shipping.exporters import exporter_of
from nbdist.strategies.optimizer import PreparedOptimizer
from nbdist.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0, **options)


@pytest.mark.parametrize("there", [True, False])
def test_without_the_run_of_the_engine(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setattr(engine, "_run", None)
    weight = torch.ones(2, requires_grad=True)
    accelerator = Accelerator(cpu=True)
    accelerator.backward((weight * 3).mean())
    accelerator.backward(nn.Parameter((weight.detach() * 3).mean()))  # a class of its own
    assert weight.grad is not None and weight.grad.tolist() == [1.5, 1.5]
    with pytest.raises(RuntimeError, match="does not require grad"):
        accelerator.backward(torch.ones(()))


# ---------------------------------------------------------------------- arguments
def test_arguments_that_are_not_there_are_named() -> None:
    with pytest.raises(
        TypeError, match="no argument 'mixed_persicion'; it has: device_placement, split_batches, mixed"
    ):
        Accelerator(mixed_persicion="bf16")
    with pytest.raises(NotImplementedError, match=r"mixed_precision='fp8'.*not available"):
        Accelerator(mixed_precision="fp8")
    with pytest.raises(TypeError, match=r"kwargs_handlers: \{\} is not known"):
        Accelerator(kwargs_handlers=[{}])
    with pytest.raises(LookupError, match=r"^no strategy is called 'zero'\. There are: ddp, .*, single, tp\.$"):
        Accelerator(strategy="zero")
    with pytest.raises(TypeError, match="data_seed: the seed is '42'"):
        Accelerator(dataloader_config=DataLoaderConfiguration(data_seed="42"))
    Accelerator(mixed_precision="no", gradient_accumulation_steps=1, log_with=None)  # what happens anyway
    Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    assert "single: there is one process" in repr(Accelerator())


def test_arguments_come_in_the_same_order_as_there() -> None:
    accelerator = Accelerator(False, True, "bf16", 4, True, DataLoaderConfiguration(non_blocking=True))
    assert not accelerator.device_placement and accelerator.split_batches and accelerator.non_blocking
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4 and accelerator.device.type == "cpu"
    with pytest.raises(TypeError, match=r"^Accelerator: device_placement is 'bf16'; it takes True or False$"):
        Accelerator("bf16")


def test_members_that_say_what_is_not_in_use() -> None:
    """Scripts ask for them before they do what DeepSpeed or FSDP needs."""
    accelerator = Accelerator()
    for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
        assert getattr(accelerator.state, name) is None
    assert accelerator.deepspeed_plugin is accelerator.parallelism_config is accelerator.torch_device_mesh is None
    assert not accelerator.is_fsdp2 and not accelerator.is_composable_parallelism_enabled
    assert not accelerator.multi_device and accelerator.should_save_model
    assert accelerator.even_batches and accelerator.use_seedable_sampler and not accelerator.use_stateful_dataloader
    assert accelerator.dispatch_batches is None and accelerator.step_scheduler_with_optimizer


def test_members_that_a_later_version_brings() -> None:
    accelerator = Accelerator()
    for name in later.names("Accelerator"):
        assert not hasattr(accelerator, name) and not hasattr(Accelerator, name)
        with pytest.raises(AttributeError, match=rf"^Accelerator\.{name} is not available in this version"):
            getattr(accelerator, name)
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'acumulate'"):
        accelerator.acumulate()
    with pytest.raises(
        AttributeError, match=r"^Accelerator\.gradient_state is not there: .*Accelerator\.sync_gradients"
    ):
        accelerator.gradient_state  # noqa: B018
    assert not hasattr(nbdist, "cpu_offload") and getattr(nbdist.utils, "tqdm", None) is None
    with pytest.raises(AttributeError, match=r"^nbdist\.cpu_offload is not available in this version of nbdist yet$"):
        nbdist.cpu_offload  # noqa: B018
    with pytest.raises(ImportError, match=r"^nbdist\.utils\.tqdm is not there: use tqdm's own"):
        from nbdist.utils import tqdm  # noqa: F401
    with pytest.raises(ImportError, match=r"^nbdist\.cpu_offload is not available in this version of nbdist yet$"):
        from nbdist import cpu_offload  # noqa: F401
    with pytest.raises(
        ImportError, match=r"^nbdist\.utils\.DummyOptim is not available in this version of nbdist yet$"
    ):
        from nbdist.utils import DummyOptim  # noqa: F401


def test_it_belongs_to_its_rank() -> None:
    accelerator = Accelerator()
    with pytest.raises(TypeError, match="an Accelerator belongs to its rank"):
        pickle.dumps(accelerator)
    exporter = exporter_of(Accelerator)
    assert exporter is not None and exporter.stays


# ---------------------------------------------------------------------- prepare
def test_prepare_keeps_order_number_and_nesting() -> None:
    accelerator, model, loader, other = Accelerator(), linear_at_zero(), DataLoader(range(3)), object()
    optimizer = sgd(model)
    one, two, three, four = accelerator.prepare(other, optimizer, model, loader)
    assert one is other and isinstance(two, PreparedOptimizer) and three is model and isinstance(four, Prepared)
    assert two.optimizer is optimizer and accelerator.prepare(model) is model
    nested = accelerator.prepare({"loaders": [DataLoader(range(2)), DataLoader(range(2))], "n": (1, optimizer)})
    assert all(isinstance(item, Prepared) for item in nested["loaders"]) and nested["n"][1].optimizer is optimizer
    plain = {"a": [1, 2]}
    assert accelerator.prepare(plain) is plain and accelerator.prepare() == ()
    assert accelerator.prepare(two) is two and accelerator.prepare(four) is four
    assert accelerator.prepare(loader) is not four
    with pytest.raises(ValueError, match="2 entries for 1"):
        accelerator.prepare(model, device_placement=[True, False])


def test_unwrap_model_and_compile() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    assert accelerator.unwrap_model(accelerator.prepare(model)) is model
    compiled = torch.compile(model)
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


# ---------------------------------------------------------------------- the optimizer
def test_a_prepared_optimizer_is_an_optimizer() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    prepared = Accelerator().prepare(inner)
    assert isinstance(prepared, torch.optim.Optimizer)
    assert prepared.param_groups is inner.param_groups and prepared.state is inner.state
    assert prepared.defaults is inner.defaults and "Prepared SGD" in repr(prepared)
    called = []
    prepared.register_step_post_hook(lambda *_: called.append(1))
    model(torch.ones(1, 2)).sum().backward()
    assert prepared.step() is None and called == [1]
    assert prepared.step(lambda: torch.tensor(3.0)).item() == 3.0
    prepared.zero_grad()
    assert model.weight.grad is None
    copied = prepared.state_dict()
    prepared.param_groups[0]["lr"] = 0.1
    prepared.load_state_dict(copied)
    assert inner.param_groups[0]["lr"] == 0.5
    prepared.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    with pytest.raises(TypeError, match="belongs to its rank"):
        pickle.dumps(prepared)
    exporter = exporter_of(PreparedOptimizer)
    assert exporter is not None and exporter.unwrap is not None and exporter.unwrap(prepared) is inner


@pytest.mark.parametrize("first", [True, False], ids=["scheduler first", "optimizer first"])
def test_schedulers_drive_a_prepared_optimizer(first: bool) -> None:
    model = linear_at_zero()
    optimizer: Any = sgd(model)
    accelerator = Accelerator()
    if not first:
        optimizer = accelerator.prepare(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    if first:
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(4):
        accelerator.backward(-model(torch.ones(1, 1)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.875, 0.75, 0.625, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_step_boundary_costs_little() -> None:
    class Nothing(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    inner = Nothing([nn.Parameter(torch.ones(1))], {})
    inner.step = lambda closure=None: None  # type: ignore[method-assign]
    prepared = PreparedOptimizer(inner)

    def cost(step: Any) -> float:
        start = time.perf_counter()
        for _ in range(20_000):
            step()
        return (time.perf_counter() - start) / 20_000

    assert min(cost(prepared.step) for _ in range(7)) - min(cost(inner.step) for _ in range(7)) < 1e-6


# ---------------------------------------------------------------------- backward
def test_backward_in_one_process() -> None:
    accelerator, model = Accelerator(), linear_at_zero()
    rows = torch.full((3, 1), 2.0)

    def gradient(weight: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> float:
        model.zero_grad()
        accelerator.backward(model(rows).mean().to(dtype), weight, **options)
        return model.weight.grad.item()

    assert gradient() == gradient(3) == gradient(0.5) == gradient(torch.tensor(7)) == 2.0
    assert gradient(dtype=torch.bfloat16) == 2.0
    assert gradient(0) == gradient(torch.tensor(0.0)) == 0.0
    with pytest.raises(ValueError, match="weight is -1"):
        gradient(-1)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        gradient(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"one element.*\(3, 1\)"):
        accelerator.backward(model(rows))
    for loss in (3.0, None, numpy.float64(3.0)):
        with pytest.raises(
            TypeError, match=r"^backward needs a loss that is a tensor, a mean; this one is .*item\(\)$"
        ):
            accelerator.backward(loss)
    model.zero_grad()
    loss = model(rows).mean()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.weight.grad.item() == 4.0  # two calls add up
    accelerator.backward(model(rows).sum(0))  # one element in a shape of its own
    assert accelerator.sync_gradients and accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 10.0
    assert model.weight.grad.item() == pytest.approx(1.0)


def test_a_rank_that_is_gone_is_said_in_words() -> None:
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            raise RuntimeError(told)

    loss = Lost.apply(torch.ones((), requires_grad=True))
    told = "[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash. GLHF!"
    said = (
        r"^another rank has ended, or failed and left, .* the cause \(Connection closed by peer \[127\.0\.0\.1\]:1\)$"
    )
    with pytest.raises(RuntimeError, match=said):
        Accelerator().backward(loss, retain_graph=True)
    told = "something else"
    with pytest.raises(RuntimeError, match=r"^something else$"):
        Accelerator().backward(loss)


def _gradients(rank: int, ranks: int) -> dict[str, Any]:
    """Every way to weigh, with one row on rank 0 and three on rank 1."""
    accelerator = Accelerator()
    model = accelerator.prepare(linear_at_zero())
    rows = torch.tensor([[1.0]]) if rank == 0 else torch.full((3, 1), 5.0)

    def gradient(weight: Any = None, loss: Any = None, dtype: torch.dtype = torch.float32) -> float:
        model.zero_grad()
        accelerator.backward((model(rows).mean() if loss is None else loss).to(dtype), weight)
        return model.module.weight.grad.item()

    found = {
        "rows": gradient(len(rows)),
        "a tensor": gradient(torch.tensor(len(rows))),
        "half": gradient(len(rows), dtype=torch.bfloat16),
        "no weight": gradient(),
        "one rank only": gradient(float(rank)),
        "nobody": gradient(0),
    }
    generator = DataLoader([[1.0], [5.0], [6.0]], batch_size=1, collate_fn=torch.tensor)
    by_step = []
    for batch in accelerator.prepare(generator):
        by_step.append(gradient(loss=model(batch).mean()))
        by_step.append(gradient(weight=10 + rank, loss=model(batch).mean()))  # a stand-in counts 0 whatever is said
    found["loader"] = by_step
    model.zero_grad()
    accelerator.backward(model(rows).mean(), len(rows))
    found["norm"] = accelerator.clip_grad_norm_(model.parameters(), 2.0).item()
    found["clipped"] = model.module.weight.grad.item()
    return found


@pytest.mark.ranks
def test_ranks_with_unequal_rows_have_the_joint_gradient() -> None:
    for found in run_ranks(_gradients, 2):
        assert found["rows"] == found["a tensor"] == 4.0
        assert found["half"] == pytest.approx(4.0, abs=1e-6)
        assert (found["no weight"], found["one rank only"], found["nobody"]) == (3.0, 5.0, 0.0)
        assert found["loader"] == pytest.approx([3.0, (1 * 10 + 5 * 11) / 21, 6.0, 6.0])
        assert found["norm"] == 4.0 and found["clipped"] == pytest.approx(2.0, abs=1e-5)


def _trained(rank: int, ranks: int, data: list[list[float]], batch: int) -> list[float]:
    accelerator = Accelerator()
    model = linear_at_zero()
    wrapped, optimizer, loader = accelerator.prepare(
        model, sgd(model), DataLoader(torch.tensor(data), batch_size=batch)
    )
    weights = []
    for some in loader:
        accelerator.backward(-wrapped(some).mean())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    return weights


def _cell_again(rank: int, ranks: int, what: str) -> list[Any]:
    """One cell run three times, each time with a new Accelerator over what the run before has left."""
    own = linear_at_zero()
    model: Any = DistributedDataParallel(own) if what == "a user's wrapper" else own
    optimizer: Any = sgd(own)
    loader: Any = DataLoader(torch.arange(1.0, 8)[:, None], batch_size=2)
    bare = model, optimizer, loader
    found = []
    for _ in range(3):
        accelerator = Accelerator()
        if what == "bare":
            kept = model  # alive while the next one is made, as in a cell's namespace
            model, optimizer, loader = accelerator.prepare(*bare)
            assert kept is own or model is kept
        elif what == "bare, nothing kept":
            model = optimizer = loader = None
            model, optimizer, loader = accelerator.prepare(*bare)
        elif what == "compiled":
            model, optimizer, loader = accelerator.prepare(torch.compile(model, backend="eager"), optimizer, loader)
            model = model._orig_mod if hasattr(model, "_orig_mod") else model
        else:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        nn.init.constant_(own.weight, 0.0)
        weights = []
        for rows in loader:
            accelerator.backward(-model(rows).mean())
            optimizer.step()
            optimizer.zero_grad()
            weights.append(own.weight.item())
        accelerator.backward(-own(rows).mean(), weight=1)  # forward through the bare module
        whole = accelerator.gather(own.weight.grad).flatten()
        optimizer.zero_grad()
        user = model.module._orig_mod if what == "compiled" and hasattr(model.module, "_orig_mod") else model.module
        found.append((weights, user is own, accelerator.unwrap_model(model) is model.module, (whole == whole[0]).all()))
        assert (
            optimizer.optimizer is bare[1] and loader._nb.original is bare[2] and loader._nb.live is accelerator._live
        )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["prepared", "bare", "bare, nothing kept", "compiled", "a user's wrapper"])
def test_a_cell_that_runs_again_trains_the_same(what: str) -> None:
    # 1 2 | 3 4 and then 5 6 | 7: means 2.5 and 6. One process has the same.
    for found in run_ranks(_cell_again, 2, what):
        assert found == [([2.5, 8.5], True, True, True)] * 3


def _other_options(rank: int, ranks: int) -> dict[str, Any]:
    own = nn.ModuleList([linear_at_zero(), linear_at_zero()])
    own.forward = lambda rows: own[0](rows)  # type: ignore[method-assign]
    model: Any = Accelerator().prepare(own)
    finding = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    again: Any = finding.prepare(model)
    finding.backward(again(torch.full((1, 1), 1.0 + rank)).mean())
    nn.init.constant_(own[1].weight, 5.0 + rank)  # set apart: as a new wrapper would, it is made equal again
    third = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    return {
        "new": again is not model and again.module is own and again.find_unused_parameters,
        "gradient": own[0].weight.grad.item(),
        "kept": third.prepare(own) is again and third.prepare(again) is again,
        "equal": own[1].weight.item(),
    }


@pytest.mark.ranks
def test_other_options_give_the_module_another_wrapper() -> None:
    assert run_ranks(_other_options, 2) == [{"new": True, "gradient": 1.5, "kept": True, "equal": 5.0}] * 2


def _gone_on_one_rank(rank: int, ranks: int) -> Any:
    own = linear_at_zero()
    model = Accelerator().prepare(own)
    if rank:
        del model
    accelerator = Accelerator()
    model = accelerator.prepare(own)
    accelerator.backward(model(torch.full((1, 1), 1.0 + rank)).mean())
    return own.weight.grad.item()


@pytest.mark.ranks
def test_a_wrapper_that_is_gone_on_one_rank_is_made_anew_on_all() -> None:
    assert run_ranks(_gone_on_one_rank, 2) == [1.5, 1.5]


def _wrapper_of_a_single_process(rank: int, ranks: int) -> bool:
    inner = linear_at_zero()
    wrapped = Accelerator(strategy="ddp").prepare(inner)
    assert isinstance(wrapped, DistributedDataParallel)
    return Accelerator(strategy="single").unwrap_model(Accelerator(strategy="single").prepare(wrapped)) is inner


@pytest.mark.ranks
def test_one_process_takes_a_users_wrapper_off() -> None:
    """In a process of its own: ending a gloo group can wait for the interpreter for ever."""
    assert run_ranks(_wrapper_of_a_single_process, 1) == [True]


@pytest.mark.ranks
def test_three_ones_over_two_ranks_are_two_steps() -> None:
    assert run_ranks(_trained, 2, [[1.0]] * 3, 1) == [[1.0, 2.0]] * 2


@pytest.mark.ranks
def test_the_split_does_not_matter() -> None:
    data = [[float(value)] for value in range(1, 9)]
    assert run_ranks(_trained, 1, data, 8) == [[4.5]]
    assert run_ranks(_trained, 2, data, 4) == [[4.5]] * 2


# ---------------------------------------------------------------------- the ranks
def _two_models(rank: int, ranks: int) -> tuple[list[float], Any]:
    """A generator and its critic: one backward goes through both; and what the notebook gets of each wrapper."""
    accelerator = Accelerator()
    maker, critic = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(maker.weight, 1.0)
    nn.init.constant_(critic.weight, 2.0)
    optimizers, models = accelerator.prepare([sgd(maker), sgd(critic)], [maker, critic])
    rows = torch.full((1 + 2 * rank, 1), 1.0 + rank)  # 1 | 2 2 2: the mean is 7 / 4
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(models[1](models[0](rows)).mean(), len(rows))
        optimizers[0].step()
        optimizers[1].zero_grad()
        accelerator.backward(models[1](models[0](rows).detach()).mean(), len(rows))
    gradients = [maker.weight.grad.item(), critic.weight.grad.item()]
    exporter = exporter_of(type(models[0]))
    assert exporter is not None and exporter.unwrap is not None
    return gradients, (exporter.unwrap(models[0]) is maker, accelerator.unwrap_model(models[1]) is critic)


@pytest.mark.ranks
def test_two_models_in_one_backward() -> None:
    for gradients, own in run_ranks(_two_models, 2):
        assert gradients == pytest.approx([3.5, (1.0 - 2 * 3.5) * 1.75]) and own == (True, True)


def _talk(rank: int, ranks: int) -> dict[str, Any]:
    accelerator = Accelerator()
    printed = []
    accelerator.on_main_process(lambda: printed.append(rank))()
    accelerator.on_last_process(lambda: printed.append(10 + rank))()
    found = {
        "who": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
        "type": str(accelerator.distributed_type),
        "printed": printed,
        "gathered": accelerator.gather(torch.arange(rank + 1)).tolist(),
        "reduced": accelerator.reduce({"n": torch.tensor(rank + 1)})["n"].item(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1)).tolist(),
    }
    accelerator.wait_for_everyone()
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise ValueError("no such file")
    except Exception as error:
        found["error"] = type(error).__name__, str(error)
    return found


@pytest.mark.ranks
def test_talking() -> None:
    first, second = run_ranks(_talk, 2)
    assert (first["who"], second["who"]) == ((0, 2, True), (1, 2, False))
    assert first["printed"] == [0] and second["printed"] == [11] and first["type"] == "MULTI_CPU"
    assert first["gathered"] == second["gathered"] == [0, 0, 1] and first["reduced"] == second["reduced"] == 3
    assert first["padded"] == [1.0, 0.0] and second["padded"] == [1.0, 1.0]
    assert first["error"] == ("ValueError", "no such file")
    assert second["error"] == ("RuntimeError", "main process failed: no such file")


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    Accelerator().print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


def test_importing_costs_little_over_torch() -> None:
    """As a part of torch's own, which a busy machine slows as much: 0.1 s is an eighth where torch takes 0.8 s. The
    figure is in benchmarks/.
    """
    code = (
        "import time; begin = time.process_time(); import torch.utils.data, torch.nn.parallel; "
        "start = time.process_time(); from nbdist import Accelerator; end = time.process_time(); "
        "print((end - start) / (start - begin))"
    )

    def part() -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert min(part() for _ in range(3)) < 0.125
