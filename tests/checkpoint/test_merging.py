"""Checkpoints of many ranks merged into one file, and what a folder that means harm does: nothing."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from nbdist import Accelerator, utils
from nbdist.checkpoint.foreign import Foreign, NotReadable
from tests.checkpoint.test_export import Words, equal
from tests.ranks import run_ranks


def _theirs_and_ours(rank: int, ranks: int, folder: str) -> dict[str, torch.Tensor]:
    """As Accelerate's FSDP saves, with torch.distributed.checkpoint; and save_state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, accelerator = Words(5), Accelerator(cpu=True)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder, "pytorch_model_fsdp_0"))
    optimizer_state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(optimizer_state, checkpoint_id=os.path.join(folder, "optimizer_0"))
    accelerator.register_for_checkpointing(model)
    accelerator._named.note("models", model, model)
    accelerator.save_state(os.path.join(folder, "ours"))
    return expected


@pytest.mark.ranks
def test_both_kinds_without_their_ranks(tmp_path: Path) -> None:
    expected = run_ranks(_theirs_and_ours, 2, str(tmp_path), limit=100)[0]
    theirs, merged = tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged"
    utils.merge_fsdp_weights(theirs, merged)
    assert equal(safetensors.torch.load_file(merged / "model.safetensors"), expected)
    utils.merge_fsdp_weights(tmp_path / "optimizer_0", tmp_path / "optimizer", safe_serialization=False)
    assert not any(name.startswith("optimizer") for name in torch.load(tmp_path / "optimizer" / "pytorch_model.bin"))
    utils.merge_fsdp_weights(tmp_path / "ours", merged)
    found = safetensors.torch.load_file(merged / "model.safetensors")
    assert equal(found, {name: one for name, one in expected.items() if name != "embedding.weight"})
    utils.merge_fsdp_weights(tmp_path / "ours", merged, safe_serialization=False)
    assert equal(torch.load(merged / "pytorch_model.bin"), expected)

    with pytest.raises(ValueError, match=r"holds no checkpoint: .*There are some in it: optimizer_0, ours, pytorch_m"):
        utils.merge_fsdp_weights(tmp_path, merged)
    with pytest.raises(ValueError, match=r"nowhere is no folder"):
        utils.merge_fsdp_weights(tmp_path / "nowhere", merged)
    with pytest.raises(ValueError, match=r"is inside of the checkpoint, which remove_checkpoint_dir would delete"):
        utils.merge_fsdp_weights(theirs, theirs / "merged", remove_checkpoint_dir=True)
    with pytest.raises(ValueError, match=r"none called 'net': name one, model='model'"):
        utils.merge_fsdp_weights(tmp_path / "ours", merged, model="net")

    # Damaged anywhere: an error, and what there is stays.
    before = {name: (merged / name).read_bytes() for name in os.listdir(merged)}
    for checkpoint in (theirs, tmp_path / "ours"):
        for file in sorted(checkpoint.iterdir()):
            whole = file.read_bytes()
            for damaged in (whole[: len(whole) // 2], b""):
                file.write_bytes(damaged)
                with pytest.raises(ValueError, match=checkpoint.name):
                    utils.merge_fsdp_weights(checkpoint, merged, remove_checkpoint_dir=True)
            file.write_bytes(whole)
    assert {name: (merged / name).read_bytes() for name in os.listdir(merged)} == before

    utils.merge_fsdp_weights(theirs, merged, remove_checkpoint_dir=True)
    assert not theirs.exists() and (tmp_path / "optimizer_0").exists()


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARM"],)


def test_nothing_of_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    harm = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(harm))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(NotReadable, match=r"its \.metadata names posix\.mkdir, which has no place there"):
        Foreign(str(folder))
    for name in ("eval", "getattr", "__import__"):
        (folder / ".metadata").write_bytes(f"cbuiltins\n{name}\n(S'1'\ntR.".encode())
        with pytest.raises(NotReadable, match=f"names builtins.{name}"):
            Foreign(str(folder))
    (folder / ".metadata").write_bytes(b"ctorch.hub\nload\n(S'1'\ntR.")  # a record, and so nothing of it is called
    with pytest.raises(NotReadable, match="is damaged"):
        Foreign(str(folder))

    shutil.rmtree(folder)
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    assert Foreign(str(folder))["weight"].tolist() == [1, 1, 1]
    data = next(folder.glob("*.distcp"))
    data.write_bytes(pickle.dumps(Harm()).ljust(data.stat().st_size))
    with pytest.raises(NotReadable, match=r"weight in .*distcp of .* cannot be read"):
        Foreign(str(folder))["weight"]
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(data.name.encode(), b"/" + b"x" * (len(data.name) - 1)))
    with pytest.raises(NotReadable, match="outside of the folder"):
        Foreign(str(folder))
    assert not harm.exists()


def test_a_model_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(1, 2), nn.Linear(2, 1))
    accelerator.save_state(tmp_path / "both")
    with pytest.raises(ValueError, match=r"holds the models .*: name one, model="):
        utils.merge_fsdp_weights(tmp_path / "both", tmp_path / "merged")
    names = list(accelerator._named.of("models"))
    utils.merge_fsdp_weights(tmp_path / "both", tmp_path / "merged", model=names[1])
    found = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert equal(found, dict(second.state_dict())) and first is not second
