"""Optimizers whose parameters were replaced train on, exactly as if nothing had been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.strategies import rebinding
from nbdist.strategies.refusing import NEVER
from tests.ranks import run_ranks

ROWS = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(5))


def _network(tied: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))  # 5 on 2 ranks: 3 and 2
    if tied:
        model[3].weight = model[2].weight
    return model


def _shard(model: nn.Module, mesh: Any = None) -> None:
    """What a strategy does."""
    from torch.distributed.fsdp import fully_shard

    before = rebinding.snapshot(model)
    tied = len(list(model.parameters())) < len(dict(model.named_parameters(remove_duplicate=False)))
    for layer in [] if tied else model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rebinding.replaced(model, before)


def _step(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(rows).pow(2).mean()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(loss)
    else:
        loss()
        optimizer.step()


def _full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _own_shape(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)


def _off(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((_full(a) - _full(b)).abs().max().item() for a, b in pairs)


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, with names."""
    named = list(model.named_parameters())
    weights = [pair for pair in named if pair[0].endswith("weight")]
    biases = [pair for pair in named if pair[0].endswith("bias")]
    return [{"params": weights, "lr": 0.02}, {"params": biases}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, 0.05, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, 0.05, fused=True),
    "AdamW loop": lambda groups: torch.optim.AdamW(groups, 0.05, foreach=False),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, foreach=True),
}


