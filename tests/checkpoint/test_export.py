"""Weights for others: what safetensors, plain torch and transformers' way of naming read, and what must not happen."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import nn

from nbdist import Accelerator
from nbdist.checkpoint import export, weights
from tests.ranks import run_ranks


class Words(nn.Module):
    """Tied, in half precision and integers, 0-dim, empty, not contiguous, a view of a buffer."""

    def __init__(self, words: int = 6) -> None:
        super().__init__()
        self.head = nn.Linear(4, words, bias=False)
        self.embedding = nn.Embedding(words, 4)
        self.inner = nn.Linear(4, 4).bfloat16()
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("transposed", torch.randn(3, 5).t())
        self.register_buffer("row", torch.arange(10.0).reshape(2, 5)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x).bfloat16()).to(self.head.weight.dtype))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers and Accelerate find them: one file, else by the index."""
    found: dict[str, torch.Tensor] = {}
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    for name, file in json.loads(index.read_text())["weight_map"].items():
        found[name] = safetensors.torch.load_file(folder / file)[name]
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Layers of all sizes, tied to each other in groups, some of them twice in the model."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    layers: list[nn.Module] = [nn.Linear(size, size, bias=draw(st.booleans())) for size in sizes]
    for at, layer in enumerate(layers):
        same = [one for one in layers[:at] if one.weight.shape == layer.weight.shape]
        if same and draw(st.booleans()):
            layer.weight = draw(st.sampled_from(same)).weight
    if draw(st.booleans()):
        layers.append(draw(st.sampled_from(layers)))
    if draw(st.booleans()):
        layers.append(nn.BatchNorm1d(2))
    return nn.ModuleDict({f"layer{at}": layer for at, layer in enumerate(layers)})


