"""Random programs, as ordinary cells and with some of their cells on ranks: the two notebooks end up the same.

Compared is the whole graph: values, which names share an object, which tensors share memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

NAMES = list("abcdefgh")
START = ["[1, 2]", "{0: [1]}", "N(x=1, y=[2])", "[a, b]", "torch.zeros(3)", "np.zeros(3)", "(a, c)", "{'k': c, 0: a}"]
CELLS = 12

HELPERS = '''
import torch, numpy as np

class N:
    def __init__(self, **values): self.__dict__.update(values)

def graph(names, space):
    """Values as text; an object that was met before is its number. Tuples have no identity across a cell."""
    seen, kept = {}, []
    def told(o, depth=0):
        if isinstance(o, (int, float, str, type(None))): return repr(o)
        if isinstance(o, tuple): return "(" + ",".join(told(x, depth + 1) for x in o) + ")" if depth < 6 else "(..)"
        if id(o) in seen: return f"#{seen[id(o)]}"
        number = seen[id(o)] = len(seen)
        kept.append(o)
        if isinstance(o, list): return f"@{number}[" + ",".join(map(told, o)) + "]"
        if isinstance(o, dict): return f"@{number}{{" + ",".join(f"{a!r}:{told(b)}" for a, b in o.items()) + "}"
        if isinstance(o, N): return f"@{number}N" + told(o.__dict__)
        return f"@{number}{type(o).__name__}{o.tolist()}"
    return "\\n".join(f"{name}=" + (told(space[name]) if name in space else "-") for name in names)
'''


class Programs:
    """Statements over a few names; many fail, which is part of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> str:
        choose, chance = self.random, self.random.random()
        atom = choose.choice(["1", "2", "'s'", "3.5", "None"])
        if chance < 0.25 or (depth == 3 and chance < 0.7):
            return atom
        if chance < 0.45:
            return "[" + ", ".join(self.value(depth + 1) for _ in range(choose.randint(0, 3))) + "]"
        if chance < 0.6:
            return "{" + ", ".join(f"{i}: {self.value(depth + 1)}" for i in range(choose.randint(0, 3))) + "}"
        if chance < 0.7:
            return f"N(x={self.value(depth + 1)}, y={self.value(depth + 1)})"
        if chance < 0.77:
            return f"torch.full(({choose.randint(1, 4)},), {choose.randint(0, 9)}.)"
        if chance < 0.82:
            return f"np.full({choose.randint(1, 4)}, {choose.randint(0, 9)})"
        return choose.choice(NAMES)

    def statement(self) -> str:
        one, two, three = (self.random.choice(NAMES) for _ in range(3))
        index, value = self.random.randint(0, 2), self.value()
        statements = {
            f"{one} = {value}": 30,
            f"del {one}": 8,
            f"{one}.append({value})": 12,
            f"{one}.pop(0)": 7,
            f"{one}[{index}] = {value}": 8,
            f"{one}.x = {value}": 7,
            f"{one} += 1": 5,
            f"{one}[0] += 1": 5,
            f"{one}.update({{7: {value}}})": 5,
            f"{two} = {one}[{index}]": 5,
            f"{two} = {one}[1:]": 3,
            f"{one}.reverse()": 2,
            f"{one}.y, {two}.x = {three}.x, {one}": 3,
        }
        return self.random.choices(list(statements), list(statements.values()))[0]

    def cell(self) -> str:
        statements = [self.statement() for _ in range(self.random.randint(1, 4))]
        return "\n".join(f"try: {one}\nexcept Exception: pass" for one in statements)


@pytest.fixture(scope="module")
def plain() -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok(HELPERS)
        yield notebook


@pytest.fixture(scope="module")
def ranked(nb: Notebook) -> Notebook:
    nb.ok(HELPERS)
    return nb


@pytest.mark.parametrize("seed", range(10))
def test_the_two_notebooks_end_up_the_same(plain: Notebook, ranked: Notebook, seed: int) -> None:
    program = Programs(seed)
    start = "\n".join(f"{name} = {value}" for name, value in zip(NAMES, START, strict=True))
    shown = f"print(graph({NAMES}, globals()))"
    history = [start]
    plain.ok(start)
    ranked.ok(start)
    for _ in range(CELLS):
        code, there = program.cell(), program.random.random() < 0.6
        history.append(("%%distributed -n 2\n" if there else "") + code)
        plain.ok(code)
        cell = ranked.ok(history[-1])
        here, other = plain.ok(shown).stdout, ranked.ok(shown).stdout
        assert other == here, "\n\n".join(history)
        assert cell.stderr == "", "\n\n".join(history)
    ranked.ranks(f"whole = graph({NAMES}, globals())\n" + "\n".join(f"try: {n}\nexcept NameError: pass" for n in NAMES))
    assert ranked.value("list(ranks['whole'])") == [here.rstrip("\n")] * 2, "\n\n".join(history)
