"""The weights of a checkpoint that many ranks have written, as one file: without those ranks, and tensor by tensor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist import checks, state
from nbdist.checkpoint import foreign, manifest, reading, tree, weights
from nbdist.checkpoint.blocks import Files
from nbdist.checkpoint.manifest import BadCheckpoint
from nbdist.checkpoint.tensorfiles import NAMES, Spec


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    model: str | None = None,
) -> None:
    """The weights of a checkpoint in one file, as `Accelerator.save_model` writes them. Any process can do it, on any
    number of ranks and on any machine; on several ranks the main process does. It needs memory for one tensor.

    Args:
        checkpoint_dir: what `save_state` has written, under any strategy; or a folder of torch.distributed.checkpoint,
            such as `pytorch_model_fsdp_0` of Accelerate.
        output_path: the folder that gets `model.safetensors`; it is made. Other files in it stay.
        safe_serialization: False: `pytorch_model.bin`, with `torch.save`; it needs memory for all of them.
        remove_checkpoint_dir: delete the checkpoint when the file is there.
        model: whose weights, by name, where the checkpoint has several models.

    Raises:
        ValueError: it is no such folder, or damaged, or has no model of that name. OSError: the file cannot be written.
            Nothing is written or removed then.
    """
    wants = "the path of a folder"
    for value, where in ((checkpoint_dir, "checkpoint_dir"), (output_path, "output_path")):
        checks.kind(value, str | os.PathLike, f"merge_fsdp_weights: {where}", wants)
    checks.kind(model, str | None, "merge_fsdp_weights: model", "the name of a model in the checkpoint")
    safe = checks.flag(safe_serialization, "merge_fsdp_weights: safe_serialization", True)
    remove = checks.flag(remove_checkpoint_dir, "merge_fsdp_weights: remove_checkpoint_dir")
    source, target = os.path.realpath(os.fspath(checkpoint_dir)), os.path.realpath(os.fspath(output_path))
    if remove and os.path.commonpath([source, target]) == source:
        raise ValueError(f"output_path {target} is inside of the checkpoint, which remove_checkpoint_dir would delete")
    if state.current().rank == 0:
        _merge(source, target, weights.SAFE if safe else weights.PICKLED, model)
        if remove:
            shutil.rmtree(source)


@dataclass
class _Source:
    """Where tensors come from."""

    specs: dict[str, Spec]
    tensor_of: Callable[[str], torch.Tensor]
    ties: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def _merge(source: str, target: str, kind: weights.Kind, model: str | None) -> None:
    with ExitStack() as open_files:
        found = _opened(source, model, open_files)
        bad = [name for name, spec in found.specs.items() if kind.safe and spec.dtype not in NAMES]
        if bad:
            raise ValueError(
                f"{source} has tensors of a dtype that safetensors cannot hold: {', '.join(bad[:5])}. "
                "safe_serialization=False writes them"
            )
        left_out = [*found.left_out, *(found.others if kind.safe else ())]
        if left_out:
            state.note_once(f"{source}: what is no tensor is left out: {', '.join(left_out[:5])}")
        plan = weights.plan(found.specs, found.ties, 1 << 62, kind)
        with weights.Folder(target, plan) as folder:
            weights.write(folder, found.tensor_of, None if kind.safe else found.others)
            weights.note_other(folder.commit(), target, kind)


def _opened(source: str, model: str | None, open_files: ExitStack) -> _Source:
    if os.path.isfile(os.path.join(source, manifest.NAME)):
        return _ours(source, model, open_files)
    if os.path.isfile(os.path.join(source, foreign.METADATA)):
        theirs = foreign.Foreign(source)
        specs = {name: Spec(theirs.dtypes[name], theirs.shapes[name]) for name in theirs}
        return _Source(specs, theirs.__getitem__, left_out=theirs.others)
    inside = sorted(
        entry.name
        for entry in (os.scandir(source) if os.path.isdir(source) else ())
        if entry.is_dir()
        and any(os.path.isfile(os.path.join(entry, name)) for name in (manifest.NAME, foreign.METADATA))
    )
    hint = f" There are some in it: {', '.join(inside)}" if inside else ""
    what = "is no folder" if not os.path.isdir(source) else "holds no checkpoint"
    raise BadCheckpoint(f"{source} {what}: it has neither {manifest.NAME} nor {foreign.METADATA}.{hint}")


def _ours(source: str, model: str | None, open_files: ExitStack) -> _Source:
    held = manifest.read(source)
    models = held.contents["models"]
    if not models:
        raise BadCheckpoint(f"{source} holds no model")
    if (model is None and len(models) > 1) or (model is not None and model not in models):
        asked = "" if model is None else f" and none called {model!r}"
        raise BadCheckpoint(
            f"{source} holds the models {', '.join(models)}{asked}: name one, model={next(iter(models))!r}"
        )
    entry = models[next(iter(models)) if model is None else model]
    files = open_files.enter_context(Files(source))
    files.check((name, one["bytes"]) for name, one in held.files.items())
    keys: dict[str, str] = entry["keys"]
    first: dict[str, str] = {}
    for name, key in keys.items():
        first.setdefault(key, name)
    specs = {
        name: Spec(tree.dtype(held.tensors[key].dtype), tuple(held.tensors[key].shape)) for key, name in first.items()
    }
    ties = {name: first[key] for name, key in keys.items() if first[key] != name}

    def tensor_of(name: str) -> torch.Tensor:
        return reading.read(files, held, {keys[name]: None})[keys[name]]

    return _Source(specs, tensor_of, ties)
