"""Two ranks, under ddp and fsdp: what does not fit is one error on each, that names it, and changes nothing. And a
model from the meta device, whose values are those of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.layouts import Net, accelerator_of, state_of
from tests.ranks import run_ranks

CASES = ("other shapes", "another model", "another optimizer", "other parameters")


def told_by(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def files(folder: str) -> dict[str, bytes]:
    return {name: Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))}


def bad_loads(rank: int, ranks: int, folder: str, layout: str) -> dict[str, Any]:
    accelerator = accelerator_of(layout, ranks)
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(f"{folder}/ck")
    accelerator.wait_for_everyone()
    before = files(f"{folder}/ck")
    told: dict[str, Any] = {}
    for case in CASES:
        accelerator = accelerator_of(layout, ranks)
        numbers = torch.arange(4)
        model = Net(8 if case == "other shapes" else 6)
        if case == "another model":
            model, numbers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 7)), numbers.float()
        kind = torch.optim.SGD if case == "another optimizer" else torch.optim.AdamW
        less = case == "other parameters"
        optimizer = kind([one for name, one in model.named_parameters() if not (less and name == "bias")])
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(numbers).square().mean())
        optimizer.step()
        had, drawn = state_of({"": accelerator.unwrap_model(model)}, {"": optimizer}), torch.get_rng_state()
        told[case] = told_by(partial(accelerator.load_state, f"{folder}/ck"))
        now = state_of({"": accelerator.unwrap_model(model)}, {"": optimizer})
        told[f"{case}, changed"] = [name for name in had if not torch.equal(had[name], now[name])]
        told[f"{case}, random"] = torch.equal(drawn, torch.get_rng_state())
    told["files"] = files(f"{folder}/ck") == before
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_checkpoint_of_something_else_changes_nothing(tmp_path: Path, layout: str) -> None:
    for told in run_ranks(bad_loads, 2, str(tmp_path), layout):
        assert "other shapes: " in told["other shapes"], told
        assert "embed.weight is (7, 6) there and (7, 8) here" in told["other shapes"]
        assert "embed.weight" in told["another model"] and "0.weight" in told["another model"], told["another model"]
        assert "is AdamW there and SGD here" in told["another optimizer"]
        assert "parameters that are only there: " in told["other parameters"]
        for case in CASES:
            assert told[case].startswith("ValueError: load_state: ") and "nothing was changed" in told[case]
            assert told[f"{case}, changed"] == [] and told[f"{case}, random"], case
        assert told["files"]


class Norms(nn.Module):
    """No reset_parameters: nothing but a checkpoint or a function of the user's knows its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 3.0))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def made(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(3, 5), Norms(), nn.Linear(5, 2000), nn.BatchNorm1d(2000))


def from_meta(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    from nbdist import FullyShardedDataParallelPlugin

    found: dict[str, Any] = {}
    accelerator = accelerator_of("ddp", ranks)
    torch.manual_seed(1)
    model = made("cpu")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 3) + torch.arange(4.0)[:, None]).square().mean())
    optimizer.step()
    accelerator.save_state(folder)
    expected = state_of({"": accelerator.unwrap_model(model)}, {"": optimizer})

    found["refused"] = told_by(lambda: accelerator_of("fsdp", ranks).prepare(made("meta")))

    def zeros(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()

    torch.manual_seed(2)
    accelerator = accelerator_of("fsdp", ranks, fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=zeros))
    model = made("meta")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loaded = accelerator.load_state(folder)
    now = state_of({"": accelerator.unwrap_model(model)}, {"": optimizer})
    found["wrong"] = [name for name, one in expected.items() if not torch.equal(one, now[name])]
    found["names"] = sorted(expected) == sorted(now)
    found["part"] = loaded.bytes / sum(one.nbytes for one in expected.values())
    return found


@pytest.mark.ranks
def test_a_model_from_meta_has_the_values_of_a_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(from_meta, 2, str(tmp_path / "ck")):
        assert "is on the meta device, and nothing gives 1.scale" in found["refused"], found["refused"]
        assert "param_init_fn" in found["refused"]
        assert found["names"] and found["wrong"] == []
        assert found["part"] < 0.7, "a rank reads its shards (and what is whole, and random generators)"


def bad_setups(rank: int, ranks: int) -> dict[str, Any]:
    from nbdist import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    told: dict[str, Any] = {}
    for case, sizes in {"mesh": {"dp_shard_size": 3}, "mesh of two": {"dp_shard_size": 2, "tp_size": 2}}.items():
        told[case] = told_by(lambda sizes=sizes: Accelerator(parallelism_config=ParallelismConfig(**sizes)))
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Blok"])
    for case, options in {"class": {"fsdp_plugin": plugin}, "optimizer": {"strategy": "fsdp"}}.items():
        accelerator = Accelerator(**options)
        model = Net()
        kind = torch.optim.Adafactor if case == "optimizer" else torch.optim.AdamW
        optimizer = kind(model.parameters())
        had = list(model.parameters()), [one.clone() for one in model.parameters()]
        told[case] = told_by(lambda m=model, o=optimizer, a=accelerator: a.prepare(m, o))
        same = [one is other for one, other in zip(model.parameters(), had[0], strict=True)]
        same += [torch.equal(one, other) for one, other in zip(model.parameters(), had[1], strict=True)]
        same += [one is other for one, other in zip(optimizer.param_groups[0]["params"], had[0], strict=True)]
        told[f"{case}, as it was"] = all(same) and type(model) is Net
    return told


@pytest.mark.ranks
def test_what_cannot_be_sharded_is_named_and_left_as_it_was() -> None:
    for told in run_ranks(bad_setups, 2):
        for case in ("mesh", "mesh of two"):
            assert "dp_shard_size" in told[case] and "2 ranks" in told[case], told[case]
        assert "has no module of the class Blok" in told["class"], told["class"]
        assert "Adafactor cannot train parameters that are spread" in told["optimizer"], told["optimizer"]
        assert told["class, as it was"] and told["optimizer, as it was"]
