"""load_state: what all ranks agree on around the reading. Nothing is changed before each has all of it, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist import checks, state
from nbdist.checkpoint import applying, contents, fitting, generators, manifest, naming, place, reading, saving, tree
from nbdist.checkpoint.agreeing import together
from nbdist.checkpoint.blocks import Files
from nbdist.checkpoint.manifest import BadCheckpoint, Manifest
from nbdist.checkpoint.progress import Progress
from nbdist.kwargs import ProjectConfiguration
from nbdist.messages import DistributedOperationException

NAME = "load_state"


@dataclass
class Loaded:
    """What `load_state` has loaded.

    Attributes:
        path: the checkpoint.
        names: by kind ("models", "optimizers" ...), what was loaded.
        left_out: what does not fit, in words; only with strict=False.
        ranks: how many ranks had saved it.
        bytes: how much this rank has read.
    """

    path: str
    names: dict[str, list[str]]
    left_out: list[str] = field(default_factory=list)
    ranks: int = 1
    bytes: int = 0

    def __repr__(self) -> str:
        told = ", ".join(
            f"{naming.SINGULAR.get(kind, kind)}{'s' if len(ones) > 1 else ''} {', '.join(ones)}"
            for kind, ones in self.names.items()
            if ones
        )
        text = f"Loaded {self.path} (saved by {self.ranks} rank{'s' if self.ranks > 1 else ''}): {told or 'nothing'}"
        return text + "".join(f"\n  left out: {one}" for one in self.left_out)


def load(
    accelerator: Any,
    input_dir: Any,
    strict: bool,
    names: Mapping[str, str],
    hooks: list[Callable[..., Any]],
) -> Loaded:
    """See `Checkpoints.load_state`. A collective."""
    me = state.current()
    named = accelerator._named.all()
    path = _agreed_path(accelerator.project_configuration, input_dir)
    held = _agreed_manifest(path)
    hooked = frozenset(held.contents["hooked"]) & set(named["models"]) if hooks else frozenset()

    def compare() -> fitting.Fit:
        fit = fitting.fit(held, named, strict, names, hooked)
        if fit.problems:  # of what nobody holds any more?
            named.update(accelerator._named.all(surely=True))
            fit = fitting.fit(held, named, strict, names, hooked)
        _scalers(accelerator, held, fit, strict)
        if fit.problems:
            raise ValueError(
                f"load_state: {path} does not fit what is prepared here; nothing was changed.\n  "
                + "\n  ".join(fit.problems)
                + (f"\nstrict=False loads what both have{fit.hint}" if strict else "")
            )
        return fit

    fits: list[fitting.Fit] = []
    together(NAME, lambda: fits.append(compare()))
    fit = fits[0]
    for key in (*applying.keys_of_small(held, fit, me.rank), *_keys_of_rest(held, me.rank)):
        fit.wanted[key] = None
    tensors: dict[str, torch.Tensor] = {}

    def fetch() -> None:
        total = sum(_bytes(held, key, like) for key, like in fit.wanted.items())
        with Files(path) as files, Progress(NAME, total, me.rank == 0) as progress:
            files.check((name, one["bytes"]) for name, one in held.files.items())
            tensors.update(reading.read(files, held, fit.wanted, progress))
        _try_small(held, fit, tensors, me.rank)

    together(NAME, fetch)
    skipped: frozenset[str] = frozenset()
    if hooks:
        result: list[frozenset[str]] = []
        together(NAME, lambda: result.append(_through_hooks(named["models"], hooks, path)))
        skipped = result[0]
        if hooked - skipped:
            raise RuntimeError(
                f"load_state: the model {', '.join(sorted(hooked - skipped))} was saved by a hook, and no hook has "
                "loaded it: a load_state_pre_hook loads it and takes it out of its list of models"
            )
    together(NAME, lambda: _apply(accelerator, held, fit, named, tensors, me.rank, skipped))
    loaded = {kind: [name for name in pairs if name not in skipped] for kind, pairs in fit.pairs.items()}
    read = sum(contents.local(one).nbytes for one in tensors.values())
    return Loaded(path, loaded, fit.notes, held.world_size, read)


def _apply(
    accelerator: Any, held: Manifest, fit: fitting.Fit, named: dict[str, dict[str, Any]],
    tensors: dict[str, torch.Tensor], rank: int, skipped: frozenset[str],
) -> None:  # fmt: skip
    for window in list(accelerator._windows.made.values()):
        window.abandon("")  # what it has gathered is of another state
    applying.apply(held, fit, named, tensors, rank, skipped)
    scaler = accelerator._windows.scaler
    if scaler is not None and "scaler" in held.contents:
        scaler.load_state_dict(tree.decode(held.contents["scaler"], tensors.__getitem__))
    following = held.contents["accelerator"]["next"]
    if following is not None:
        accelerator.project_configuration.iteration = following
    generators.restore(applying.generators_of(held, tensors, rank))


def _bytes(held: Manifest, key: str, like: DTensor | None) -> int:
    if like is not None:
        return like.to_local().numel() * like.element_size()
    tensor = held.tensors.get(key)
    return 0 if tensor is None else math.prod(tensor.shape) * tree.dtype(tensor.dtype).itemsize


def _keys_of_rest(held: Manifest, rank: int) -> list[str]:
    own = applying.of_rank(held, rank)
    ranks = [own] if own is not None else [one for one in held.ranks if one]
    return tree.keys([*(one["rng"] for one in ranks), held.contents.get("scaler")])


def _try_small(held: Manifest, fit: fitting.Fit, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Everything that is no tensor can be made again: found out before anything is changed."""
    for kind in ("schedulers", "loaders", "objects"):
        for other in fit.pairs[kind].values():
            applying.small(held, kind, other, tensors, rank)


