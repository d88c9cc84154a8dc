"""A model's weights for others: as one dict, or in files that transformers, Accelerate and safetensors read.

Under a strategy that shards, tensors are gathered one by one: at any time a rank has one whole tensor more than its
shards, and the process that keeps or writes them those that are to be kept, or none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist import checks, messages, state
from nbdist.checkpoint import naming, tensorfiles, weights
from nbdist.checkpoint.tensorfiles import Spec


@dataclass
class Exported:
    """A model's state, before anything of it was gathered.

    Attributes:
        tensors: by name, as the model has them; what is one tensor under several names is there once.
        ties: for each other name of such a tensor the name that it is there under.
        others: what is no tensor, by name.
        names: all names, in the model's order.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def sharded(self) -> bool:
        """Whether parts of it are on other ranks: then all ranks take part."""
        return any(is_sharded(tensor) for tensor in self.tensors.values())


def exported(model: torch.nn.Module, plain: bool = True) -> Exported:
    """The state of a model.

    Args:
        model: without what `prepare` has put around it.
        plain: take the parts of wrappers inside (a compiled block) out of the names.
    """
    wrappers = naming.wrappers_of(model)
    found = {naming.plain(key, wrappers) if plain else key: (key, value) for key, value in model.state_dict().items()}
    known = _identities(model)
    holders: dict[Any, str] = {}
    result = Exported(names=list(found))
    for name, (key, value) in found.items():
        if not isinstance(value, torch.Tensor):
            result.others[name] = value
            continue
        identity = known.get(key) or _memory(value)
        kept = name if identity is None else holders.setdefault(identity, name)
        if kept == name:
            result.tensors[name] = value
        else:
            result.ties[name] = kept
    return result


