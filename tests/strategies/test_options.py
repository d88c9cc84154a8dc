"""What a sharded model is besides: made on the meta device, checkpointed inside, in mixed precision; and its optimizer
in any order of preparing.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist import Accelerator
from nbdist.plugins import FullyShardedDataParallelPlugin as Plugin
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
ROWS = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, rows: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        Block.runs += 1
        return rows + self.drop(self.second(torch.relu(self.first(self.norm(rows))))) * scale


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.blocks = nn.Linear(4, 8), nn.ModuleList([Block(), Block()])
        self.norm, self.tied = nn.BatchNorm1d(8), nn.Linear(4, 8)
        self.tied.weight = self.inward.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.inward(rows) + self.tied(rows)
        for block in self.blocks:
            hidden = block(hidden)
        return self.attention(*[self.norm(hidden)[None]] * 3)[0]


class Unknown(Network):
    """Has values that only its constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(3))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def _made(cls: type[nn.Module] = Network, on: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    with torch.device(on):
        return cls()


def _full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _off(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((_full(a) - _full(b)).abs().max().item() for a, b in pairs)


def _steps(model: nn.Module, optimizer: Any, backward: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model(ROWS[step]).pow(2).mean())
        optimizer.step()


# ---------------------------------------------------------------------- orders
ORDERS = ("together", "optimizer first", "two calls", "two calls, optimizer first", "not prepared", "made afterwards")


def _orders(rank: int, ranks: int) -> dict[str, Any]:
    found = {}
    for order in ORDERS:
        for before in (0, 2) if order in ("together", "made afterwards") else (2,):
            whole, model = _made().eval(), _made().eval()
            right, optimizer = (torch.optim.AdamW(one.parameters(), 0.01) for one in (whole, model))
            _steps(whole, right, torch.Tensor.backward, range(before))
            _steps(model, optimizer, torch.Tensor.backward, range(before))
            accelerator = Accelerator(cpu=True, strategy="fsdp")
            own = model, optimizer
            if order == "together":
                model, optimizer = accelerator.prepare(model, optimizer)
            elif order == "optimizer first":
                optimizer, model = accelerator.prepare(optimizer, model)
            elif order == "two calls, optimizer first":
                optimizer = accelerator.prepare(optimizer)
                model = accelerator.prepare(model)
            elif order == "made afterwards":
                state = optimizer.state_dict() if not before else None
                model = accelerator.prepare(model)
                if state is None:
                    continue  # a new one starts anew
                optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.01))
            else:
                model = accelerator.prepare(model)
                optimizer = optimizer if order == "not prepared" else accelerator.prepare(optimizer)
            _steps(whole, right, torch.Tensor.backward, range(before, before + 3))
            _steps(model, optimizer, accelerator.backward, range(before, before + 3))
            same = accelerator.unwrap_model(model) is own[0]
            found[f"{order}, {before} steps before"] = (_off(whole, model), same)
            accelerator.free_memory()

    # Refused before anything is changed, whatever the order of the arguments; another optimizer is taken then.
    accelerator, model = Accelerator(cpu=True, strategy="fsdp"), _made()
    wrong = torch.optim.Adafactor(model.parameters())
    try:
        accelerator.prepare(model, wrong)
    except ValueError as error:
        found["refused"] = str(error), [type(one).__name__ for one in model.parameters()]
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return found


def test_an_optimizer_trains_on_in_any_order_of_preparing() -> None:
    for found in run_ranks(_orders, 2, limit=200):
        text, kinds = found.pop("refused")
        assert text.startswith("Adafactor cannot train parameters") and set(kinds) == {"Parameter"}
        assert len(found) == len(ORDERS) + 1
        for case, (off, same) in found.items():
            assert off < 1e-6 and same, case