def _scalers(accelerator: Any, held: Manifest, fit: fitting.Fit, strict: bool) -> None:
    here = accelerator._windows.scaler is not None
    if here != ("scaler" in held.contents):
        told = "the loss scaler of fp16 is not in the checkpoint" if here else (
            "the checkpoint has a loss scaler (it was trained with mixed_precision='fp16'), and here is none"
        )  # fmt: skip
        (fit.problems if strict else fit.notes).append(told)


def _through_hooks(models: dict[str, Any], hooks: list[Callable[..., Any]], folder: str) -> frozenset[str]:
    """Call them; the names of the models that they have taken out of the list: these they load themselves."""
    given = list(models.values())
    for hook in hooks:
        hook(given, folder)
    left = {id(one) for one in given}
    return frozenset(name for name, one in models.items() if id(one) not in left)


def _agreed_path(configuration: ProjectConfiguration, input_dir: Any) -> str:
    def ask() -> str:
        return source(configuration, input_dir)

    paths = together(NAME, ask)
    if input_dir is not None or configuration.save_on_each_node:
        if len({os.path.basename(path) for path in paths}) > 1 or (
            len(set(paths)) > 1 and not configuration.save_on_each_node
        ):
            listed = "; ".join(f"rank {rank} from {path}" for rank, path in enumerate(paths))
            raise DistributedOperationException(
                f"load_state: the ranks load from different places: {listed}. Nothing was changed"
            )
        return paths[state.current().rank]
    return paths[0]


def source(configuration: ProjectConfiguration, input_dir: Any) -> str:
    """The folder of the checkpoint that is to be loaded.

    Raises:
        TypeError: it is no path. ValueError: there is none.
    """
    checks.kind(input_dir, str | os.PathLike | None, "load_state: input_dir", "the path of a checkpoint's folder")
    if input_dir is None:
        if not configuration.automatic_checkpoint_naming:
            raise ValueError(
                "load_state needs the folder of a checkpoint: load_state('my_checkpoint'). Without one it takes the "
                "latest, where ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) names them"
            )
        folder = saving.automatic(configuration, NAME)
        there = place.numbered(folder)
        if not there:
            raise ValueError(f"load_state: there is no checkpoint in {folder} yet")
        return there[max(there)]
    path = place.as_path(input_dir)
    found = place.found(path)
    if found is None:
        if not os.path.exists(path):
            raise ValueError(f"load_state: {path} does not exist")
        raise BadCheckpoint(f"load_state: {path} is no checkpoint: it has no {manifest.NAME}")
    return found


def _agreed_manifest(path: str) -> Manifest:
    held: list[Manifest] = []

    def look() -> str:
        held.append(manifest.read(path))
        return held[0].id

    ids = together(NAME, look)
    if len(set(ids)) > 1:
        listed = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(ids))
        raise DistributedOperationException(
            f"load_state: the ranks see different checkpoints in {path} (by id: {listed}); nothing was changed"
        )
    return held[0]
