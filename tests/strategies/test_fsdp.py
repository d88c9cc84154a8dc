"""Sharded models: units, gradients of windows, methods, edits; and what stays of it where torch has other insides."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from nbdist import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, state, strategies
from nbdist.strategies import fsdp_repair, sharded, units
from tests import training
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)  # 7 rows are uneven on 2 and on 4 ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(self.up(rows).tanh())


class Tied(nn.Module):
    """A head that is the embedding, a number without a dimension, a frozen part, a buffer, and methods."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("shift", torch.ones(6))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.frozen(self.embed(tokens)) + self.shift
        for block in self.blocks:
            rows = block(rows)
        return rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens)) * self.temperature

    def name(self) -> str:
        return "tied"


TOKENS = torch.arange(16).remainder(5)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def whole(model: nn.Module) -> list[float]:
    return training.flat(model)


# ---------------------------------------------------------------------- units
def test_units_are_the_repeated_blocks_and_ties_stay_in_one() -> None:
    model = Tied()
    chosen = units.choose(model)
    assert list(chosen.modules) == ["blocks.0", "blocks.1"] and list(chosen.roots) == [""]
    assert str(chosen) == "2 Block and the rest (its repeated blocks, Block)"
    assert chosen.ignored == {model.temperature}
    asked = units.choose(model, FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block", "Embedding"]))
    assert list(asked.modules) == ["blocks.0", "blocks.1"]
    assert asked.left == {"embed": "it shares a weight with another part of the model"}


def test_what_parts_of_a_model_without_a_forward_share_stays_one() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads, self.writes = nn.Sequential(nn.Linear(4, 4), Block()), nn.Linear(4, 4)
            self.writes.weight = self.reads[0].weight
            self.last = self.reads[1]

    model = Holder()
    chosen = units.choose(model)
    assert chosen.ignored == {model.writes.weight} and "it stays whole" in str(chosen)
    assert list(chosen.roots) == ["writes", "last", "reads"]  # what is a part of another one is sharded first
    model.reads[1].up.weight = nn.Parameter(torch.ones(4, 4))
    model.reads[0].weight = model.last.up.weight
    assert list(units.choose(model).roots) == ["writes", "reads"]


def test_a_class_that_no_module_has_is_an_error_that_lists_the_others() -> None:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(ValueError, match=r"Tied has no module of the class Blok\. It has .*Block \(2\)"):
        units.choose(Tied(), plugin)


def test_units_by_size_by_function_and_none() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 90)), nn.Linear(2, 2))
    by_size = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=9000)
    assert list(units.choose(model, by_size).modules) == ["1.1", "0"]
    by_function = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    assert list(units.choose(model, by_function).modules) == ["1.0", "1.1", "0", "2"]
    assert not units.choose(Tied(), FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP")).modules
    assert list(units.choose(nn.ModuleDict({"a": nn.Linear(2, 2), "b": Block()})).roots) == ["a", "b"]


def test_parts_of_another_dtype_are_units_of_their_own() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4)) for _ in range(2)])
    assert set(units.choose(model).modules) == {"0.1", "1.1"}


# ---------------------------------------------------------------------- training
def _trained(model: Any, part: torch.Tensor, accelerator: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(part)))
            optimizer.step()
            optimizer.zero_grad()