# ---------------------------------------------------------------------- the meta device
def _from_meta(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    right = _made()
    for name in ("nobody has it", "rank 0 has it"):
        model = _made(on="cpu" if rank == 0 and name == "rank 0 has it" else "meta")
        if rank == 1:
            torch.manual_seed(99)  # rank 0's random numbers count
        drawn = torch.get_rng_state()
        accelerator = Accelerator(cpu=True, strategy="fsdp", fsdp_plugin=Plugin(cpu_ram_efficient_loading=True))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        found[name] = {
            "off": _off(right, model),
            "on meta": [key for key, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta],
            "tied": model.tied.weight is model.inward.weight,
            "buffers": (model.norm.running_var.tolist(), int(model.norm.num_batches_tracked)),
            "own random numbers": rank == 0 or torch.equal(drawn, torch.get_rng_state()),
        }
        whole = _made().eval()
        other = torch.optim.AdamW(whole.parameters(), 0.01)
        model.eval()
        _steps(whole, other, torch.Tensor.backward, range(2))
        _steps(model, optimizer, accelerator.backward, range(2))
        found[name]["trained, off"] = _off(whole, model)
    try:
        Accelerator(cpu=True, strategy="fsdp").prepare(_made(Unknown, "meta"))
    except ValueError as error:
        found["error"] = str(error)

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(2)

    model = Accelerator(cpu=True, fsdp_plugin=Plugin(param_init_fn=init)).prepare(_made(Unknown, "meta"))
    found["param_init_fn"] = {value for one in model.parameters() for value in _full(one).flatten().tolist()}
    found["its buffers"] = model.frequencies.tolist()
    return found


def test_a_model_on_meta_starts_as_in_one_process() -> None:
    for found in run_ranks(_from_meta, 2, limit=200):
        for name in ("nobody has it", "rank 0 has it"):
            case = found[name]
            assert case["off"] == 0 and case["trained, off"] < 1e-6, name
            assert case["on meta"] == [] and case["tied"] and case["own random numbers"], name
            assert case["buffers"] == ([1.0] * 8, 0)
        assert "nothing gives place, frequencies a value" in found["error"] and "param_init_fn" in found["error"]
        assert found["param_init_fn"] == {2.0} and found["its buffers"] == [2.0] * 3


def _peak(rank: int, ranks: int) -> dict[str, float]:
    """By how many MB this process grew at most while a model of 192 MB was prepared, as seen every half millisecond."""
    import threading

    warnings.simplefilter("ignore")

    def taken() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    found = {}
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(nn.Linear(4, 4))
    for name, here in (("nobody has it", False), ("rank 0 has it", rank == 0)):
        with torch.device("cpu" if here else "meta"):
            layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)) for _ in range(24)]
        before, most, over = taken(), [0.0], threading.Event()

        def watch(most: list[float] = most, over: threading.Event = over) -> None:
            while not over.wait(0.0005):
                most[0] = max(most[0], taken())

        thread = threading.Thread(target=watch)
        thread.start()
        model = accelerator.prepare(nn.Sequential(*layers))
        over.set()
        thread.join()
        found[name] = most[0] - before
        del model, layers
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_but_the_one_that_has_it_holds_a_model_whole() -> None:
    _, other = run_ranks(_peak, 2, limit=200)  # its shards are 96 MB
    assert other["nobody has it"] < 150 and other["rank 0 has it"] < 150, other


# ---------------------------------------------------------------------- activation checkpointing
def _again(rank: int, ranks: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    trained: dict[str, list[nn.Module]] = {}
    found: dict[str, Any] = {}
    for precision in ("no", "bf16"):
        for again in (False, True):
            plugin = Plugin(activation_checkpointing=again, transformer_cls_names_to_wrap=["Block"])
            accelerator = Accelerator(
                cpu=True, fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=2
            )
            model = accelerator.prepare(_made())
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            torch.manual_seed(7)
            Block.runs = 0
            for step in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(ROWS[step]).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            runs = Block.runs
            with torch.no_grad():
                model(ROWS[0])
            trained.setdefault(precision, []).append(model)
            found[f"{precision}, {again}"] = {
                "runs": (runs, Block.runs - runs),
                "keys": sorted(model.state_dict()) == sorted(_made().state_dict()),
                "class": isinstance(model.blocks[0], Block) and vars(model.blocks[0]).get("forward") is None,
            }
        found[precision] = _off(*trained[precision])
    return found


def test_what_is_computed_again_is_the_same() -> None:
    for found in run_ranks(_again, 2, limit=200):
        for precision in ("no", "bf16"):
            assert found[precision] == 0, precision
            for again in (False, True):
                case = found[f"{precision}, {again}"]
                assert case["runs"] == (16 if again else 8, 2) and case["keys"] and case["class"]


# ---------------------------------------------------------------------- precision
def _halves(rank: int, ranks: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    models, found = [], {}
    for strategy, plugin in (
        ("ddp", None),
        ("fsdp", Plugin(transformer_cls_names_to_wrap=["Block"])),
        ("fsdp", Plugin(mixed_precision_policy="fp32", transformer_cls_names_to_wrap=["Block"])),
    ):
        accelerator = Accelerator(cpu=True, strategy=strategy, fsdp_plugin=plugin, mixed_precision="bf16")
        model = _made().eval()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
        seen: list[Any] = []
        block = accelerator.unwrap_model(model).blocks[0]
        block.first.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(str(module.weight.dtype)))
        output = model(ROWS[0])
        _steps(model, optimizer, accelerator.backward, [step % 6 for step in range(20)])
        models.append(accelerator.unwrap_model(model))
        told = plugin.mixed_precision_policy if plugin is not None else None
        found[f"{strategy}, {told is not None}"] = (
            str(output.dtype),
            seen[0],
            {str(one.dtype) for one in model.parameters()},
        )
    found["off"] = [_off(models[0], one) for one in models[1:]]
    found["moved"] = _off(models[0], _made())
    plugin = Plugin(cpu_offload=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = accelerator.prepare(_made())
    accelerator.backward(model(ROWS[0]).mean())
    found["said"] = [str(one.message) for one in said if "cpu_offload" in str(one.message)]
    return found


def test_bf16_is_what_it_is_under_ddp_within_its_rounding() -> None:
    for rank, found in enumerate(run_ranks(_halves, 2, limit=200)):
        assert found["ddp, False"] == ("torch.float32", "torch.float32", {"torch.float32"})
        assert found["fsdp, False"] == ("torch.float32", "torch.bfloat16", {"torch.float32"})
        assert found["fsdp, True"] == ("torch.float32", "torch.float32", {"torch.float32"})
        assert max(found["off"]) < 0.02 < 5 * found["moved"], found
        assert [("the device is the CPU" in text) for text in found["said"]] == [True] * (rank == 0)