@settings(max_examples=25, deadline=None)
@given(models(), st.one_of(st.integers(1, 400), st.just("1KB")), st.booleans())
def test_any_model_comes_back(
    tmp_path_factory: pytest.TempPathFactory, model: nn.Module, size: int | str, safe: bool
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    Accelerator(cpu=True).save_model(model, folder, size, safe)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if safe:
        found = read(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        missing, unexpected = model.load_state_dict(found, strict=False)
        assert not unexpected
        if (folder / "model.safetensors").exists():
            safetensors.torch.load_model(model, folder / "model.safetensors")
        kept = {id(one): name for name, one in model.named_parameters(remove_duplicate=False) if name in found}
        assert all(id(dict(model.named_parameters(remove_duplicate=False))[name]) in kept for name in missing)
    else:
        for file in folder.glob("*.bin"):
            model.load_state_dict(torch.load(file, weights_only=True), strict=False)
        found = {k: v for file in folder.glob("*.bin") for k, v in torch.load(file, weights_only=True).items()}
        assert set(found) == set(expected)
    assert equal(dict(model.state_dict()), expected), "ties are stored once, and loaded everywhere"
    files = [file for file in folder.iterdir() if file.suffix != ".json"]
    sizes = [sum(t.numel() * t.element_size() for t in read_file(file).values()) for file in files]
    limit = weights.bytes_of(size, "")
    assert all(total <= limit for total, file in zip(sizes, files, strict=True) if len(read_file(file)) > 1)


def read_file(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    loaded = torch.load(file, weights_only=True)
    return {str(one.data_ptr()) if one.numel() else name: one for name, one in loaded.items()}


def test_what_is_odd_in_a_model(tmp_path: Path) -> None:
    model, accelerator = Words(), Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    state = accelerator.get_state_dict(prepared)
    assert list(state) == list(model.state_dict()) and equal(state, dict(model.state_dict()))
    assert state["head.weight"] is state["embedding.weight"] is not model.head.weight
    with torch.no_grad():
        model.inner.bias += 1
    assert not equal(state, dict(model.state_dict())), "what is given is of its moment"
    state = accelerator.get_state_dict(prepared)
    accelerator.save_model(prepared, tmp_path)
    found = read(tmp_path)
    assert equal(found, {name: one for name, one in state.items() if name != "embedding.weight"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "embedding.weight": "head.weight"}
    new = Words()
    assert new.load_state_dict(found, strict=False) == (["embedding.weight"], [])
    assert torch.equal(new.embedding.weight, model.embedding.weight)


def test_two_halves_of_one_memory_are_both_there(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    model = nn.Module()
    model.register_buffer("first", flat[:4])
    model.register_buffer("second", flat[4:])
    model.register_buffer("overlapping", flat[2:6])
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    assert equal(read(tmp_path), dict(model.state_dict()))
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    assert equal(torch.load(tmp_path / "pytorch_model.bin"), dict(model.state_dict()))
    model.first = torch.ones(2).expand(1_000_000, 2)[:1]  # torch.save would write all of a view's memory
    model.second = torch.ones(1_000_000)[:1]
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    assert os.path.getsize(tmp_path / "pytorch_model.bin") < 10_000


def test_an_earlier_save_of_another_size_goes_and_other_files_stay(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors").write_text("mine")
    (tmp_path / ".model.safetensors.elsewhere-1.saving").write_text("another machine writes it")
    others = set(os.listdir(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename.replace(".", "_")
    (tmp_path / f".model.safetensors.{host}-{dead.pid}.saving").write_text("killed")
    for size, expected in (
        (100, {f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)} | {"model.safetensors.index.json"}),
        ("10GB", {"model.safetensors"}),
        (300, {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} | {"model.safetensors.index.json"}),
    ):
        with torch.no_grad():
            model[0].weight += 1
        accelerator.save_model(model, tmp_path, size)
        assert set(os.listdir(tmp_path)) == expected | others
        assert equal(read(tmp_path), dict(model.state_dict()))
    assert oct(os.stat(tmp_path / "model-00001-of-00002.safetensors").st_mode & 0o777) == "0o644"


class Killed:
    """Kills this process at the n-th call of what changes files."""

    def __init__(self, at: int) -> None:
        self.left = at
        for name in ("open", "write", "fsync", "replace", "unlink"):
            setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os._exit(9)
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("sizes", [(100, 100), (100, "1GB"), ("1GB", 100), ("1GB", "1GB")])
def test_killed_anywhere_there_is_one_save_or_the_other_and_never_both(tmp_path: Path, sizes: tuple[Any, Any]) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in old.items()}
    seen = set()
    for at in itertools.count():
        model.load_state_dict(old)
        accelerator.save_model(model, tmp_path, sizes[0])
        model.load_state_dict(new)
        child = os.fork()
        if child == 0:
            Killed(at)
            accelerator.save_model(model, tmp_path, sizes[1])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        try:
            found = read(tmp_path)
        except FileNotFoundError:
            assert not (tmp_path / "model.safetensors.index.json").exists() and sizes[1] == 100
            seen.add("no index")
        else:
            seen.add("old" if equal(found, old) else "new" if equal(found, new) else "both")
        if status == 0:
            break
    assert at > 5 and {"old", "new"} <= seen and "both" not in seen
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".saving")], "leftovers are gone"


@pytest.mark.parametrize("size", ["10 XB", "GB", "", 0, -1, "-1GB", "0.1B", None, True, 1.5, "1e9", "nanGB"])
def test_a_wrong_size(tmp_path: Path, size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"max_shard_size is .*; it takes a size of at least one byte"):
        Accelerator(cpu=True).save_model(nn.Linear(1, 1), tmp_path / "new", size)
    assert not (tmp_path / "new").exists()


def test_sizes() -> None:
    told = {"10GB": 10**10, "1.5 GiB": 3 * 2**29, "7": 7, "2kb": 2000, 5: 5, "3 MiB": 3 * 2**20}
    assert {size: weights.bytes_of(size, "") for size in told} == told


def test_what_safetensors_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            self.steps = state["steps"]

    model = nn.Sequential(Extra(1, 1))
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    model.register_buffer("sparse", torch.ones(2, 2).to_sparse())
    told = (
        r"wide: the format has no dtype complex128; sparse: it is sparse_coo; 0\._extra_state: it is \{'steps': 3\} "
        r"and no tensor\. safe_serialization=False saves them"
    )
    with pytest.raises(ValueError, match=told):
        accelerator.save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert loaded["0._extra_state"] == {"steps": 3} and loaded["wide"].dtype == torch.complex128
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    for safe in (True, False):
        with pytest.raises(ValueError, match="nothing to save in weight: it is on the device meta"):
            accelerator.save_model(empty, tmp_path, safe_serialization=safe)


def test_places_that_cannot_be_written_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(50, 50)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"it is a file, and weights are saved in a folder.*file"):
        accelerator.save_model(model, tmp_path / "file")
    with pytest.raises(OSError, match=r"/proc"):
        accelerator.save_model(model, "/proc/weights")
    with pytest.raises(TypeError, match="save_directory is 3; it takes the path of a folder"):
        accelerator.save_model(model, 3)
    accelerator.save_model(model, tmp_path / "there")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # a file may not grow further: as on a disk that fills up
    try:
        for safe in (True, False):
            told = r"File too large\. What was there is as it was: '.*there'"
            with pytest.raises(OSError, match=told):
                accelerator.save_model(nn.Linear(50, 50), tmp_path / "there", "6KB", safe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path / "there") == ["model.safetensors"] and equal(read(tmp_path / "there"), before)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=512, f_blocks=9))
    with pytest.raises(OSError, match=r"no room: the weights have 10,200 bytes, and 1,024 are free"):
        accelerator.save_model(model, tmp_path / "there")


# ------------------------------------------------------------------ on ranks


def _sharded(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, accelerator = Words(5), Accelerator(cpu=True)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = accelerator.get_state_dict(model)
    everywhere = accelerator.get_state_dict(model, all_ranks=True)
    gather, refs, peak = export.whole, [], [0]

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        full = gather(tensor)
        refs.append(weakref.ref(full))
        peak[0] = max(peak[0], sum(one() is not None for one in refs))
        return full

    export.whole = counted
    accelerator.save_model(model, folder, 150)
    export.whole = gather
    accelerator.save_model(model, os.path.join(folder, "bin"), safe_serialization=False)
    found: dict[str, Any] = {
        "peak": (peak[0], len(refs)),
        "state": equal(state, expected if rank == 0 else {}),
        "everywhere": equal(everywhere, expected) and list(everywhere) == list(expected),
        "tied": rank > 0 or state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr(),
        "files": equal(read(Path(folder)), {name: one for name, one in expected.items() if name != "embedding.weight"}),
        "bin": equal(torch.load(os.path.join(folder, "bin", "pytorch_model.bin")), expected),
    }
    errors = []
    for where, size in (("/proc/weights", "1GB"), (os.path.join(folder, "full"), "1GB"), (folder, "1XB")):
        if where.endswith("full"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        try:
            accelerator.save_model(model, where, size)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    found["errors"], found["left"] = errors, os.listdir(os.path.join(folder, "full"))
    other = nn.Linear(2 + rank, 2)
    fully_shard(other, mesh=mesh)
    with pytest.raises(
        Exception, match=r"models of other tensors: rank 0 has weight .2, 2. float32, rank 1 weight .2, 3"
    ):
        accelerator.save_model(other, folder)
    accelerator.wait_for_everyone()  # all ranks go on together
    return found


@pytest.mark.ranks
def test_what_is_sharded_is_gathered_by_one_and_what_fails_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_sharded, 2, str(tmp_path), limit=100)
    for found in (first, second):
        assert all(found[name] for name in ("state", "everywhere", "tied", "files", "bin"))
        assert found["left"] == [] and found["peak"] == (1, 7), "one whole tensor at a time, also where it is written"
    assert first["errors"][0].startswith("FileNotFoundError:") and "/proc/weights" in first["errors"][0]
    assert "save_model to /proc/weights failed on rank 0: FileNotFoundError" in second["errors"][0]
    assert "File too large" in first["errors"][1] and "failed on rank 0: OSError" in second["errors"][1]
    assert first["errors"][2] == second["errors"][2] and "1XB" in first["errors"][2]


def _strategies(rank: int, ranks: int, folder: str) -> dict[str, bool]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        place = Path(folder, strategy)
        torch.manual_seed(0)
        model, accelerator = Words(5), Accelerator(cpu=True, strategy=strategy, mixed_precision="bf16")
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        prepared, optimizer = accelerator.prepare(
            torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        accelerator.save_model(prepared, place)
        accelerator.save_state(place / "state", async_save=True)
        accelerator.backward(prepared(torch.arange(5)).mean())
        optimizer.step()
        accelerator.load_state(place / "state")
        state = accelerator.get_state_dict(prepared, all_ranks=True)
        accelerator.wait_for_everyone()
        found[f"{strategy} loaded"] = equal(state, expected)
        del expected["embedding.weight"]
        found[f"{strategy} saved"] = equal(read(place), expected)
    return found


@pytest.mark.ranks
def test_each_strategy_writes_the_same(tmp_path: Path) -> None:
    for found in run_ranks(_strategies, 2, str(tmp_path), limit=100):
        assert len(found) == 4 and all(found.values()), found


def _whole(rank: int, ranks: int, folder: str) -> tuple[bool, bool]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Words())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:  # as scripts do: no collective is in it
        accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    found = read(Path(folder))
    return equal(found, {name: one for name, one in state.items() if name != "embedding.weight"}), len(state) == 8


@pytest.mark.ranks
def test_what_is_whole_is_saved_by_the_main_process_alone(tmp_path: Path) -> None:
    assert run_ranks(_whole, 2, str(tmp_path)) == [(True, True)] * 2
