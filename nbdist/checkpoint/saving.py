"""save_state: what all ranks agree on around the writing."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
import xxhash

import nbdist
from nbdist import checks, state
from nbdist.checkpoint import contents, generators, manifest, place, unfinished, writing
from nbdist.checkpoint.agreeing import together
from nbdist.checkpoint.progress import Progress
from nbdist.kwargs import ProjectConfiguration
from nbdist.messages import DistributedOperationException

NAME = "save_state"


def snapshot(accelerator: Any, output_dir: Any, hooks: list[Callable[..., Any]]) -> writing.Snapshot:
    """All that this rank needs to write its part, in a folder that is made. A collective.

    Args:
        output_dir: the checkpoint's folder; None: it is named automatically.
        hooks: the user's, called with the models, their weights and the folder.
    """
    me = state.current()
    named = accelerator._named.all()
    configuration: ProjectConfiguration = accelerator.project_configuration
    node = me.rank - me.local_rank if configuration.save_on_each_node else 0

    def ask() -> tuple[int, Any, dict[str, list[str]], tuple[str, int | None], str]:
        asked = target(configuration, output_dir)
        return (
            node,
            output_dir and asked[0],
            {kind: list(ones) for kind, ones in named.items()},
            asked,
            uuid.uuid4().hex[:12],
        )

    told = together(NAME, ask)
    if any(one[2] != told[0][2] for one in told):  # what nobody holds any more may be gone on one, and not on another
        named = accelerator._named.all(surely=True)
        told = together(NAME, ask)
    _refuse_unlike(told)
    group = [rank for rank, one in enumerate(told) if one[0] == node]
    leader = group[0]
    path, number = told[0][3]  # the first rank counts: another machine may see another folder
    token = told[0][4]
    partial = together(NAME, lambda: place.begin(path, token) if me.rank == leader else "")[leader]
    try:
        together(NAME, lambda: _see(partial, leader, me.rank))
        return _captured(accelerator, named, hooks, path, partial, number, me.rank, leader, group, len(told))
    except BaseException:
        if me.rank == leader:
            place.discard(partial)
        raise


def _captured(
    accelerator: Any, named: dict[str, dict[str, Any]], hooks: list[Callable[..., Any]], path: str, partial: str,
    number: int | None, rank: int, leader: int, group: list[int], ranks: int,
) -> writing.Snapshot:  # fmt: skip
    tensors = contents.Tensors()
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    private: set[str] = set()

    def capture() -> tuple[str, dict[str, str]]:
        left_out = _through_hooks(named["models"], hooks, partial) if hooks else frozenset()
        found.update(contents.everything(named, tensors, left_out))
        unfinished.rewind(accelerator, named["loaders"], found["loaders"])
        scaler = accelerator._windows.scaler
        if scaler is not None:
            found["scaler"] = tensors.tree(scaler.state_dict(), "scaler", "the loss scaler")
        found["accelerator"] = {"next": None if number is None else number + 1}
        shared = set(tensors.by_key)
        own["rng"] = tensors.tree(generators.state(), f"rank-{rank}/rng", "a random generator")
        private.update(set(tensors.by_key) - shared)
        shapes = [
            (name, key, str(one.dtype), tuple(one.shape))
            for name, model in found["models"].items()
            for key, storage in model["keys"].items()
            for one in (tensors.by_key[storage],)
        ]
        loaders = {name: _digest(one["state"]) for name, one in found["loaders"].items()}
        return _digest(shapes), loaders

    digests = together(NAME, capture)
    if len({models for models, _ in digests}) > 1:
        told = [rank for rank, (models, _) in enumerate(digests) if models != digests[0][0]]
        raise DistributedOperationException(
            f"save_state: the models of rank{'s' if len(told) > 1 else ''} {', '.join(map(str, told))} have other "
            "parameters than rank 0's: a checkpoint holds one model for all ranks"
        )
    for name, digest in digests[rank][1].items():
        if digest != digests[leader][1][name]:
            own.setdefault("loaders", {})[name] = found["loaders"][name]["state"]
    pieces = writing.plan(tensors.by_key, rank, leader, group, frozenset(private))
    held = manifest.Manifest(
        id=partial.rpartition("-")[2],
        world_size=ranks,
        strategy=accelerator._strategy.name,
        contents=found,
        ranks=[],
        tensors={},
        files={},
        nbdist=nbdist.__version__,
        torch=torch.__version__,
    )
    return writing.Snapshot(path, partial, rank, leader, group, held, own, pieces)


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def _through_hooks(models: dict[str, Any], hooks: list[Callable[..., Any]], folder: str) -> frozenset[str]:
    """Call them; the names of the models whose weights they have taken out of the list: these they save themselves."""
    weights = [model.state_dict() for model in models.values()]
    by_identity = {id(one): name for name, one in zip(models, weights, strict=True)}
    kept = list(weights)
    for hook in hooks:
        hook(list(models.values()), weights, folder)
    left = {id(one) for one in weights}
    return frozenset(by_identity[id(one)] for one in kept if id(one) not in left)


def target(configuration: ProjectConfiguration, output_dir: Any) -> tuple[str, int | None]:
    """The checkpoint's folder, and its number where it is named automatically.

    Raises:
        TypeError: it is no path. ValueError: no folder is named, and there is no automatic naming.
    """
    checks.kind(output_dir, str | os.PathLike | None, "save_state: output_dir", "the path of a folder")
    if configuration.automatic_checkpoint_naming:
        folder = automatic(configuration, NAME)
        if output_dir is not None and place.as_path(output_dir) != folder:
            state.note_once(
                f"save_state: output_dir={os.fspath(output_dir)!r} has no effect: by "
                f"automatic_checkpoint_naming checkpoints go to {folder}"
            )
        number = max(configuration.iteration, place.taken(folder))
        return os.path.join(folder, f"checkpoint_{number}"), number
    if output_dir is None:
        raise ValueError(
            "save_state needs a folder: save_state('my_checkpoint'); or let it name them, by "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
        )
    return place.as_path(output_dir), None


def automatic(configuration: ProjectConfiguration, where: str) -> str:
    """The folder of the automatically named checkpoints."""
    if configuration.project_dir is None:
        raise ValueError(
            f"{where}: automatic_checkpoint_naming needs a project_dir: "
            "ProjectConfiguration(project_dir='my_project', automatic_checkpoint_naming=True)"
        )
    return place.as_path(os.path.join(configuration.project_dir, "checkpoints"))


def _refuse_unlike(told: list[Any]) -> None:
    paths = [one[1] for one in told]
    if len(set(paths)) > 1:
        listed = "; ".join(f"rank {rank} to {path or 'an automatic name'}" for rank, path in enumerate(paths))
        raise DistributedOperationException(
            f"save_state: the ranks save to different places: {listed}. A checkpoint is one folder for all ranks; "
            "nothing was written"
        )
    if any(one[2] != told[0][2] for one in told):
        listed = "; ".join(f"rank {rank}: {_in_words(one[2])}" for rank, one in enumerate(told))
        raise DistributedOperationException(
            f"save_state: the ranks have prepared other things, or in variables of other names: {listed}"
        )


def _in_words(names: dict[str, list[str]]) -> str:
    return ", ".join(f"{kind} {', '.join(ones)}" for kind, ones in names.items() if ones) or "nothing"


def _see(partial: str, leader: int, rank: int) -> None:
    if not os.path.isdir(partial):
        raise OSError(
            f"rank {rank} does not see {partial}, which rank {leader} has made: all ranks must write to one disk. "
            "Name a folder on a shared one; or, where each machine has its own, give "
            "ProjectConfiguration(save_on_each_node=True)"
        )


def write(snapshot: writing.Snapshot) -> None:
    """Write it all. A collective; behind it the checkpoint is there.

    Raises:
        OSError: it could not be written; on the ranks where that is not so a RuntimeError. Nothing is left of it, and
            what had the name before is there.
    """
    try:
        with Progress(NAME, snapshot.bytes, state.current().rank == 0) as progress:
            together(NAME, lambda: writing.write(snapshot, progress))
        together(NAME, lambda: writing.finish(snapshot) if snapshot.leads else None)
    except BaseException:
        if snapshot.leads:
            place.discard(snapshot.partial)
        raise


def limit(folder: str, total: int | None, newest: str) -> None:
    """Delete the oldest automatically named checkpoints, so that so many are left, never the newest, and what killed
    saves have left.
    """
    place.clean_all(folder)
    if total is None:
        return
    there = [path for path in place.numbered(folder).values() if path != newest]
    for path in there[: max(len(there) + 1 - max(total, 1), 0)]:
        place.delete(path, uuid.uuid4().hex[:12])
