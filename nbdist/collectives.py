"""gather, reduce, broadcast and pad over nested values: any shapes, any nesting, objects too.

Each call first exchanges what every rank brings (see `nbdist.bringing`). Then the data travel as bytes: no dtype is
ever converted.

A nested value is tuples (named ones too), lists and dicts, with at their ends
* tensors: joined along dim 0, whatever their lengths; 0-dim ones become one entry a rank;
* numbers: become a tensor with one entry a rank;
* lists without a tensor in them: joined;
* None: stays, when it is None everywhere;
* other objects: become a list with one entry a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbdist import checks, messages, state
from nbdist.bringing import listed, meet, place_of
from nbdist.ends import Leaf, leaves, name_of, number_dtype, rebuilt
from nbdist.messages import DistributedOperationException

_ALIGNED = 16  # bytes: a slice that starts there can be viewed as any dtype


def _tensors_of_all(mine: list[torch.Tensor], shapes: list[list[tuple[int, ...]]]) -> list[list[torch.Tensor]]:
    """Every rank's tensors (outer index: rank), with one collective for each kind of device."""
    everyone: list[list[Any]] = [[None] * len(mine) for _ in shapes]
    by_device: dict[Any, list[int]] = {}
    for index, tensor in enumerate(mine):
        by_device.setdefault(tensor.device, []).append(index)
    for device, indices in by_device.items():
        places = []  # by rank: where each tensor starts, and the length of the whole
        for theirs in shapes:
            at, starts = 0, []
            for index in indices:
                starts.append(at)
                at += -(-_numel(theirs[index]) * mine[index].element_size() // _ALIGNED) * _ALIGNED
            places.append((starts, at))
        length = max(total for _, total in places)
        own = torch.empty(length, dtype=torch.uint8, device=device)
        for index, start in zip(indices, places[state.current().rank][0], strict=True):
            flat = _bytes(mine[index].detach().resolve_conj().resolve_neg().contiguous())
            own[start : start + flat.numel()] = flat
        out = torch.empty(length * len(shapes), dtype=torch.uint8, device=device)
        if length:
            with messages.waiting():
                messages.all_gather(out, own)
        for rank, (starts, _) in enumerate(places):
            for index, start in zip(indices, starts, strict=True):
                size = _numel(shapes[rank][index]) * mine[index].element_size()
                piece = out[rank * length + start : rank * length + start + size]
                everyone[rank][index] = piece.view(mine[index].dtype).reshape(shapes[rank][index])
    return everyone


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory. Of one element any stride counts as contiguous, and cannot be viewed as bytes."""
    flat = tensor.reshape(-1)
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def gather(tensor: Any, copies: int = 1) -> Any:
    """The values of all ranks, joined, on every rank; lengths may differ (see the top of this module for what joins
    how).

    Args:
        tensor: a nested value.
        copies: so many ranks in a row have the same, of which the first one's counts.

    Raises:
        DistributedOperationException (a ValueError): the ranks' values differ in structure, dtype, number of
            dimensions or a size other than the first; on every rank, naming the ranks.
    """
    ends = list(leaves(tensor))
    carried = [end.value for end in ends if end.role in ("number", "list", "object")]
    answers = meet("gather", ends, carried)
    where = [index for index, end in enumerate(ends) if end.role == "tensor"]
    shapes = [[theirs[index] for index in where] for theirs, _ in answers]
    kinds = [(end.path, end.kind) for end in ends]
    for column, index in enumerate(where):
        if len({shape[column][1:] for shape in shapes}) > 1:
            told = "; ".join(f"rank {rank} has {shape[column]}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(
                f"gather: {place_of(ends[index].path)}shapes may differ in the first dimension only: {told}. "
                "pad_across_processes(value, dim=...) makes the others equal."
                + listed([(kinds, its, None) for its, _ in answers])
            )
    mine = [ends[index].value.detach() for index in where]
    everyone = _tensors_of_all(mine, shapes) if len(answers) > 1 else [mine]
    tensors = zip(*everyone[::copies], strict=True)  # for each tensor, every rank's
    objects = zip(*(theirs for _, theirs in answers[::copies]), strict=True)
    return rebuilt(tensor, (_joined(end, tensors, objects) for end in ends))


def _joined(end: Leaf, tensors: Iterator[tuple[torch.Tensor, ...]], objects: Iterator[tuple[Any, ...]]) -> Any:
    """What all ranks have at this end, as one value."""
    if end.role == "tensor":
        pieces = next(tensors)
        if not end.value.dim():
            return torch.stack(pieces)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if end.role == "number":
        return torch.tensor(next(objects), dtype=number_dtype(end.value))
    if end.role == "list":
        return [item for value in next(objects) for item in value]
    return list(next(objects)) if end.role == "object" else end.value


def gather_object(object: Any, copies: int = 1) -> list[Any]:
    """Every rank's picklable object, by rank; lists are joined: [0] and [1, 2] give [0, 1, 2]. `copies` as for
    `gather`.
    """
    state.current()
    values = messages.agree("gather_object", object)[::copies]
    lists = [isinstance(value, list) for value in values]
    if all(lists):
        return [item for value in values for item in value]
    if any(lists):
        told = "; ".join(f"rank {rank} brings a {type(value).__name__}" for rank, value in enumerate(values))
        raise DistributedOperationException(
            f"gather_object: either every rank brings a list (they are joined) or none does: {told}"
        )
    return values


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, copies: int = 1) -> Any:
    """Sum, mean, max or min of nested tensors (and numbers) over the ranks, as new tensors of the same dtype.

    Half precision is added up in float32 and rounded once. Numbers become 0-dim tensors.

    Args:
        tensor: a nested value; its tensors have the same shapes on all ranks.
        reduction: "mean", "sum", "max", "min"; "none" only scales.
        scale: what the result is multiplied by.
        copies: so many ranks in a row have the same, of which the first one's counts.

    Raises:
        ValueError: an unknown reduction. DistributedOperationException (a ValueError): the ranks' values differ in
            structure, dtype or shape; on every rank.
        TypeError: the result would not be of the tensor's dtype (a mean of integers, a sum of bools), or an end is
            no number.
    """
    if not isinstance(scale, int | float | complex) and getattr(scale, "shape", None) != ():
        raise checks.wrong("reduce: scale", scale, "one number")
    if reduction not in ("mean", "sum", "max", "min", "none"):
        raise ValueError(f"reduction is {checks.short(reduction)}; there are 'mean', 'sum', 'max', 'min' and 'none'")
    ends = list(leaves(tensor))
    answers = meet(f"reduce({reduction})", ends, [], same_shape=True)
    results: list[Any] = []
    for end in ends:
        if end.role in ("tensor", "number"):
            number = end.role == "number"
            value = torch.tensor(end.value, dtype=number_dtype(end.value)) if number else end.value.detach()
            results.append(_reduced(value, reduction, scale, len(answers), copies, end.path))
        elif end.role == "structure":
            results.append(end.value)
        else:
            raise TypeError(f"reduce: {place_of(end.path)}there is {end.kind}; only tensors and numbers can be reduced")
    return rebuilt(tensor, iter(results))


def _reduced(value: torch.Tensor, reduction: str, scale: float, ranks: int, copies: int, path: str) -> torch.Tensor:
    dtype, exact = value.dtype, value.is_floating_point() or value.is_complex()
    if not exact and (reduction == "mean" or scale != 1.0 or (dtype is torch.bool and reduction == "sum")):
        what = f"the {reduction} of" if scale == 1.0 else f"a scale of {scale} on"
        raise TypeError(
            f"reduce: {place_of(path)}{what} a {name_of(dtype)} tensor is not {name_of(dtype)}; convert it first "
            "(.float())"
        )
    work = value.clone(memory_format=torch.contiguous_format)
    if dtype is torch.bool:
        work = work.to(torch.uint8)
    elif dtype in (torch.float16, torch.bfloat16) and reduction in ("sum", "mean"):
        work = work.float()
    if ranks > 1 and reduction != "none":
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduction, dist.ReduceOp.SUM)
        if work.device.type == "cpu" and messages.message_device().type != "cpu":
            raise RuntimeError("the process group has no backend for CPU tensors; move the value to the device first")
        if copies > 1 and reduction in ("sum", "mean") and state.current().rank % copies:
            work.zero_()
        with messages.waiting():
            dist.all_reduce(work, op=operation)
    factor = scale * copies / ranks if reduction == "mean" else scale
    return (work * factor if factor != 1.0 else work).to(dtype)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The nested value of one rank, on every rank. Tensors of the same shape are filled in place; others come as new
    ones.

    Raises:
        DistributedOperationException (a ValueError): the ranks' values differ in structure or dtype; on every rank,
            naming the ranks. ValueError: there is no such process.
    """
    ends = list(leaves(tensor))
    rank = state.current().rank
    _exists(from_process, "broadcast")
    carrying = rank == from_process
    carried = [end.value for end in ends if carrying and end.role in ("number", "list", "object")]
    answers = meet(f"broadcast(from {from_process})", ends, carried)
    if len(answers) == 1:
        return tensor
    shapes, values = answers[from_process]
    objects, results = iter(values), []
    for index, end in enumerate(ends):
        if isinstance(end.value, torch.Tensor):
            target = end.value.detach()
            whole = target.is_contiguous() and tuple(target.shape) == shapes[index]
            data = target if whole else torch.empty(shapes[index], dtype=target.dtype, device=target.device)
            if rank == from_process and not whole:
                data.copy_(target)
            if data.numel():
                with messages.waiting():
                    dist.broadcast(_bytes(data), src=from_process)
            if not whole and tuple(target.shape) == shapes[index]:
                target.copy_(data)
            results.append(end.value if tuple(target.shape) == shapes[index] else data)
        elif end.role in ("number", "list", "object"):
            results.append(next(objects))
        else:
            results.append(end.value)
    return rebuilt(tensor, iter(results))


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill the list, in place, with the picklable objects of one rank's list; returns it.

    Raises:
        TypeError: it is no list; or an object of that list cannot be pickled, or not be unpickled on another rank; on
            every rank. ValueError: there is no such process.
    """
    checks.kind(object_list, list, "broadcast_object_list: object_list", "a list, which is filled in place")
    state.current()
    _exists(from_process, "broadcast_object_list")
    mine = messages.pack(object_list) if state.current().rank == from_process else b""
    sent = messages.agree(f"broadcast_object_list(from {from_process})", len(mine))
    if len(sent) == 1:
        return object_list
    device = messages.message_device()
    if state.current().rank == from_process:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    else:
        data = torch.empty(sent[from_process], dtype=torch.uint8, device=device)
    with messages.waiting():
        dist.broadcast(data, src=from_process)
    object_list[:] = messages.unpack(data.cpu().numpy().tobytes(), from_process)
    return object_list


def _exists(process: int, operation: str) -> None:
    checks.process(process, f"{operation}: from_process", messages.ranks())


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Each tensor of the nested value, padded along `dim` to the largest size that a rank has there.

    Args:
        tensor: a nested value; ends that are no tensors, and tensors without that dimension, stay as they are.
        dim: the dimension, counted from the end when negative.
        pad_index: the value that is filled in.
        pad_first: fill in before the data and not behind.
    """
    dim = checks.whole(dim, "pad_across_processes: dim", "the number of a dimension")
    if not isinstance(pad_index, bool | int | float | complex) and getattr(pad_index, "shape", None) != ():
        raise checks.wrong("pad_across_processes: pad_index", pad_index, "one number")
    pad_first = checks.flag(pad_first, "pad_across_processes: pad_first")
    ends = list(leaves(tensor))
    answers = meet("pad_across_processes", ends, [])
    results: list[Any] = []
    for index, end in enumerate(ends):
        value = end.value
        if isinstance(value, torch.Tensor) and -value.dim() <= dim < value.dim():
            largest = max(shapes[index][dim] for shapes, _ in answers)
            size = value.shape[dim]
            if largest > size:
                padded = value.new_full(
                    (*value.shape[: dim % value.dim()], largest, *value.shape[dim % value.dim() + 1 :]), pad_index
                )
                padded.narrow(dim, largest - size if pad_first else 0, size).copy_(value.detach())
                value = padded
        results.append(value)
    return rebuilt(tensor, iter(results))