def _law(rank: int, ranks: int) -> dict[str, Any]:
    """For each optimizer, without and with steps before: how far off sharded training is, and what else there is."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes = [None, init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("a", "b"))]
    found: dict[str, Any] = {}
    for at, (name, make) in enumerate(OPTIMIZERS.items()):
        for before in (0, 2) if at % 4 == 0 else (2,):  # what has state has had none
            tied = at % 2 == 1
            whole, sharded = _network(tied), _network(tied)
            right, optimizer = make(_grouped(whole)), make(_grouped(sharded))
            schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.7) for one in (right, optimizer)]

            def train(step: int, pairs: Any) -> None:
                for model, trains, scheduler in pairs:
                    _step(model, trains, ROWS[step])
                    scheduler.step()

            pairs = ((whole, right, schedulers[0]), (sharded, optimizer, schedulers[1]))
            for step in range(before):
                train(step, pairs)
            groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
            old = [weakref.ref(parameter) for parameter in sharded.parameters()]
            states = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()
                      if isinstance(value, torch.Tensor) and value.dim()]  # fmt: skip
            rebinding.expect(optimizer)
            _shard(sharded, meshes[at % 3 == 2])
            gc.collect()
            freed = all(one() is None for one in [*old, *states])
            for step in range(before, before + 3):
                train(step, pairs)
            same = optimizer.param_groups is groups and [id(group["params"]) for group in groups] == [*map(id, lists)]
            names = [group.get("param_names") for group in groups] == [
                group.get("param_names") for group in right.param_groups
            ]
            spread = {type(value).__name__ for state in optimizer.state.values() for value in state.values()
                      if isinstance(value, torch.Tensor) and value.dim()}  # fmt: skip
            kept = not tied or sharded[3].weight is sharded[2].weight
            found[f"{name}, {before} steps before"] = (_off(whole, sharded), freed, same, names, kept, spread)
    return found


@pytest.fixture(scope="module")
def law() -> list[dict[str, Any]]:
    return run_ranks(_law, 2, limit=240)


@pytest.mark.ranks
def test_it_trains_as_if_nothing_had_been_replaced(law: list[dict[str, Any]]) -> None:
    for found in law:
        for case, (off, *_) in found.items():
            assert off < (1e-6 if "fused" in case else 1e-7), case


@pytest.mark.ranks
def test_the_old_parameters_and_their_state_are_freed_and_the_rest_is_the_same(law: list[dict[str, Any]]) -> None:
    for found in law:
        for case, (_, freed, same, names, tied, spread) in found.items():
            assert freed and same and names and tied, case
            assert spread <= {"DTensor"}, case


class _Sharpness(torch.optim.Optimizer):
    """A wrapping optimizer as users write them: shares the groups of the one inside, and has state and lists of its
    own.
    """

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.everything = list(parameters)
        self.by_parameter = {parameter: at for at, parameter in enumerate(parameters)}
        self.pairs = [(parameter, parameter.dim()) for parameter in parameters]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.everything:
            self.state[parameter].setdefault("slow", parameter.clone())
        self.base_optimizer.step()
        for parameter in self.by_parameter:
            slow = self.state[parameter]["slow"]
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


def _others(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def compare(name: str, make: Any, before: int = 1, tell: bool = True) -> Any:
        whole, sharded = _network(), _network()
        right, optimizer = make(whole), make(sharded)
        for step in range(before):
            _step(whole, right, ROWS[step])
            _step(sharded, optimizer, ROWS[step])
        if tell:
            rebinding.expect(optimizer)
        _shard(sharded)
        for step in range(before, before + 2):
            _step(whole, right, ROWS[step])
            _step(sharded, optimizer, ROWS[step])
        found[name] = _off(whole, sharded)
        return optimizer

    compare("wrapped", lambda model: _Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))
    compare("not prepared", lambda model: torch.optim.AdamW(model.parameters(), 0.05), tell=False)

    # One optimizer over two models, of which one is sharded, then the other; and over a loose parameter, in one group.
    whole, sharded = [_network(), _network()], [_network(), _network()]
    loose = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizers = [
        torch.optim.AdamW([*models[0].parameters(), *models[1].parameters(), own], 0.05, foreach=True)
        for models, own in zip((whole, sharded), loose, strict=True)
    ]

    def both(step: int) -> None:
        for models, own, optimizer in zip((whole, sharded), loose, optimizers, strict=True):
            optimizer.zero_grad()
            (models[1](models[0](ROWS[step])[:, :4]).pow(2).mean() + own.pow(2).mean()).backward()
            optimizer.step()

    both(0)
    rebinding.rebind(optimizers[1])
    for step, model in enumerate(sharded):
        _shard(model)
        both(1 + step)
    both(3)
    found["two models"] = max(_off(a, b) for a, b in zip(whole, sharded, strict=True))
    found["two models, loose"] = (loose[0] - loose[1]).abs().max().item()

    # LBFGS where everything is split evenly
    whole, sharded = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2)]
    sharded.load_state_dict(whole.state_dict())
    right, optimizer = (torch.optim.LBFGS(model.parameters(), lr=0.1) for model in (whole, sharded))
    rebinding.expect(optimizer)
    _shard(sharded)
    _step(whole, right, ROWS[0])
    _step(sharded, optimizer, ROWS[0])
    found["LBFGS"] = _off(whole, sharded)

    # Muon computes in bfloat16, which rounds in another order; in float32 it is seen that the whole matrix is meant.
    halved = torch.Tensor.bfloat16
    try:
        torch.Tensor.bfloat16 = lambda self: self.clone()
        compare("Muon", lambda model: torch.optim.Muon([one for one in model.parameters() if one.dim() == 2], 0.1))
    finally:
        torch.Tensor.bfloat16 = halved
    return found


@pytest.mark.ranks
def test_wrapping_optimizers_several_models_and_those_that_nobody_prepared() -> None:
    for found in run_ranks(_others, 2, limit=240):
        assert found.pop("Muon") < 1e-5
        assert found.pop("LBFGS") < 1e-6
        for name, off in found.items():
            assert off < 1e-7, name


def _belongings(rank: int, ranks: int) -> dict[str, Any]:
    import warnings

    found: dict[str, Any] = {}
    model = _network()
    seen: list[Any] = []
    model[0].weight.mine = {"decay": False}
    model[2].weight.requires_grad_(False)
    handle = model[0].bias.register_post_accumulate_grad_hook(lambda one: seen.append(_own_shape(one)))
    model[3].bias.register_hook(seen.append)
    model(ROWS[rank]).pow(2).mean().backward()  # each rank's own gradient, before
    one_grad = model[3].weight.grad.clone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _shard(model)
    found["said"] = [str(warning.message) for warning in said]
    found["attribute"] = model[0].weight.mine
    found["trained"] = [parameter.requires_grad for parameter in model.parameters()]
    found["gradients"] = (one_grad, _full(model[3].weight.grad), model[2].weight.grad)
    seen.clear()
    model(ROWS[0]).pow(2).mean().backward()
    found["hook"] = list(seen)
    handle.remove()
    model(ROWS[0]).pow(2).mean().backward()
    found["hook, taken off"] = len(seen)

    # Refused before anything is changed: those that torch cannot, and what has state of another shape
    for name in ("Adafactor", "Rprop", "LBFGS", "LBFGS with state", "wrapped"):
        model = _network()
        kinds = {"wrapped": lambda all_: _Sharpness(all_, torch.optim.Adafactor)}
        even = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
        model = even if name == "LBFGS with state" else model
        optimizer = kinds.get(name, getattr(torch.optim, name.split()[0], None))(model.parameters())
        if name.endswith("state"):
            _step(model, optimizer, ROWS[0])
        before = list(model.parameters())
        rebinding.expect(optimizer)
        try:
            rebinding.snapshot(model, 2)
        except ValueError as error:
            found[name] = str(error), all(one is other for one, other in zip(before, model.parameters(), strict=True))
        del optimizer
        gc.collect()
    # ... and made from spread parameters; it is still true that torch itself cannot
    model = _network()
    _shard(model)
    model(ROWS[0]).pow(2).mean().backward()
    for name in ("Adafactor", "Rprop"):
        optimizer = getattr(torch.optim, name)(model.parameters())
        try:
            rebinding.rebind(optimizer)
        except ValueError as error:
            found[f"{name}, made afterwards"] = str(error)
        rebinding._known[optimizer] = (rebinding._replacements[0], 1)  # past our own refusal at a step
        with pytest.raises(RuntimeError):
            optimizer.step()

    # A parameter that two models share, which are not prepared as one
    one, other = _network(), _network()
    other[2].weight = one[2].weight
    _shard(one)
    try:
        _shard(other)
    except ValueError as error:
        found["shared"] = str(error)
    return found


@pytest.fixture(scope="module")
def belongings() -> list[dict[str, Any]]:
    return run_ranks(_belongings, 2, limit=240)


@pytest.mark.ranks
def test_what_the_user_put_on_a_parameter_goes_along_or_is_said(belongings: list[dict[str, Any]]) -> None:
    mean = sum(found["gradients"][0] for found in belongings) / 2
    for rank, found in enumerate(belongings):
        assert found["attribute"] == {"decay": False}
        assert found["trained"] == [True, True, False, True, True, True]
        assert torch.allclose(found["gradients"][1], mean) and found["gradients"][2] is None
        assert found["hook"] == [((3, 2)[rank],)] and found["hook, taken off"] == 1
        assert [text for text in found["said"] if "register_hook" in text and text.startswith("3.bias: ")]


@pytest.mark.ranks
def test_an_optimizer_that_cannot_be_is_refused_by_name_and_nothing_is_changed(
    belongings: list[dict[str, Any]],
) -> None:
    for found in belongings:
        for name in ("Adafactor", "Rprop", "LBFGS", "LBFGS with state"):
            text, unchanged = found[name]
            assert text.startswith(f"{name.split()[0]} cannot train parameters") and "'ddp'" in text and unchanged
        assert found["wrapped"][0].startswith("Adafactor cannot")
        assert "shape (5, 4)" in found["LBFGS"][0] and "'d'" in found["LBFGS with state"][0]
        for name in ("Adafactor", "Rprop"):
            assert found[f"{name}, made afterwards"].startswith(f"{name} cannot") and name in NEVER


@pytest.mark.ranks
def test_two_models_that_share_a_parameter_are_one_or_it_is_an_error(belongings: list[dict[str, Any]]) -> None:
    for found in belongings:
        assert found["shared"].startswith("2.weight of this Sequential is shared with a module that was prepared")
