"""Why something cannot travel, in words a user can act on: the path to it, what it is, and what to do."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbdist.shipping.errors import StaysOnRank, article
from nbdist.shipping.exporters import exporter_of
from nbdist.shipping.handle import RankedValue, handle_facts

_PROCESS_BOUND = {
    "lock": "a lock", "RLock": "a lock", "Condition": "a condition", "Event": "an event", "Semaphore": "a semaphore",
    "Thread": "a thread", "generator": "a live generator", "coroutine": "a coroutine",
    "async_generator": "a live generator",
    "socket": "a socket", "TextIOWrapper": "an open file", "BufferedReader": "an open file",
    "BufferedWriter": "an open file",
    "FileIO": "an open file", "Connection": "a connection", "Popen": "a running process", "frame": "a frame",
    "traceback": "a traceback", "mmap": "a memory map",
}  # fmt: skip


@dataclass(frozen=True)
class Trouble:
    """The smallest part found that does not pack, and where it is."""

    path: str
    value: Any
    of_a_library: bool = False  # a part of an object that would not work without it

    def what(self, error: BaseException) -> str:
        """`a lock, which cannot leave its process`."""
        words = _PROCESS_BOUND.get(type(self.value).__name__)
        if words is not None:
            return f"{words}, which cannot leave its process"
        if isinstance(error, StaysOnRank):
            return (
                str(error) if isinstance(self.value, RankedValue) else f"{article(type(self.value).__name__)}: {error}"
            )
        return f"{article(type(self.value).__name__)}, which cannot be pickled ({reason_of(error)})"


def path_to_trouble(name: str, value: Any, packs: Callable[[Any], bool], depth: int = 12) -> Trouble:
    """Descend to the smallest part of a value that `packs` says no to."""
    path, of_a_library = name, False
    for _ in range(depth):
        if type(value).__name__ in _PROCESS_BOUND:  # what is in it is no news: a running process and its locks
            break
        for step, part in _parts(value):
            if not packs(part):
                of_a_library |= step.startswith(".") and type(value).__module__ != "__main__"
                path, value = path + step, part
                break
        else:
            break
    return Trouble(path, value, of_a_library)


def too_deep(value: Any, error: BaseException) -> str:
    """For a value whose nesting is what a RecursionError is about: a description; else ""."""
    if not isinstance(error, RecursionError):
        return ""
    seen: dict[int, Any] = {}
    level, depth = [value], 0
    while level and len(seen) < _LOOKED_AT:
        depth += 1
        following = []
        for part in level:
            for _, inner in _parts(part):
                if not isinstance(inner, _LEAVES) and id(inner) not in seen:
                    seen[id(inner)] = inner
                    following.append(inner)
        level = following
    return f"nested too deeply to be pickled ({depth} levels)" if depth >= _DEEP else ""


_LOOKED_AT, _DEEP = 200_000, 100
_LEAVES = (int, float, complex, str, bytes, type(None))


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", content) for key, content in list(value.items())]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", content) for index, content in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("{...}", content) for content in value]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        found = []
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                found.append((f".<closure variable {variable}>", cell.cell_contents))
            except ValueError:
                pass
        return found
    if isinstance(value, type | RankedValue):
        return []
    exporter = exporter_of(type(value))
    if exporter is not None and exporter.stays is not None:  # it is the trouble, whatever is in it
        return []
    found = []
    try:
        from nbdist.shipping.kinds import attributes_of

        found = [(f".{name}", content) for name, content in attributes_of(value).items()]
    except Exception:
        pass
    return found


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^(Can't|cannot) pickle ", "cannot pickle ", text)
    if isinstance(error, StaysOnRank):
        return text
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def advice_for(name: str, value: Any, trouble: Trouble, inside: str = "") -> str:
    """What the user can do; `inside`: the function that is called, where this is not about a cell and a variable."""
    if isinstance(trouble.value, RankedValue) and handle_facts(trouble.value).dead:
        return f"Run the cell that made it again, or `del {name}`"
    create = f"Create it inside {inside or 'the cell'}"
    if trouble.path == name:
        return create if inside else f"{create}, or give the notebook's variable another name"
    if trouble.of_a_library or isinstance(value, types.FunctionType):
        return f"Create {name} inside {inside or 'the cell'}" if not inside else create
    return f"{create}, or take {trouble.path} out before (`del`)"
