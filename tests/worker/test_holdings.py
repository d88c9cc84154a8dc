"""What a rank holds, without running any code of the user's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.worker.holdings import LOOK, holdings

MIB = 1 << 20


def told(**namespace: Any) -> dict[str, int]:
    return {name: size for name, _, size in holdings(namespace)["names"]}


def test_sizes_are_those_of_the_memory_behind() -> None:
    tensor = torch.zeros(MIB // 4)
    model = torch.nn.Linear(512, 511, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.step()
    array = np.zeros(MIB, dtype=np.uint8)
    assert told(view=tensor[5:]) == {"view": MIB}
    assert told(model=model) == {"model": 2 * 512 * 511 * 4}
    assert told(wrapped=torch.nn.Sequential(model, model))["wrapped"] == 2 * 512 * 511 * 4
    assert told(optimizer=optimizer)["optimizer"] == 512 * 511 * 4
    assert told(rows=array[3:].reshape(-1, 1)) == {"rows": MIB}
    assert MIB < told(mixed=[tensor, {"a": (array,)}, SimpleNamespace(deep=bytes(MIB))])["mixed"] - 2 * MIB < 1.1 * MIB
    assert told(frame=pd.DataFrame({"a": np.zeros(MIB // 8)}))["frame"] >= MIB
    assert told(small=[1, 2], module=torch, function=told, cls=dict, generator=(i for i in range(3))) == {}
    assert told(meta=torch.empty(1 << 30, device="meta")) == {}


def test_memory_that_names_share_counts_once_in_all() -> None:
    tensor = torch.zeros(MIB // 4)
    every = holdings({"a": tensor, "b": tensor[1:], "c": [tensor]})
    assert [size >= MIB for _, _, size in every["names"]] == [True] * 3
    assert MIB <= every["total"] < 1.01 * MIB


def test_only_the_biggest_are_named_in_order() -> None:
    every = holdings({f"x{number}": bytes(number * 100_000) for number in range(1, 8)})
    assert [name for name, _, _ in every["names"]] == ["x7", "x6", "x5", "x4"] and every["more"] == 3


class Hostile:
    """Runs, or fails, wherever it is asked."""

    ran: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.ran.append(name)
        raise RuntimeError(name)

    @property
    def big(self) -> Any:
        self.ran.append("big")
        raise RuntimeError

    def __sizeof__(self) -> int:
        self.ran.append("sizeof")
        return 1 << 50

    def __iter__(self) -> Any:
        self.ran.append("iter")
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class HostileModule(torch.nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError

    modules = named_parameters = parameters


def test_nothing_of_the_users_runs() -> None:
    hostile = Hostile()
    hostile.__dict__["held"] = bytes(MIB)
    every = told(hostile=hostile, inside=[hostile], module=HostileModule(300, 300))
    assert every["hostile"] >= MIB and every["inside"] >= MIB and every["module"] > 300 * 300 * 4
    assert Hostile.ran == []


def test_it_looks_for_a_moment_only() -> None:
    many = {f"x{number}": [[b"x"] * 900] * 900 for number in range(10)}
    start = time.thread_time()
    assert not holdings(many)["complete"]
    assert time.thread_time() - start < 10 * LOOK


values = st.recursive(
    st.none() | st.integers() | st.binary() | st.text() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(min_size=1), values))
def test_whatever_is_there_is_counted_and_no_more(namespace: dict[str, Any]) -> None:
    every = holdings(namespace)
    assert every["total"] >= 0 and (every["more"] == 0 or every["names"])
    assert all(size <= every["total"] for _, _, size in every["names"])


def test_what_holds_itself_ends() -> None:
    loop: list[Any] = [bytes(MIB)]
    loop.append(loop)
    assert MIB < told(loop=loop)["loop"] < 1.1 * MIB
