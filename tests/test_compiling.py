"""torch.compile through prepare: the model stays what it is; whole or by blocks; what is asked for, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbdist import Accelerator
from nbdist.kwargs import DynamoBackend, TorchDynamoPlugin
from tests.ranks import run_ranks

ROWS = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows).tanh()


class Deep(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(4, 1)
            self.first = nn.Linear(4, 4)  # so that all blocks are called alike, with what needs a gradient

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.last(rows)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).pow(2).mean()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward


@pytest.fixture(autouse=True)
def anew() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _gradients(accelerator: Accelerator, own: Deep, way: str) -> list[float]:
    model = accelerator.prepare(own)
    for _ in range(2):
        model.zero_grad()
        accelerator.backward(model.loss(ROWS) if way == "loss" else model(ROWS).pow(2).mean())
    return torch.cat([one.grad.flatten() for one in own.parameters() if one.grad is not None]).tolist()


@pytest.mark.parametrize("way", ["forward", "loss"])
@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_is_the_users_and_computes_the_same(way: str, regional: bool) -> None:
    counting = Counting()
    plugin = TorchDynamoPlugin(backend=counting, use_regional_compilation=regional)  # type: ignore[arg-type]
    accelerator, own = Accelerator(dynamo_plugin=plugin), Deep()
    assert _gradients(accelerator, own, way) == pytest.approx(_gradients(Accelerator(), Deep(), way), abs=1e-7)
    assert len(counting.graphs) == 1  # six blocks are compiled once
    model = accelerator.prepare(own)
    assert isinstance(model, Deep) and list(model.state_dict()) == list(Deep().state_dict())
    assert accelerator.unwrap_model(model) is own and accelerator.prepare(model) is model


def test_with_mixed_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager", output_dtype="keep")
    model = accelerator.prepare(Deep())
    assert model(ROWS).dtype is model.loss(ROWS).dtype is torch.bfloat16
    half = torch.compile(Accelerator(mixed_precision="bf16").prepare(Deep()), backend="eager", fullgraph=True)
    assert half(ROWS).dtype is torch.float32  # the user compiles what was prepared
    assert type(accelerator.unwrap_model(half)) is Deep


def test_what_the_user_has_compiled_is_not_compiled_again() -> None:
    counting = Counting()
    own, inside = torch.compile(Deep(), backend="eager"), Deep()
    inside.compile(backend="eager")
    plugin = TorchDynamoPlugin(backend=counting)  # type: ignore[arg-type]
    accelerator = Accelerator(dynamo_plugin=plugin)
    assert accelerator.prepare(own) is own and accelerator.prepare(inside) is inside
    own(ROWS), inside(ROWS)
    assert not counting.graphs
    assert accelerator.unwrap_model(own) is own
    assert type(accelerator.unwrap_model(own, keep_torch_compile=False)) is Deep


def test_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator()._compiling is None and Accelerator(dynamo_backend="no")._compiling is None
    assert Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", disable=True))._compiling is None
    for name, value in (("BACKEND", "AOT_EAGER"), ("USE_FULLGRAPH", "true"), ("MODE", "default")):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    asked = Accelerator()._compiling
    assert asked is not None and asked.options == {"backend": "aot_eager", "fullgraph": True} and not asked.regional
    assert Accelerator(dynamo_backend=DynamoBackend.NO)._compiling is None
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "maybe")
    with pytest.raises(ValueError, match="USE_REGIONAL_COMPILATION='maybe': takes true or false"):
        Accelerator()
    with pytest.raises(ValueError, match=r"dynamo_backend='inducter': takes one of .*inductor"):
        Accelerator(dynamo_backend="inducter")
    with pytest.raises(ValueError, match="both given"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


def _on_rank(rank: int, ranks: int) -> dict[str, Any]:
    found = {}
    for regional, way in ((False, "forward"), (True, "loss")):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
        own = Deep(2)
        accelerator = Accelerator(dynamo_plugin=plugin, mixed_precision="bf16" if way == "loss" else "no")
        model = accelerator.prepare(own)
        loss = model.loss(ROWS * rank) if way == "loss" else model(ROWS * rank).pow(2).mean()
        accelerator.backward(loss)
        found[way] = [one.grad.sum().item() for one in own.parameters() if one.grad is not None]
    return found


@pytest.mark.ranks
def test_under_ddp() -> None:
    plain = Deep(2)
    (sum(plain(ROWS * rank).pow(2).mean() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    right = [one.grad.sum().item() for one in plain.parameters() if one.grad is not None]
    for found in run_ranks(_on_rank, 2):
        for way, gradients in found.items():
            assert gradients == pytest.approx(right, abs=0.02 if way == "loss" else 1e-6), way