def _all(rank: int, ranks: int, name: str) -> dict[str, Any]:
    part = TOKENS.chunk(ranks)[rank]
    found: dict[str, Any] = {}
    accelerator = Accelerator(strategy=name)
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    optimizer, model = accelerator.prepare(optimizer, module)  # the optimizer first
    found["unit"] = sum(isinstance(one, FSDPModule) for one in module.modules())
    found["a method"] = model.encode(part).detach().sum().item()  # before any forward
    found["name"] = model.name() if rank == 0 else "tied"  # of one rank alone
    _trained(model, part, accelerator, optimizer, 3)
    found["trained"] = whole(module)
    found["tied"] = module.head.weight is module.embed.weight

    again = Accelerator(strategy=name)
    found["again"] = again.prepare(module) is model and again.unwrap_model(model) is module
    with torch.no_grad():
        model(part)
    found["shards"] = sorted({type(one).__name__ for one in module.parameters()})

    # A method that computes with gradients.
    accelerator.backward(loss_of(model.encode(part)))
    found["norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    optimizer.zero_grad()
    found["by a method"] = whole(module)

    # A window that is left leaves nothing behind, nor does a plain loop after it wait for its end.
    accelerator.gradient_accumulation_steps = 3
    with pytest.warns(UserWarning, match="unfinished accumulation window"):
        try:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(part)))
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(part)))
                raise KeyError
        except KeyError:
            pass
    loss_of(model(part)).backward()
    accelerator.gradient_accumulation_steps = 1
    if name != "ddp":  # what no unit has is shared by the Accelerator's backward
        torch.distributed.all_reduce(module.temperature.grad.div_(ranks))
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad()
    found["after a left window"] = whole(module)

    # Nor does a window that is open and not left.
    accelerator.gradient_accumulation_steps = 3
    for _ in range(3):
        _trained(model, part, accelerator, optimizer, 1)
    found["window"] = whole(module)
    return found


def _right() -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: dict[str, Any] = {"name": "tied", "tied": True, "again": True}

    def step(output: Any, clip: float = 0.0) -> None:
        loss_of(output(TOKENS)).backward()
        if clip:
            found["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(model)
    found["trained"] = whole(model)
    step(model.encode, 0.1)
    found["by a method"] = whole(model)
    step(model)
    found["after a left window"] = whole(model)
    step(model)
    found["window"] = whole(model)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "ranks"), [("fsdp", 2), ("hybrid", 4)])
def test_all_of_it_trains_as_plain_torch_does(name: str, ranks: int) -> None:
    right = _right()
    for found in run_ranks(_all, ranks, name):
        for key, value in right.items():
            assert found[key] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, list | float) else value
            ), key
        assert found["unit"] == 3 and found["shards"] == ["DTensor", "Parameter"]  # the number has no dimension


def _adversaries(rank: int, ranks: int, name: str) -> list[float]:
    """D gathers over two micro-batches; the backward of G goes through it in between."""
    accelerator = Accelerator(strategy=name, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)]
    sgd = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    G, D, of_g, of_d = accelerator.prepare(*modules, *sgd)
    rows = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(1))
    for number in range(4):
        part = rows[number].chunk(ranks)[rank]
        with accelerator.accumulate(D):
            accelerator.backward(loss_of(D(part)))
            of_d.step()
            of_d.zero_grad()
        with accelerator.accumulate(G, last=True):
            accelerator.backward(loss_of(D(G(part))))
            of_g.step()
            of_g.zero_grad()
    return whole(modules[0]) + whole(modules[1])


@pytest.mark.ranks
def test_a_window_that_is_open_keeps_its_gradients_when_another_loss_goes_through() -> None:
    right = _adversaries(0, 1, "single")
    for name, ranks in (("fsdp", 2), ("hybrid", 4)):
        for found in run_ranks(_adversaries, ranks, name):
            assert found == pytest.approx(right, abs=1e-6), name


class Raising(torch.autograd.Function):
    """Raises in forward or in backward, when it is told to."""

    told = ""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        if Raising.told == "forward":
            raise ValueError("forward")
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Raising.told == "backward":
            raise ValueError("backward")
        return gradient


def _caught(rank: int, ranks: int, name: str) -> tuple[list[float], list[str]]:
    """As code that tries a smaller batch does: forward, a method and backward raise on all ranks, and it goes on."""
    accelerator = Accelerator(strategy=name)
    model = Tied()
    model.blocks[0].register_forward_hook(lambda module, inputs, output: Raising.apply(output))
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = TOKENS.chunk(ranks)[rank]
    told = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(8):
            for raises, way in {2: [("forward", model), ("forward", model.encode)], 4: [("backward", model)]}.get(
                step, []
            ):
                Raising.told = raises
                try:
                    accelerator.backward(loss_of(way(tokens)))
                except ValueError as error:
                    told.append(str(error))
                Raising.told = ""
                if raises == "backward":
                    optimizer.zero_grad()  # plain torch keeps what a part of it has left
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens)))
                optimizer.step()
                optimizer.zero_grad()
    return whole(model), told + [str(one.message) for one in said if "was not finished" in str(one.message)]


