"""Random programs over a namespace, for the property tests. The same program on equal graphs makes equal graphs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Thing:
    """An object with attributes."""


class Slotted:
    __slots__ = ("__private", "a", "b")

    def __init__(self) -> None:
        self.__private = 0
        self.a: Any = None


def reachable(namespace: dict[str, Any], names: list[str]) -> list[Any]:
    """Objects reachable from names, in an order that depends on the structure only."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    stack = [namespace[name] for name in reversed(names) if name in namespace]
    while stack:
        value = stack.pop()
        if isinstance(value, int | float | str | type(None)) or id(value) in seen:
            continue
        if not isinstance(value, tuple):  # a value: two of them may become one, or one two
            seen[id(value)] = value
            found.append(value)
        stack.extend(reversed(children(value)))
    return found


def children(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, Thing):
        return [value.__dict__[name] for name in sorted(value.__dict__)]
    if isinstance(value, Slotted):
        return [value.a, getattr(value, "b", None)]
    return []


def fresh(random_: random.Random) -> Any:
    """A new object."""
    kind = random_.randrange(9)
    number = random_.randrange(100)
    if kind == 0:
        return [number]
    if kind == 1:
        return {f"k{number % 5}": number}
    if kind == 2:
        return {number, number + 1}
    if kind == 3:
        thing = Thing()
        thing.x = number  # type: ignore[attr-defined]
        return thing
    if kind == 4:
        return torch.full((4, 3), float(number))
    if kind == 5:
        return np.full((6,), number, dtype=np.float32)
    if kind == 6:
        return Slotted()
    if kind == 7:
        return [{"i": i} for i in range(number % 3)]
    return number


def mutate(namespace: dict[str, Any], names: list[str], seed: int, views: bool = False) -> None:
    """One random change to what is reachable from some names, or to the names."""
    random_ = random.Random(seed)
    names = [name for name in names if name != "keep"]
    objects = reachable(namespace, names)
    if views:  # a base stays in reach as long as its views
        kept = namespace.setdefault("keep", [])
        kept.extend(
            value
            for value in objects
            if isinstance(value, torch.Tensor | np.ndarray) and all(value is not other for other in kept)
        )
    pick = random_.choice(objects) if objects and random_.random() < 0.9 else None
    other = random_.choice(objects) if objects and random_.random() < 0.5 else fresh(random_)
    name = random_.choice(names)
    choice = random_.random()
    if pick is None or choice < 0.15:
        if choice < 0.03:
            namespace.pop(name, None)
        elif choice < 0.08:
            namespace[name] = (other, fresh(random_))
        else:
            namespace[name] = other
    elif isinstance(pick, list):
        _list(pick, other, random_)
    elif isinstance(pick, dict):
        key = f"k{random_.randrange(5)}"
        if choice < 0.4 and pick:
            pick.pop(random_.choice(list(pick)))
        else:
            pick[key] = other
    elif isinstance(pick, set):
        pick.add(random_.randrange(1000)) if choice < 0.7 else pick.clear()
    elif isinstance(pick, Thing):
        attribute = random_.choice("xyz")
        if choice < 0.3 and attribute in pick.__dict__:
            delattr(pick, attribute)
        else:
            setattr(pick, attribute, other)
    elif isinstance(pick, Slotted):
        pick.a = other
        if choice < 0.5:
            pick.b = [choice]
        elif hasattr(pick, "b"):
            del pick.b
    elif isinstance(pick, torch.Tensor):
        _tensor(namespace, name, pick, random_, views)
    elif isinstance(pick, np.ndarray):
        if choice < 0.6 or not views:
            pick[random_.randrange(len(pick))] = random_.randrange(100) if len(pick) else 0
        elif choice < 0.8:
            namespace[name] = pick[1:] if len(pick) > 1 else pick
        else:
            namespace[name] = torch.from_numpy(pick)


def _list(pick: list[Any], other: Any, random_: random.Random) -> None:
    choice = random_.randrange(5)
    if choice == 0 and pick:
        pick.pop(random_.randrange(len(pick)))
    elif choice == 1 and pick:
        pick[random_.randrange(len(pick))] = other
    elif choice == 2:
        pick.insert(random_.randrange(len(pick) + 1), other)
    elif choice == 3:
        pick.reverse()
    else:
        pick.append(other)


def _tensor(namespace: dict[str, Any], name: str, pick: torch.Tensor, random_: random.Random, views: bool) -> None:
    choice = random_.randrange(4)
    if choice == 0 and pick.numel():
        pick.view(-1)[random_.randrange(pick.numel())] = random_.randrange(100) if pick.is_contiguous() else 1
    elif choice == 1:
        pick.fill_(float(random_.randrange(100)))
    elif choice == 2 and views and pick.dim() and pick.shape[0] > 1:
        namespace[name] = pick[1:]
    else:
        pick.add_(1)


def picture(namespace: dict[str, Any], names: list[str]) -> Any:
    """A description of the graph: values, aliasing of objects, and sharing of memory."""
    places: dict[int, int] = {}
    keep: list[Any] = []
    starts: list[tuple[int, int]] = []

    def draw(value: Any) -> Any:
        if isinstance(value, int | float | str | type(None)):
            return value
        if isinstance(value, tuple):
            return ("tuple", *map(draw, value))
        if id(value) in places:
            return ("again", places[id(value)])
        places[id(value)] = len(places)
        keep.append(value)
        if isinstance(value, list):
            return ["list", *map(draw, value)]
        if isinstance(value, dict):
            return ["dict", *[(key, draw(content)) for key, content in value.items()]]
        if isinstance(value, set):
            return ["set", sorted(value)]
        if isinstance(value, Thing):
            return ["Thing", *[(key, draw(value.__dict__[key])) for key in sorted(value.__dict__)]]
        if isinstance(value, Slotted):
            return ["Slotted", draw(value.a), draw(getattr(value, "b", None))]
        if isinstance(value, torch.Tensor):
            return ["tensor", tuple(value.shape), value.stride(), value.tolist(), share(value.data_ptr(), value.nbytes)]
        if isinstance(value, np.ndarray):
            address = value.__array_interface__["data"][0]
            return ["array", value.shape, value.strides, value.tolist(), share(address, value.nbytes)]
        raise TypeError(type(value))

    def share(address: int, length: int) -> list[tuple[int, int]]:
        """Which earlier memory this overlaps, and by how much it is moved."""
        overlaps = [
            (index, address - low)
            for index, (low, size) in enumerate(starts)
            if length and size and low < address + length and address < low + size
        ]
        starts.append((address, length))
        return overlaps

    return [(name, draw(namespace[name]) if name in namespace else "unbound") for name in names]
