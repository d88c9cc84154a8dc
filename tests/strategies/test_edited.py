"""A model edited in the middle of a script is averaged as it is at once; prepared models are pickled and copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

Make = Callable[[nn.Module], Any]


def _net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def _freeze(index: int, thaw: int | None = None) -> Callable[..., None]:
    def edit(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
        net[index].requires_grad_(False)
        if thaw is not None:
            net[thaw].requires_grad_(True)

    return edit


def _thaw(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    net.requires_grad_(True)


def _append(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    net.append(_net()[1])
    optimizer.add_param_group({"params": net[-1].parameters()})


def _insert_what_was_there(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    net.insert(1, net.spare[0])  # type: ignore[index]  # no module is made now, and torch tells nothing of insert
    optimizer.add_param_group({"params": net[1].parameters()})


def _replace(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    net[2] = _net()[1]
    inner = getattr(optimizer, "optimizer", optimizer)  # which tells nothing
    inner.add_param_group({"params": net[2].parameters()})


def _replace_a_parameter(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    net[2].weight = nn.Parameter(torch.ones(3, 3) / 4)
    optimizer.add_param_group({"params": [net[2].weight]})


def _take_out(net: nn.Sequential, optimizer: Any, prepare: Any) -> None:
    del net[1]
    prepare(net)


# One after another, in one script: each trains two steps.
EDITS = {
    "frozen": _freeze(0),
    "one frozen and one thawed, as many": _freeze(1, thaw=0),
    "thawed": _thaw,
    "appended": _append,
    "inserted": _insert_what_was_there,
    "replaced": _replace,
    "a parameter replaced": _replace_a_parameter,
    "taken out and prepared again": _take_out,
}


def _train(backward: Any, model: Any, optimizer: Any, rows: torch.Tensor) -> None:
    for _ in range(2):
        backward(model(rows).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def _made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = _net()
    net.spare = [nn.Linear(3, 3)]  # a list: no child
    nn.init.eye_(net.spare[0].weight), nn.init.ones_(net.spare[0].bias)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def _edited(rank: int, ranks: int, steps: int) -> dict[str, list[float]]:
    from nbdist import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    net, optimizer = _made()
    model, prepared = accelerator.prepare(net, optimizer)
    rows = torch.tensor([[1.0 + rank, 2.0], [0.5, -1.0 * rank]])

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss)

    _train(backward, model, prepared, rows)
    found = {}
    for name, edit in EDITS.items():
        edit(net, prepared, accelerator.prepare)
        if steps == 1:
            _train(backward, model, prepared, rows)
        else:
            for row in rows:
                with accelerator.accumulate(model):
                    accelerator.backward(model(row[None]).pow(2).mean())
                    prepared.step()
                    prepared.zero_grad()
        found[name] = _values(net)
    return found


def _values(net: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in net.parameters()]).tolist()


def _alone(steps: int) -> dict[str, list[float]]:
    net, optimizer = _made()
    rows = torch.tensor([[1.0, 2.0], [0.5, 0.0], [2.0, 2.0], [0.5, -1.0]])
    _train(torch.Tensor.backward, net, optimizer, rows)
    found = {}
    for name, edit in EDITS.items():
        edit(net, optimizer, lambda _: None)
        if steps == 1:
            _train(torch.Tensor.backward, net, optimizer, rows)
        else:
            net(rows).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = _values(net)
    return found


def _both(rank: int, ranks: int) -> list[dict[str, list[float]]]:
    return [_edited(rank, ranks, steps) for steps in (1, 2)]


def test_edits_in_the_middle_of_a_script_train_as_alone() -> None:
    for founds in run_ranks(_both, 2):
        for found, expected in zip(founds, (_alone(1), _alone(2)), strict=True):
            wrong = [name for name in EDITS if found[name] != pytest.approx(expected[name], abs=1e-5)]
            assert wrong == []


def _other_ways(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator
    from nbdist.utils import DistributedDataParallelKwargs

    rows, found = torch.full((1, 2), 1.0 + rank), {}
    net = _net()
    net[0].requires_grad_(False)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    _train(accelerator.backward, model, optimizer, rows)
    net[0].requires_grad_(True)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    _train(accelerator.backward, model, optimizer, rows)
    found["another Accelerator"] = _values(net)

    del net[1]
    with pytest.raises(RuntimeError, match="Sequential were taken out of it"):
        accelerator.backward(model(rows).mean())
    _train(accelerator.backward, model, optimizer, rows)
    found["after the error"] = _values(net)

    accelerator = Accelerator(
        gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)]
    )
    net = _net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows + step % 2).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    found["a static graph accumulates"] = _values(net)
    net[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="static_graph=True says that this never happens"):
        accelerator.backward(model(rows).mean())

    accelerator, net = Accelerator(), _net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    _train(accelerator.backward, model, optimizer, rows)
    net[0] = nn.Linear(2, 3)
    nn.init.constant_(net[0].weight, 1.0 + rank)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found["put in anew"] = net[0].weight.flatten().tolist()  # equal before the next forward
    return found


def test_other_ways_to_edit() -> None:
    net, rows = _net(), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), {}
    net[0].requires_grad_(False)
    _train(torch.Tensor.backward, net, optimizer, rows)
    net[0].requires_grad_(True)
    _train(torch.Tensor.backward, net, optimizer, rows)
    expected["another Accelerator"] = _values(net)
    del net[1]
    _train(torch.Tensor.backward, net, optimizer, rows)
    expected["after the error"] = _values(net)
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _train(torch.Tensor.backward, net, optimizer, torch.cat([rows, rows + 1]))
    expected["a static graph accumulates"] = _values(net)
    expected["put in anew"] = [1.0] * 6
    for found in run_ranks(_other_ways, 2):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], abs=1e-5), name


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Make] = {
    "torch.save": _saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "deepcopy": copy.deepcopy,
}


def _copied(rank: int, ranks: int) -> list[str]:
    from nbdist import Accelerator

    wrong = []
    for precision in ("no", "bf16"):
        accelerator = Accelerator(mixed_precision=precision)
        for module in (nn.Linear(2, 2), _net(), Layers()):
            model = accelerator.prepare(module)
            rows = torch.full((1, 2), 1.0 + rank)
            accelerator.backward(model(rows).mean())
            model.zero_grad()
            for name, way in WAYS.items():
                other = way(model)
                other(rows).mean().backward()  # plain DDP
                gradient = next(other.parameters()).grad.clone()
                other.zero_grad()
                accelerator.backward(accelerator.prepare(other)(rows).mean())
                right = {
                    "another": other is not model and next(other.parameters()) is not next(model.parameters()),
                    "class": type(accelerator.unwrap_model(other)) is type(module),
                    "special": not hasattr(module, "__len__") or (len(other) == len(module) and other[0] is not None),
                    "module": not {"reducer", "logger", "process_group"} & {*vars(other.module)},
                    "gradient": torch.allclose(gradient, next(other.parameters()).grad, rtol=0.02),
                    "averaged": len({str(one) for one in accelerator.gather(gradient.flatten()[None]).tolist()}) == 1,
                }
                wrong += [
                    f"{name} {type(module).__name__} {precision}: {fact}" for fact, holds in right.items() if not holds
                ]
    return wrong


def test_a_prepared_model_is_pickled_and_copied() -> None:
    assert run_ranks(_copied, 2) == [[], []]
