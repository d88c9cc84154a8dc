"""What of a rank's a run has reached that is spread over the ranks, and bringing it together."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

from nbdist.shipping.lazy import torch_if_loaded
from nbdist.shipping.spread import (
    NOT_GATHERED,
    TENSOR,
    Image,
    SpreadKind,
    image_of,
    is_parameter,
    is_spread,
    local_digest,
)
from nbdist.shipping.table import Table, Token
from nbdist.shipping.walk import LATE, Walked
from nbdist.system import give_memory_back

_MUCH = 64 << 20  # bytes of wholes in this process's heap, which keeps what is freed in it
RANK_LOST = "a rank has ended"


class Unforeseen(Exception):
    """The first tensor of a rank's that is spread over the ranks: `Away.reach` is to be asked again."""


@dataclass
class Reached:
    """What of this rank's a run has reached, in an order that is the same on every rank.

    Attributes:
        values: the tensors.
        changed: of each whether its part is another one than the notebook knows of.
        tokens: of each; None for one that is not known.
        signature: equal on ranks that have alike tensors in the same places.
        looked: a run's end was looked at.
        left: what the notebook does not get although it has changed, by its place, and why.
    """

    values: list[Any] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    signature: int = 0
    looked: bool = False
    left: dict[int, str] = field(default_factory=dict)

    def notes(self, handles: Container[str]) -> list[str]:
        """One line for each reason why something is left; what became a handle says it itself."""
        names: dict[str, dict[str, None]] = {}
        for place, reason in self.left.items():
            if self.groups[place] not in handles:
                names.setdefault(reason, {})[self.groups[place].replace("\0out", "the cell's value")] = None
        return [
            f"{', '.join(found)}: in the notebook, what is spread over the ranks is as it was before ({reason})"
            + (f". `%distributed pull {next(iter(found))}` brings it" if reason != RANK_LOST else "")
            for reason, found in names.items()
        ]

    def stay(self, which: Iterable[int], reason: str) -> None:
        """These are left, and why."""
        for place in which:
            self.left[place] = image_of(self.values[place]).reason = reason

    def expected(self, walked: Walked) -> None:
        """Raises Unforeseen when a walk meets what is spread, and it was not asked for before."""
        if not self.looked and any(isinstance(node.kind, SpreadKind) for node in walked.nodes.values()):
            raise Unforeseen

    def report(self) -> dict[str, Any]:
        """What the notebook is told."""
        return {
            "signature": self.signature,
            "changed": self.changed,
            "groups": self.groups,
            "tokens": self.tokens,
            "sizes": [value.numel() * value.element_size() for value in self.values],
            "parameters": [is_parameter(value) for value in self.values],
        }


def reached(walked: Walked, tokens: dict[int, Any], known: dict[Any, Any] | None) -> Reached:
    """What a walk met.

    Args:
        tokens: by id.
        known: snapshots by token, on a rank that leads; None on others, which do not pack.
    """
    found, facts = Reached(looked=True), []
    for key, node in walked.nodes.items():
        value = node.value
        if not isinstance(node.kind, SpreadKind):
            continue
        group = walked.places[key][0] if key in walked.places else LATE
        if LATE in group or value.device_mesh.get_coordinate() is None:
            continue  # other ranks may meet it elsewhere, or not at all
        token = tokens.get(key)
        image = image_of(value)
        changed = image.local is None or image.local != local_digest(value)
        if known is not None and not changed:
            snapshot = known.get(token)
            changed = token is None or (snapshot is not None and snapshot[1][4:5] != (image.digest,))
        found.values.append(value)
        found.changed.append(changed)
        found.groups.append(group)
        found.tokens.append(token)
        facts.append((group, tuple(value.shape), str(value.dtype), str(value.placements)))
    found.signature = xxhash.xxh3_64_intdigest(repr(facts).encode())
    return found


def gather(values: Sequence[Any], keep: bool) -> None:
    """Bring wholes together, one after the other; every rank must do so with the same tensors. All, or, where it does
    not go to its end, none.

    Args:
        keep: here they are wanted; elsewhere each is let go at once.
    """
    before: list[tuple[Image, Any, Any]] = []
    try:
        for value in values:
            image = image_of(value)
            before.append((image, image.local, image.digest))
            _gather(value, image, keep)
    except BaseException:
        for image, local, digest in before:
            image.local, image.digest, image.whole = local, digest, None
        raise


def _gather(value: Any, image: Image, keep: bool) -> None:
    torch: Any = torch_if_loaded()
    local = local_digest(value)
    with torch.no_grad(), _without_advice():
        whole = value.detach().full_tensor()
    image.local = local
    image.digest = None
    if keep:
        whole = whole.cpu().contiguous()
        image.digest = TENSOR.digest(whole)
        image.whole = whole


@contextmanager
def _without_advice() -> Iterator[None]:
    """torch tells, at length and on each rank, that parts of a mesh of two dimensions are gathered in two steps."""
    log = logging.getLogger("torch.distributed.tensor")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def let_go(values: Iterable[Any]) -> None:
    """The wholes have been packed."""
    freed = 0
    for value in values:
        image = image_of(value)
        if image.whole is not None:
            freed += image.whole.numel() * image.whole.element_size()
        image.whole, image.reason = None, NOT_GATHERED
    if freed >= _MUCH:
        give_memory_back()


def stand_for(table: Table) -> list[tuple[Token, str, Token]]:
    """Where the user, and no strategy, has put tensors that are spread in the place of a module's known ones: (the
    module, the name, the token of what was there). For the lead rank, which knows what was there.
    """
    torch: Any = torch_if_loaded()
    found = []
    for token, module in list(table.objects.items()):
        if not isinstance(module, torch.nn.Module):
            continue
        for part in (module._parameters, module._buffers):
            new = {name: one for name, one in part.items() if is_spread(one) and id(one) not in table.tokens}
            snapshot = table.snapshots.get(table.tokens.get(id(part))) if new else None
            if snapshot is None:
                continue
            references, count = snapshot[2], len(snapshot[2]) // 2
            before = dict(zip(references[:count], references[count:], strict=False))
            for name, one in new.items():
                old: Any = before.get(name)
                known = table.tokens.get(id(old)) if isinstance(old, torch.Tensor) else None
                if known is not None and old.shape == one.shape and old.dtype == one.dtype:
                    found.append((token, name, known))
    return found


def take_the_places(table: Table, values: Sequence[Any], tokens: Sequence[Token]) -> None:
    """Tensors that this rank has made anew (the lead rank alone had the weights, say) stand for the notebook's, which
    they are the parts of: what is changed there reaches them.
    """
    pairs = [
        (table.objects[token], value)
        for value, token in zip(values, tokens, strict=False)
        if token in table.objects and id(value) not in table.tokens
    ]
    table.replace(pairs)


def adopt(table: Table, replaced: Iterable[tuple[Token, str, Token]]) -> None:
    """Have those tensors stand for what they have replaced."""
    pairs: dict[Token, tuple[Any, Any]] = {}
    for token, name, known in replaced:
        module, old = table.objects.get(token), table.objects.get(known)
        new = getattr(module, name, None)
        if old is not None and is_spread(new):
            pairs[known] = (old, new)
    table.replace(pairs.values())