def _identities(model: torch.nn.Module) -> dict[str, Any]:
    """For each name of a parameter or buffer, whose it is. Of a shard the memory says nothing: it may be empty here."""
    found = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            found[name] = id(tensor) if is_sharded(tensor) else _memory(tensor) or id(tensor)
    return found


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for what is the same memory seen the same way; None: it has none."""
    if is_sharded(tensor) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor: parts of it may be on other ranks."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "device_mesh")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the parts of all ranks. A collective where it is sharded."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    if sharded.device.type != sharded.device_mesh.device_type:  # offloaded to the CPU: it is gathered on the device
        sharded = sharded.to(sharded.device_mesh.device_type)
    return sharded.full_tensor()


# ------------------------------------------------------------------ as a dict


def get_state_dict(model: torch.nn.Module, plain: bool = True, all_ranks: bool = False) -> dict[str, Any]:
    """The state of a model, without what `prepare` has put around it, as `Accelerator.get_state_dict` gives it."""
    given = exported(model, plain)
    keeps = all_ranks or state.current().rank == 0
    if not given.sharded:
        tensors = given.tensors.items()
        values = {name: tensor.detach().to("cpu", copy=True) if keeps else tensor for name, tensor in tensors}
        return _assembled(given, values)
    _agree_on("get_state_dict", given)
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in given.tensors.items():
        full = whole(tensor)
        if keeps:
            gathered[name] = full.cpu()
        del full
    return _assembled(given, gathered) if keeps else {}


def _assembled(given: Exported, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    result = {}
    for name in given.names:
        result[name] = given.others[name] if name in given.others else tensors[given.ties.get(name, name)]
    return result


def _agree_on(operation: str, given: Exported) -> None:
    """All ranks have a model of the same tensors.

    Raises:
        DistributedOperationException: they have not; on every rank.
    """
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in given.tensors.items()]
    everyone = messages.agree(operation, hash_of(mine))
    if len(set(everyone)) > 1:
        theirs = messages.exchange(mine)
        other = next(rank for rank, one in enumerate(theirs) if one != theirs[0])
        differing = next(pair for pair in _longest(theirs[0], theirs[other]) if pair[0] != pair[1])
        raise messages.DistributedOperationException(
            f"{operation}: the ranks have models of other tensors: rank 0 has {_told(differing[0])}, rank {other} "
            f"{_told(differing[1])}. All ranks export the same model"
        )


def hash_of(value: Any) -> str:
    """Equal for what is equal, on any rank."""
    import hashlib

    return hashlib.sha256(repr(value).encode()).hexdigest()


def _longest(one: list[Any], other: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(one), len(other))):
        yield (one[at] if at < len(one) else None), (other[at] if at < len(other) else None)


def _told(entry: Any) -> str:
    return "none" if entry is None else f"{entry[0]} {list(entry[1])} {entry[2].removeprefix('torch.')}"


# ------------------------------------------------------------------ as files


def save_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """The weights of a model, without what `prepare` has put around it, as `Accelerator.save_model` writes them."""
    wants = "the path of a folder"
    path = os.path.realpath(os.fspath(checks.kind(save_directory, str | os.PathLike, "save_directory", wants)))
    limit = weights.bytes_of(max_shard_size, "save_model: max_shard_size")
    kind = weights.SAFE if checks.flag(safe_serialization, "save_model: safe_serialization", True) else weights.PICKLED
    given = exported(model)
    _refuse_what_cannot_be(given, kind)
    weights.refuse_a_file(path)
    me = state.current()
    writes = (me.local_rank if save_on_each_node else me.rank) == 0
    plan = weights.plan({name: Spec.of(tensor) for name, tensor in given.tensors.items()}, given.ties, limit, kind)
    if not given.sharded:
        # Whole on each rank: no collective, so that it may stand behind `if accelerator.is_main_process:`.
        if writes:
            with weights.Folder(path, plan) as folder:
                weights.write(folder, lambda name: given.tensors[name].detach(), given.others)
                weights.note_other(folder.commit(), path, kind)
        return
    _agree_on("save_model", given)
    _written_together(_Writing(path, plan, given) if writes else None, plan, given, path)


class _Writing:
    """The folder on a rank that writes, and the first thing that went wrong: what other ranks wait in goes on."""

    def __init__(self, path: str, plan: weights.Plan, given: Exported) -> None:
        self.path, self.given = path, given
        self.error: Exception | None = None
        self._plan = plan
        self._folder: weights.Folder | None = None
        self._file: weights.File | None = None

    def do(self, step: Callable[..., Any], *values: Any) -> None:
        if self.error is None:
            try:
                step(*values)
            except Exception as error:
                self.error = error
                try:
                    self.leave(error)  # now: when the others hear of it, nothing is left of it
                except OSError as named:  # the same, with the folder's name
                    self.error = named

    def open(self) -> None:
        self._folder = weights.Folder(self.path, self._plan)

    def begin(self, name: str) -> None:
        assert self._folder is not None
        self._file = self._folder.file(name).__enter__()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        assert self._file is not None
        self._file.put(name, tensor)

    def end(self, name: str) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        if name == list(self._plan.files)[-1]:
            file.put_other(self.given.others)
        file.__exit__(None, None, None)

    def commit(self) -> None:
        assert self._folder is not None
        weights.note_other(self._folder.commit(), self.path, self._plan.kind)

    def leave(self, error: BaseException | None) -> None:
        """Close what is open; what was not committed is gone.

        Raises:
            OSError: the error, if it is one, with the folder's name.
        """
        file, folder, self._file, self._folder = self._file, self._folder, None, None
        if file is not None:
            file.close()
        if folder is not None:
            folder.__exit__(type(error) if error else None, error, None)


def _written_together(writing: _Writing | None, plan: weights.Plan, given: Exported, path: str) -> None:
    """All ranks gather tensor after tensor, in the order in which they are written; some write.

    Raises:
        what went wrong on a rank; on the others the same in words. All ranks leave together.
    """
    error: BaseException | None = None
    try:
        if writing is not None:
            writing.do(writing.open)
        error = _settled(writing, path)
        for name, specs in plan.files.items():
            if error is not None:
                break
            if writing is not None:
                writing.do(writing.begin, name)
            for one in weights.order(specs, plan.kind):
                full = whole(given.tensors[one])
                if writing is not None:
                    writing.do(writing.put, one, full)
                del full
            if writing is not None:
                writing.do(writing.end, name)
            error = _settled(writing, path)
        if error is None:
            if writing is not None:
                writing.do(writing.commit)
            error = _settled(writing, path)
    except BaseException as interrupted:
        error = interrupted
    if writing is not None:
        writing.leave(error)
    if error is not None:
        raise error


def _settled(writing: _Writing | None, path: str) -> Exception | None:
    """What to raise on this rank after a file; None: all went well on all ranks."""
    mine = writing.error if writing is not None else None
    told = messages.agree("save_model", None if mine is None else f"{type(mine).__name__}: {mine}")
    if mine is not None:
        return mine
    bad = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
    return None if bad is None else messages.echo(f"save_model to {path} failed on rank {bad[0]}: {bad[1]}")


def _refuse_what_cannot_be(given: Exported, kind: weights.Kind) -> None:
    bad = {}
    for name, tensor in given.tensors.items():
        if tensor.is_meta:
            bad[name] = "it is on the device meta and has no values"
        elif kind.safe and not is_sharded(tensor):
            why = "the name is taken by the format" if name == "__metadata__" else tensorfiles.obstacle(tensor)
            if why is not None:
                bad[name] = why
        elif kind.safe and tensor.dtype not in tensorfiles.NAMES:
            bad[name] = f"the format has no dtype {tensor.dtype}"
    if kind.safe:
        bad |= {name: f"it is {checks.short(value)} and no tensor" for name, value in given.others.items()}
    if not bad:
        return
    told = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:5])
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    if any(tensor.is_meta for tensor in given.tensors.values()):
        raise ValueError(f"save_model: there is nothing to save in {told}{more}. Load the model first")
    raise ValueError(f"save_model: safetensors cannot hold {told}{more}. safe_serialization=False saves them")