@pytest.mark.ranks
def test_what_raises_and_is_caught_leaves_it_training() -> None:
    right, told = _caught(0, 1, "single")
    assert told == ["forward", "forward", "backward"]
    for rank, (found, also) in enumerate(run_ranks(_caught, 2, "fsdp")):
        assert found == pytest.approx(right, abs=1e-6)
        assert also[:3] == told and len(also) == (4 if rank == 0 else 3)
        assert rank or also[3].startswith("a backward of Tied was not finished, so its gradients were dropped")


def _by_hand(rank: int, ranks: int) -> tuple[list[float], bool]:
    accelerator = Accelerator(strategy="fsdp")
    module = training.network()
    for one in (module[0], module):
        fully_shard(one, mesh=accelerator.torch_device_mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = list(module.parameters())
    model, optimizer = accelerator.prepare(module, optimizer)
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).chunk(ranks)[rank]
    _trained(model, rows, accelerator, optimizer, 2)
    return whole(module), all(one is other for one, other in zip(module.parameters(), before, strict=True))


def _both(rank: int, ranks: int) -> tuple[tuple[list[float], bool], list[str]]:
    return _by_hand(rank, ranks), _wrong(rank, ranks)


@pytest.mark.ranks
def test_a_model_that_the_user_has_sharded_is_taken_as_it_is_and_what_cannot_be_is_told() -> None:
    module = training.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(module(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (found, same), told in run_ranks(_both, 2):
        assert found == pytest.approx(whole(module), abs=1e-6) and same
        wrapped, sizes, differ, local = told
        assert wrapped.startswith("ValueError: DistributedDataParallel has DistributedDataParallel in it")
        assert "dp_shard_size 3" in sizes and "there are 2 ranks" in sizes
        assert differ.startswith("DistributedOperationException: prepare: the ranks' models differ")
        assert local.startswith("NotImplementedError: LocalSGD")


def _wrong(rank: int, ranks: int) -> list[str]:
    told = []
    for make in (
        lambda: Accelerator(strategy="fsdp").prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        lambda: Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=3)),
        lambda: Accelerator(strategy="fsdp").prepare(nn.Linear(2 + rank, 2)),
        lambda: strategies.create("fsdp", state.current()).keep_local(nn.Linear(2, 2), True),
    ):
        try:
            make()
            told.append("nothing")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


# ---------------------------------------------------------------------- other insides
def _without_the_insides(rank: int, ranks: int) -> tuple[list[float], dict[str, Any]]:
    sharded.state = lambda unit: None  # type: ignore[assignment]
    case = {"rows": 13, "batch": 2, "sampler": "in order", "drop_last": False, "tokens": False, "momentum": 0.9}
    return training.prepared({**case, "epochs": 2, "accumulation": 2}, "fsdp")[0], case


@pytest.mark.ranks
def test_without_the_insides_of_torch_it_trains_all_the_same() -> None:
    for found, case in run_ranks(_without_the_insides, 2):
        steps = [list(range(13))[at : at + 4] for at in range(0, 13, 4)]
        right = training.in_plain_torch({**case, "accumulation": 2}, [steps] * 2)
        assert found == pytest.approx(right, abs=1e-6)


def _without_repairing(rank: int, ranks: int) -> str:
    fsdp_repair.can_repair = lambda: False  # type: ignore[assignment]
    strategy = strategies.create("fsdp", state.current())
    strategy.after_interrupt()  # there is nothing to repair
    model = strategy.wrap(nn.Linear(2, 2))
    assert isinstance(model, nn.Linear)
    with pytest.raises(NotImplementedError) as error:
        strategy.after_interrupt()
    return str(error.value)


@pytest.mark.ranks
def test_without_repairing_it_says_so() -> None:
    (told,) = run_ranks(_without_repairing, 1)
    assert "cannot be put right after an interrupt: make the model again" in told
