"""save_state and load_state in one process: names, what fits, what comes back."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbdist import Accelerator, set_seed
from nbdist.checkpoint import manifest
from nbdist.utils import ProjectConfiguration


def filled(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def values(model: nn.Module) -> set[float]:
    return {round(one, 6) for parameter in model.parameters() for one in parameter.flatten().tolist()}


class Ids(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


# ---------------------------------------------------------------- the cases


@pytest.mark.parametrize("epoch", [0, 1])
def test_r1_r2_a_resumed_loader_gives_what_is_left(tmp_path: Path, epoch: int) -> None:
    def run(seed: int, stop: int | None, folder: str | None) -> list[list[int]]:
        set_seed(seed)
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Ids(16), batch_size=2, shuffle=True))
        if folder:
            accelerator.load_state(folder)
        seen: list[list[int]] = []
        for at in range(epoch if folder else 0, 3):
            seen.append([])
            for number, batch in enumerate(loader, 1):
                seen[-1] += batch.tolist()
                if at == epoch and number == stop:
                    accelerator.save_state(tmp_path / "at")
        return seen

    whole = run(1, 4, None)
    resumed = run(2, None, str(tmp_path / "at"))
    assert resumed == [whole[epoch][8:], *whole[epoch + 1 :]]


def test_ck1_two_models_are_never_swapped(tmp_path: Path) -> None:
    accelerator = Accelerator()
    a, b = accelerator.prepare(filled(1.0), filled(2.0))
    first, second = filled(1.0), filled(2.0)
    accelerator = Accelerator()
    a, b = first, second
    a, b = accelerator.prepare(a, b)
    accelerator.save_state(tmp_path / "ck")
    accelerator = Accelerator()
    del first, second
    a, b = filled(0.0), filled(0.0)
    b, a = accelerator.prepare(b, a)
    accelerator.load_state(tmp_path / "ck")
    assert (values(a), values(b)) == ({1.0}, {2.0})


def test_ck1_under_other_names_it_is_an_error_and_names_tell(tmp_path: Path) -> None:
    accelerator = Accelerator()
    a, b = filled(1.0), filled(2.0)
    a, b = accelerator.prepare(a, b)
    accelerator.save_state(tmp_path / "ck")
    accelerator = Accelerator()
    c, d = filled(0.0), filled(0.0)
    c, d = accelerator.prepare(c, d)
    with pytest.raises(ValueError, match=r"model 'a' of the checkpoint \(Linear\) is not here \(here: 'c', 'd'\)"):
        accelerator.load_state(tmp_path / "ck")
    assert values(c) == values(d) == {0.0}
    accelerator.load_state(tmp_path / "ck", names={"a": "d", "b": "c"})
    assert (values(c), values(d)) == ({2.0}, {1.0})


def test_ck2_automatic_names_go_on_behind_the_latest(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, nn.Module]:
        configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=configuration)
        model = accelerator.prepare(filled(0.0))
        return accelerator, model

    accelerator, model = make()
    accelerator.save_state()
    nn.init.ones_(model.weight)
    accelerator.save_state()
    accelerator, model = make()
    loaded = accelerator.load_state()
    assert loaded.path.endswith("checkpoint_1") and values(model) == {0.0, 1.0}
    assert accelerator.save_iteration == 2
    assert os.path.basename(accelerator.save_state()) == "checkpoint_2"
    accelerator, model = make()  # without loading: nothing is written over either
    assert os.path.basename(accelerator.save_state()) == "checkpoint_3"


def test_ck4_keys_of_a_compiled_model_are_its_own(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.compile(filled(3.0), backend="eager"))
    accelerator.save_state(tmp_path / "ck")
    (held,) = manifest.read(tmp_path / "ck").contents["models"].values()
    assert sorted(held["keys"]) == ["bias", "weight"]
    accelerator = Accelerator()
    model = accelerator.prepare(filled(0.0))
    accelerator.load_state(tmp_path / "ck")
    assert values(model) == {3.0}


def test_ck6_what_is_missing_is_listed_and_nothing_changed(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(filled(7.0))
    accelerator.save_state(tmp_path / "ck")
    accelerator = Accelerator()
    model = filled(0.0)
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(
        ValueError, match=r"the optimizer 'Adam' \(Adam\) is not in the checkpoint, which holds no optim"
    ):
        accelerator.load_state(tmp_path / "ck")
    assert values(model) == {0.0}
    loaded = accelerator.load_state(tmp_path / "ck", strict=False)
    assert values(model) == {7.0}
    assert "left out: the optimizer 'Adam'" in repr(loaded)


# ---------------------------------------------------------------- whole runs


def run(folder: Path, cut: int | None, resume: bool, seed: int = 3, **options: Any) -> list[float]:
    """Three epochs of five steps, with all that has a state; saved behind the step `cut`, or begun from there."""
    set_seed(seed)
    accelerator = Accelerator(**options)
    torch.manual_seed(0 if not resume else 99)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}], lr=0.05
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    data = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done = 0
    if resume:
        accelerator.load_state(folder)
        done = cut or 0
    for _ in range((done - 1) // 5 if done else 0, 3):
        for batch in loader:
            noise = torch.randn_like(batch) + numpy.random.rand() + random.random()
            accelerator.backward(model(batch + 0.01 * noise).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == cut and not resume:
                accelerator.save_state(folder)
    state = [*model.state_dict().values(), *(one for s in optimizer.state.values() for one in s.values())]
    return torch.cat([torch.as_tensor(one, dtype=torch.float64).detach().flatten() for one in state]).tolist()


@pytest.mark.parametrize("cut", [1, 4, 5, 8])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, cut: int) -> None:
    whole = run(tmp_path / "at", cut, False)
    assert run(tmp_path / "at", cut, True) == whole


# ---------------------------------------------------------------- optimizers by name


def test_groups_in_another_order_are_loaded_by_name(tmp_path: Path) -> None:
    def make(reverse: bool) -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups[::-1] if reverse else groups, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.randn(4, 2)).pow(2).mean())
        return accelerator, model, optimizer

    accelerator, model, optimizer = make(False)
    optimizer.step()
    accelerator.save_state(tmp_path / "ck")
    before = {name: optimizer.state[one]["momentum_buffer"].tolist() for name, one in model.named_parameters()}
    accelerator, model, optimizer = make(True)
    accelerator.load_state(tmp_path / "ck")
    after = {name: optimizer.state[one]["momentum_buffer"].tolist() for name, one in model.named_parameters()}
    assert after == before
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_parameters_that_changed_their_group_are_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = filled(1.0)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    model, _ = accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    accelerator.save_state(tmp_path / "ck")
    accelerator = Accelerator()
    model = filled(0.0)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        ValueError, match=r"group 0 here has parameters that are in 2 groups there \(model/weight in gr"
    ):
        accelerator.load_state(tmp_path / "ck")
    assert values(model) == {0.0}


def test_tied_frozen_loose_and_odd_dtypes_come_back(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator()
        model = nn.Module()
        model.one, model.two, model.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        model.two.weight = model.one.weight
        model.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
        model.register_buffer("flags", torch.tensor([True, False]))
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("number", torch.randint(0, 9, (), dtype=torch.int16))
        loose = nn.Parameter(torch.randn(2))
        optimizer = torch.optim.Adam([*model.parameters(), loose])
        model, optimizer = accelerator.prepare(model, optimizer)
        (model.one.weight.sum() * loose.sum()).backward()
        return accelerator, model, optimizer, loose

    accelerator, model, optimizer, loose = make()
    optimizer.step()
    accelerator.save_state(tmp_path / "ck")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = {key: one.clone() for key, one in optimizer.state[loose].items()}
    held = manifest.read(tmp_path / "ck")
    (keys,) = (one["keys"] for one in held.contents["models"].values())
    assert keys["one.weight"] == keys["two.weight"]  # written once
    accelerator, model, optimizer, loose = make()
    accelerator.load_state(tmp_path / "ck")
    assert all(torch.equal(model.state_dict()[name], one) for name, one in before.items())
    assert model.two.weight is model.one.weight
    assert all(torch.equal(optimizer.state[loose][key], one) for key, one in state.items())


def test_a_state_keeps_its_dtype_whatever_the_parameters(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator()
        model = filled(1.0).to(torch.bfloat16)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return accelerator, model, optimizer

    accelerator, model, optimizer = make()
    master = torch.tensor([[1 / 3, 1.0], [1.0, 1.0]])
    optimizer.state[model.weight]["master"] = master
    accelerator.save_state(tmp_path / "ck")
    accelerator, model, optimizer = make()
    accelerator.load_state(tmp_path / "ck")
    assert torch.equal(optimizer.state[model.weight]["master"], master)


# ---------------------------------------------------------------- custom objects


class Holding:
    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_registered_objects_come_back_as_they_were(tmp_path: Path) -> None:
    accelerator = Accelerator()
    meter = Holding(
        best=float("inf"), seen={1, 2}, by={3: "x", ("a", 1): None}, at=(1, [2.5]), raw=b"\0\1", nan=float("nan"),
        array=numpy.arange(6.0).reshape(2, 3), one=numpy.float32(0.1), tensor=torch.arange(3),
        texts=numpy.array(["a", "bc"]),
    )  # fmt: skip
    accelerator.register_for_checkpointing(meter)
    accelerator.save_state(tmp_path / "ck")
    other = Accelerator()
    before = meter.held
    meter = Holding()
    other.register_for_checkpointing(meter)
    other.load_state(tmp_path / "ck")
    held = meter.held
    for name in ("best", "seen", "by", "at", "raw", "one"):
        assert held[name] == before[name] and type(held[name]) is type(before[name]), name
    assert numpy.array_equal(held["array"], before["array"]) and held["array"].dtype == numpy.float64
    assert held["texts"].tolist() == ["a", "bc"]
    assert torch.equal(held["tensor"], before["tensor"]) and held["nan"] != held["nan"]


def test_what_would_need_pickle_is_refused_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator()
    meter = Holding(inner=[{"thing": Holding()}])
    accelerator.register_for_checkpointing(meter)
    with pytest.raises(
        TypeError, match=r"object 'meter' \(Holding\) cannot be saved: inner/0/thing is a .*Holding; a che"
    ):
        accelerator.save_state(tmp_path / "ck")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match=r"objects with state_dict and load_state_dict; these have none: 3"):
        accelerator.register_for_checkpointing(3)


def test_an_object_that_refuses_its_state_leaves_all_as_it_was(tmp_path: Path) -> None:
    class Refusing(Holding):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if "at" in state:
                raise RuntimeError("not this one")

    accelerator = Accelerator()
    first, second, model = Holding(n=1), Refusing(at=1), filled(1.0)
    model = accelerator.prepare(model)
    accelerator.register_for_checkpointing(first, second)
    accelerator.save_state(tmp_path / "ck")
    first.held, second.held = {"n": 2}, {}
    nn.init.zeros_(model.weight)
    with pytest.raises(RuntimeError, match="not this one"):
        accelerator.load_state(tmp_path / "ck")
    assert first.held == {"n": 2} and values(model) == {0.0, 1.0}


# ---------------------------------------------------------------- hooks


def test_hooks_save_and_load_models_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator()
    a, b = filled(1.0), filled(2.0)
    a, b = accelerator.prepare(a, b)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        assert models == [a, b]
        Path(folder, "own.json").write_text(json.dumps(models[1].weight.tolist()))
        weights.pop()

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "ck")
    handle.remove()
    assert list(manifest.read(tmp_path / "ck").contents["models"]) == ["a"]
    accelerator = Accelerator()
    a, b = filled(0.0), filled(0.0)
    a, b = accelerator.prepare(a, b)
    with pytest.raises(ValueError, match=r"the model 'b' .* is not in the checkpoint"):
        accelerator.load_state(tmp_path / "ck")

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop().weight.data.copy_(torch.tensor(json.loads(Path(folder, "own.json").read_text())))

    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(tmp_path / "ck")
    assert (values(a), values(b)) == ({1.0}, {0.0, 2.0})
