# ruff: noqa: E501  (templates: one a piece)
"""Random programs: a notebook's names, and cells that use them. See `write`.

What a program does may fail with any exception; it then fails in the same way wherever it runs. What is documented as
different on ranks is not written; LIMITS lists it.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

# What programs leave out, and where the user reads about it. Everything else that Python can do here must be as if it
# ran in the notebook.
LIMITS = {
    "identity inside a list, dict or set with 1,000 entries or more of plain data": "README, What to know",
    "random numbers that are not drawn from an object": "README: random state does not travel",
    "names reached by eval or globals()": "README, What to know",
    "a numpy view that a cell reads before one has read its whole array": "README, What to know",
    "the graph of a tensor that is not a leaf": "design: a non-leaf tensor comes back without it",
    "identity of tuples, strings, numbers and other values that cannot change": "values have no identity",
    "the order of a set, and of what is drawn from it": "hashes of strings and objects differ between processes",
    "generators, iterators, locks, files": "they stay on the ranks as handles",
    "a new view of the memory that a tensor had before `t.data = other`, where only a part of it is known": "it is a copy",
    "identity of what is born below a name that the same cell deletes, for a rank that leads a later cell alone": "it is a copy",
    "views of an array that holds objects": "they share no memory on ranks",
    "ndarray.base and Tensor._base": "views share memory; through which object is not kept",
    "tensors and arrays resized to another number of bytes": "memory that is mapped cannot grow",
}

NAMES = "abcdefgh"

# Definitions by name; a program's first cell has those that it uses.
DEFINITIONS = {
    "Node": """
class Node:
    made = 0
    def __init__(self, v=None):
        self.v, self.kids = v, []
        Node.made += 1
    def add(self, x):
        self.kids.append(x)
        return self
    @property
    def size(self): return len(self.kids)
""",
    "Slot": """
class Slot:
    __slots__ = ("a", "__hidden")
    def __init__(self, a): self.a, self.__hidden = a, [a]
    def hidden(self): return self.__hidden
""",
    "Both": """
class Both(Slot):
    def __init__(self, a): super().__init__(a); self.extra = {}
""",
    "Point": """
@dataclass
class Point:
    x: int = 0
    items: list = field(default_factory=list)
    def __add__(self, other): return Point(self.x + other.x, self.items + other.items)
    def __iadd__(self, n): self.x += n; return self
""",
    "Ice": """
@dataclass(frozen=True)
class Ice:
    x: int
    inner: list
""",
    "Tight": """
@dataclass(slots=True)
class Tight:
    x: object = None
""",
    "Stack": """
class Stack(list):
    def __init__(self, *items): super().__init__(items); self.log = []
    def push(self, x): self.log.append(len(self)); self.append(x)
""",
    "Reg": """
class Reg(dict):
    def __setitem__(self, key, value): self.last = key; super().__setitem__(key, value)
""",
    "State": """
class State:
    def __init__(self, v): self.cache, self.v = "local", v
    def __getstate__(self): return {name: value for name, value in vars(self).items() if name != "cache"}
    def __setstate__(self, state): self.__dict__.clear(); self.cache = "local"; self.__dict__.update(state)
""",
    "Color": "class Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n",
    "bump": """
def bump(by=1):
    global total
    total = by
    bump.calls = getattr(bump, "calls", 0) + 1
    return total
""",
    "memo": "def memo(x, cache=[]):\n    cache.append(x)\n    return len(cache)\n",
    "counter": """
def counter(n):
    log = []
    def step():
        nonlocal n
        n += 1
        log.append(n)
        return n
    def peek():
        return n, log
    return step, peek
""",
    "wrap": """
def wrap(f):
    @functools.wraps(f)
    def inner(*args, **kwargs):
        inner.seen += 1
        return f(*args, **kwargs)
    inner.seen = 0
    return inner
""",
    "Swallow": """
class Swallow:
    def __init__(self): self.caught = []
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        self.caught.append(str(kind and kind.__name__))
        return kind is not None and issubclass(kind, Exception)
""",
    "net": """
def net(value):
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for p in made.parameters(): p.fill_(value)
    made.register_buffer("seen", torch.zeros(1))
    return made
""",
    "train": """
def train(model, opt):
    loss = model(torch.ones(1, 2)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.seen.add_(1)
    return loss.item()
""",
    "tree": "def tree(n): return [] if n <= 0 else [tree(n - 1), {'n': n}]\n",
}
IMPORTS = (
    "import collections, copy, contextlib, enum, functools, random\nfrom dataclasses import dataclass, field\n"
    "import numpy as np, torch\nfrom torch import nn\n"
)

MAKERS: dict[str, list[str]] = {
    "int": ["{i}", "{i} - 10", "len({list})", "True"],
    "float": ["{i} / 4", "float({int})"],
    "str": ["'s{i}'", "str({int})", "'%s-{i}' % {int}", "b'bytes'.decode()"],
    "list": [
        "[]", "[{i}, {i}]", "[{any}, {any}]", "[{any}]", "[[{i}], {{'k': {any}}}]", "list(range({i}))",
        "[x * 2 for x in range({i} % 5)]", "[x for x in {list}]", "{list} + [{any}]", "list({dict}.values())",
        "[{any} for _ in range(3)]", "tree({i} % 4)", "{list}[:]", "{list}[1:]", "[({any}, [{i}])]",
    ],
    "dict": [
        "{{}}", "{{'k1': {any}, 'k2': {any}}}", "{{'k1': {i}}}", "{{n: {any} for n in range({i} % 4)}}",
        "dict({dict})", "{{**{dict}, 'k3': {any}}}", "dict(k1={any}, k4=[{i}])", "{{({i}, 'x'): {any}}}", "vars({node}).copy()",
    ],
    "set": ["set()", "{{{i}, {i}}}", "{{x for x in range({i} % 6)}}", "{set} | {{{i}}}", "set({set})"],
    "tuple": ["({any}, [{i}])", "({any},)", "(1, ({any}, {any}))", "tuple({list})"],
    "deque": ["collections.deque([{any}, {i}])", "collections.deque([{i}], maxlen=3)"],
    "bytes": ["bytearray(b'abc')", "bytearray({i})"],
    "counter": ["collections.Counter('aab')", "collections.Counter({{'a': {i}}})"],
    "default": ["collections.defaultdict(list)", "collections.defaultdict(int, k1={i})"],
    "ordered": ["collections.OrderedDict(k1={any}, k2={i})"],
    "big": ["list(range({i}, {i} + 995))", "list(range(1200))", "['s%d' % x for x in range(1001)]"],
    "bigd": ["{{x: x * x for x in range(1000 + {i})}}", "{{x: 'v' for x in range(999)}}"],
    "t1": [
        "torch.arange(6.0)", "torch.ones({i} % 5)", "torch.full((4,), {i}, dtype=torch.int64)", "{t1}.clone()",
        "{t1} + 1", "torch.arange(20000.0)", "{leaf}.detach()",
    ],
    "leaf": ["torch.tensor([1.5, {i}], requires_grad=True)", "nn.Parameter(torch.ones(3))"],
    "t2": ["torch.zeros(2, 3)", "torch.arange(12.0).reshape(3, 4)", "{t2}.clone()", "torch.ones(3, 4).t()"],
    "n1": ["np.arange(6.0)", "np.full(4, {i}, np.int32)", "np.arange(20000)", "{n1} * 2"],
    "objects": ["np.array([{any}, [{i}]], dtype=object)"],
    "n2": ["np.zeros((2, 3))", "np.arange(12.0).reshape(3, 4)", "np.asfortranarray(np.ones((3, 2)))"],
    "node": ["Node({any})", "Node()", "Node({i}).add({any})", "copy.copy({node})", "copy.deepcopy({node})"],
    "slot": ["Slot({any})"],
    "both": ["Both({any})"],
    "point": ["Point()", "Point({i}, {list})", "Point({i})"],
    "ice": ["Ice({i}, [{any}])"],
    "tight": ["Tight({any})"],
    "stack": ["Stack({any}, {i})"],
    "reg": ["Reg(k1={any})"],
    "state": ["State({any})"],
    "color": ["Color.RED", "Color({i} % 2 + 1)"],
    "func": ["bump", "memo", "wrap(memo)", "lambda x=1, *, y={any}: (x, y)", "functools.partial(memo, {i})"],
    "model": ["net({i} / 8)"],
    "rng": ["random.Random({i})", "np.random.default_rng({i})", "torch.Generator().manual_seed({i})"],
    "cls": ["Node", "Point", "Color"],
    "method": ["{node}.add", "{list}.append"],
}  # fmt: skip

# New names that look at the memory of old ones.
VIEWS = {
    "t1": ["{t1}[1:]", "{t1}[::2]", "{t1}.detach()", "{t2}[0]", "{t2}[:, 1]", "{t2}.view(-1)", "{t1}.view(-1)", "{t1}[:4]"],
    "t2": ["{t2}.t()", "{t2}[1:]", "{t1}[:4].view(2, 2)"],
}  # fmt: skip
ARRAY_VIEWS = {
    "n1": ["{n1}[1:]", "{n1}[::-1]", "{n2}[0]", "{n2}[:, 1]", "{n2}.ravel()", "{t1}.detach().numpy()", "{n1}[::2]"],
    "n2": ["{n2}.T", "{n2}[1:]", "{t2}.numpy()"],
    "t1": ["torch.from_numpy({n1})"],
    "t2": ["torch.from_numpy({n2})"],
}

CHANGES: dict[str, list[str]] = {
    "list": [
        "{x}.append({any})", "{x}.append({i})", "{x}.extend([{i}, {any}])", "{x}.insert(0, {any})", "{x}.pop()", "{x}.pop(0)",
        "{x}[0] = {any}", "{x}[-1] = {i}", "{x}[1:2] = [{any}, {i}]", "del {x}[0]", "del {x}[:1]", "{x} += [{any}]", "{x} *= 2",
        "{x}.reverse()", "{x}.clear()", "{x}[:] = [{any}]", "{x}.append({x})", "{x}.sort(key=str)", "{x}[0].append({i})",
        "{x}[0]['k1'] = {any}", "{x}[0], {x}[-1] = {x}[-1], {x}[0]", "{x}.remove({x}[0])", "{x}[::2] = {x}[::2]",
    ],
    "dict": [
        "{x}['k1'] = {any}", "{x}['k{i}'] = {i}", "{x}.pop('k1', None)", "{x}.setdefault('k5', []).append({any})",
        "{x}.update(k2={any})", "del {x}['k1']", "{x} |= {{'k6': {any}}}", "{x}.clear()", "{x}['self'] = {x}", "{x}.popitem()",
        "{x}[{i}, 1] = {any}", "{x}['k1'].append({i})", "{x}['k1'] = {x}.pop('k2')",
    ],
    "set": ["{x}.add({i})", "{x}.discard({i})", "{x} |= {{{i}, 99}}", "{x} -= {{1, 2}}", "{x}.clear()", "{x}.add(({i}, 's'))", "{x} &= {{{i}}}"],
    "deque": ["{x}.append({any})", "{x}.appendleft({i})", "{x}.rotate(1)", "{x}.popleft()", "{x}[0] = {any}", "{x}.clear()"],
    "bytes": ["{x}.append({i})", "{x}[0] = 7", "{x} += b'zz'", "del {x}[:1]"],
    "counter": ["{x}['b'] += {i}", "{x}.update('abc')", "{x}.subtract(a=1)", "del {x}['a']"],
    "default": ["{x}['k{i}']", "{x}['k1'] = {any}", "{x}.default_factory = dict"],
    "ordered": ["{x}.move_to_end('k1')", "{x}['k3'] = {any}", "{x}.popitem(last=False)"],
    "big": ["{x}.append({i})", "{x}.extend(range({i}))", "{x}[500] = -1", "del {x}[900:]", "{x}[::2] = [0] * len({x}[::2])", "{x}.pop()", "{x} += {x}[:50]"],
    "bigd": ["{x}[{i}] = 'new'", "{x}.pop({i}, None)", "{x}[5000 + {i}] = 1", "[{x}.pop(k) for k in list({x})[:600]]"],
    "t1": ["{x} += 1", "{x}[0] = {i}", "{x}.mul_(2)", "{x}[1:].add_(1)", "{x}.fill_({i})", "{x}.data.add_(1)", "{x}.data[0] = 9", "{x}.grad = torch.ones_like({x})", "{x}.tag = [{any}]", "{x}.detach()[:2].zero_()"],
    "leaf": ["{x}.grad = torch.ones_like({x})", "({x} * 2).sum().backward()", "{x}.data.add_(1)", "{x}.data = torch.arange(4.0)", "{x}.tag = [{any}]", "{x}.grad = None"],
    "t2": ["{x} += 1", "{x}[0] = {i}", "{x}[:, 1] *= 2", "{x}.zero_()", "{x}.t()[0].add_(1)", "{x}.copy_({x} + 1)", "{x}.view(-1)[1] = {i}", "{x}[1] = {x}[0]"],
    "n1": ["{x} += 1", "{x}[0] = {i}", "{x}[1:] *= 2", "{x}[::2] = 0", "{x}.sort()", "np.add({x}, 1, out={x})", "{x}.flags.writeable = False"],
    "objects": ["{x}[0] = {any}", "{x}.flags.writeable = False", "{x}[-1].append({any})"],
    "n2": ["{x} += 1", "{x}[0] = {i}", "{x}[:, 1] *= 2", "{x}.T[0] = 5", "{x}.fill({i})"],
    "node": ["{x}.v = {any}", "{x}.kids.append({any})", "{x}.add({x})", "del {x}.v", "{x}.new{i} = {any}", "{x}.v += 1", "{x}.__dict__['raw'] = {any}", "{x}.v, {x}.kids = {x}.kids, [{any}]", "setattr({x}, 'z', {any})"],
    "slot": ["{x}.a = {any}", "{x}.hidden().append({any})", "del {x}.a"],
    "both": ["{x}.a = {any}", "{x}.extra['k1'] = {any}", "{x}.other = {i}", "{x}.hidden().append({i})"],
    "point": ["{x}.x += 1", "{x}.items.append({any})", "{x} += {i}", "{x}.items = [{any}]", "{x}.items *= 2"],
    "ice": ["{x}.inner.append({any})", "{x}.x = 1"],
    "tight": ["{x}.x = {any}", "{x}.x = [{x}]", "{x}.y = 1"],
    "stack": ["{x}.push({any})", "{x}.log.clear()", "{x}[0] = {any}", "{x}.mark = {i}", "{x} += [{i}]"],
    "reg": ["{x}['k1'] = {any}", "{x}['k{i}'] = {i}", "{x}.pop('k1', None)", "{x}.last = {any}"],
    "state": ["{x}.v = {any}", "{x}.v = [{x}]"],
    "func": ["{x}.note = {any}", "{x}({i})", "{x}.__defaults__ = ({i}, [])"],
    "model": [
        "{x}[0].weight.data.add_(1)", "{x}.train(False)", "{x}.seen += 1", "{x}[1] = nn.Linear(2, 1, bias=False); nn.init.ones_({x}[1].weight)",
        "train({x}, torch.optim.SGD({x}.parameters(), lr=0.25))", "{x}.zero_grad()", "{x}[0].bias = None", "{x}.note = {any}",
        "{x}.requires_grad_(False)", "{x}.add_module('more', net(0.5))", "{x}[1] = {x}[0]", "{x}.load_state_dict({x}.state_dict())",
    ],
    "rng": ["{x} = copy.deepcopy({x})", "random.Random.random({x})", "{x}.random()", "torch.rand(1, generator={x})"],
    "method": ["{x}({any})"],
    "cls": ["{x}.extra = {any}", "{x}.made = [{i}]", "{x}.twice = lambda self: 2"],
    "int": ["{x} += 1", "{x} = {x} * 2 - 1"],
    "float": ["{x} /= 3"],
    "str": ["{x} += '!'", "{x} = {x}.upper()"],
    "tuple": ["{x} += ({any},)", "{x}[1].append({any})", "{x}[0].append({i})", "{x} = {x}[::-1]"],
    "color": ["{x} = Color.BLUE", "{x}.note = 1"],
}  # fmt: skip

# Statements around others: {s} is one, indented by what stands before it.
AROUND = [
    "for i in range(2):\n    {s}", "if {int} % 2:\n    {s}\nelse:\n    {s}", "if {int} > 3:\n    {t}",
    "try:\n    {s}\n    raise ValueError({i})\nexcept ValueError as error:\n    {s}\n    told = str(error)",
    "try:\n    {s}\nexcept (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:\n    failed = type(error).__name__\nelse:\n    {s}\nfinally:\n    {s}",
    "with Swallow() as swallow:\n    {s}\n    raise KeyError('x')",
    "with contextlib.suppress(Exception):\n    {s}\n    {s}",
    "def local(p={any}):\n    {t}\n    return p\nout = local()",
    "def store(p):\n    global {g}\n    {g} = p\nstore({gmake})",
    "while len({list}) < 3 and not {i}:\n    {list}.append({i})\n    break",
    "for {list}[0:1] in [[[1]], [[2]]]:\n    {s}",
    "class Local:\n    kept = {any}\n    def get(self): return self.kept\nlocal = Local()",
    "match {any}:\n    case [first, *_]:\n        {s}\n    case {{'k1': _}}:\n        {s}\n    case _:\n        {s}",
    "for x in list({list})[:3]:\n    if isinstance(x, list): x.append({i}); continue\n    {s}",
    "@wrap\ndef deco(x): return [x, {any}]\nout = deco({any})",
]  # fmt: skip
# Statements on their own.
PLAIN = [
    "first, *rest = {list}", "{g}, {h} = {gmake}, {hmake}", "one = two = {gmake}", "y: int = {i}",
    "if (n := len({list})) > 1: last = {list}[-1]", "[{list}.append(i) for i in range(2)]", "same = [{any} is {any}, {any} is {any}]",
    "import math, json as j", "kept = copy.deepcopy({any})", "shallow = copy.copy({any})", "step, peek = counter({i})", "step()", "got = peek()",
    "pair = ({any}, {any})", "assert {i} >= 0, 'never'", "out = (lambda *a, **k: (a, k))({any}, key={any})", "print({any})",
    "bump({i})", "memo({any})", "Node.made += 10", "def bump(by=2): return by", "f2 = functools.partial(memo, {any})",
    "log = []\nfor i, x in enumerate({list}): log.append((i, x))", "{{**{dict}}}", "opt = torch.optim.SGD({model}.parameters(), lr=0.5, momentum=0.5)",
    "train({model}, opt)", "adam = torch.optim.Adam({model}.parameters(), lr=0.5)\ntrain({model}, adam)", "opt.param_groups[0]['lr'] = {i} / 2", "flat = [y for x in {list} if isinstance(x, list) for y in x]",
    "def late():\n    return {any}\n", "try: out = late()\nexcept NameError: out = None", "gen = [*map(str, range({i}))]", "total = sum(x for x in range({i}))",
    "def memo(x, cache={any}): return [x, cache]", "Node.size = 5", "class Node(Node if 'Node' in dir() else object):\n    def __init__(self, v=None): self.v, self.kids = v, ['new']",
    "{any}.anything", "{list}[{i}]", "{dict}['k{i}']", "draws = [{rng}]",
]  # fmt: skip
RAISES = ["raise ValueError('on purpose')", "1 / 0", "[][0]", "{{}}['no']", "undefined_name", "raise KeyError(({i}, 'x'))", "assert False, {any}", "int('x')", "torch.ones(2) @ torch.ones(3)"]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """`ranks` is None for an ordinary cell, else which ranks run it: '' for all."""

    source: str
    ranks: str | None


class Writer:
    """Writes one program. `random_` decides everything, so hypothesis can make it smaller."""

    def __init__(self, random_: random.Random, arrays: bool) -> None:
        self.random, self.arrays = random_, arrays
        self.tags: dict[str, str] = {}
        self.alone = random_.random() < 0.4  # some cells run on one rank only

    def pick(self, options: list[str]) -> str:
        return options[self.random.randrange(len(options))]

    def named(self, tag: str) -> str | None:
        names = [name for name, other in self.tags.items() if other == tag]
        return self.pick(names) if names else None

    def fill(self, template: str, depth: int = 0, **given: str) -> str:
        """A template with its places filled."""

        def place(match: re.Match[str]) -> str:
            what = match[1]
            if what is None:
                return match[0][0]
            if what in given:
                return given[what]
            if what == "i":
                return str(self.random.randrange(8))
            if what == "any":
                return self.anything(depth)
            if what in ("g", "h"):
                return given.setdefault(what, self.pick(list(NAMES)))
            if what in ("gmake", "hmake"):
                name = given.setdefault(what[0], self.pick(list(NAMES)))
                return self.make(self.retag(name), depth + 1)
            if what == "s":
                before = match.string[: match.start()].rpartition("\n")[2]
                return self.statement(depth + 1).replace("\n", "\n" + before)
            if what == "t":
                return self.small()
            return self.named(what) or self.make(what, depth + 1)

        return re.sub(r"\{\{|\}\}|\{(\w+)\}", place, template)

    def retag(self, name: str) -> str:
        tag = self.tags[name] = self.pick(list(MAKERS))
        return tag

    def make(self, tag: str, depth: int = 0) -> str:
        """An expression for a new value."""
        options = MAKERS[tag]
        text = self.fill(self.pick(options if depth < 3 else options[:1]), depth)
        loose = isinstance(ast.parse(text, mode="eval").body, ast.BinOp | ast.Lambda | ast.Constant)
        return f"({text})" if depth and loose else text

    def anything(self, depth: int = 0) -> str:
        if self.tags and (depth > 1 or self.random.random() < 0.7):
            name = self.pick(list(self.tags))
            if self.tags[name] not in ("big", "bigd"):
                return name
        if depth > 2:
            return str(self.random.randrange(8))
        return self.make(self.pick([tag for tag in MAKERS if tag not in ("big", "bigd")]), depth + 1)

    def small(self) -> str:
        """A change to something that has a name, on one line."""
        names = [name for name, tag in self.tags.items() if tag in CHANGES]
        if not names:
            return "pass"
        name = self.pick(names)
        return self.fill(self.pick(CHANGES[self.tags[name]]), 2, x=name)

    def statement(self, depth: int = 0) -> str:
        choice = self.random.random()
        if choice < 0.5:
            return self.small()
        if choice < 0.62:
            name = self.pick(list(NAMES))
            views = {**VIEWS, **ARRAY_VIEWS} if self.arrays else VIEWS
            if self.random.random() < 0.4:
                tag = self.pick(list(views))
                text = self.fill(self.pick(views[tag]), depth)
            else:
                tag = self.pick(list(MAKERS))
                text = self.make(tag, depth)
            if depth == 0:
                self.tags[name] = tag
                return f"{name} = {text}"
            if self.tags.get(name) in (None, tag):
                return f"{name} = {text}"
            return f"spare = {text}"
        if choice < 0.66 and depth == 0 and len(self.tags) > 3 and not self.alone:
            name = self.pick(list(self.tags))
            del self.tags[name]
            return f"del {name}"
        if choice < 0.7 and self.tags and depth == 0:
            name, other = self.pick(list(NAMES)), self.pick(list(self.tags))
            self.tags[name] = self.tags[other]
            return f"{name} = {other}"
        if choice < 0.85 and depth < 2:
            return self.fill(self.pick(AROUND), depth)
        return self.fill(self.pick(PLAIN), depth)

    def cell(self, ranks: str | None) -> Cell:
        lines = []
        if self.arrays and ranks is not None and self.tags:
            # A base that is shipped after a numpy view of it had travelled alone is a copy: LIMITS.
            lines.append(f"({', '.join(sorted(self.tags))},)")
        lines += [self.statement() for _ in range(1 + self.random.randrange(5))]
        if self.random.random() < 0.15:
            lines.append(self.fill(self.pick(RAISES)))
        return Cell("\n".join(lines), ranks)


def write(random_: random.Random) -> list[Cell]:
    """A program: cells that make a namespace, then distributed cells with ordinary ones in between."""
    writer = Writer(random_, arrays=random_.random() < 0.4)
    lines = []
    for name in NAMES[: 3 + random_.randrange(6)]:
        if writer.tags and random_.random() < 0.2:
            other = writer.pick(list(writer.tags))
            lines.append(f"{name} = {other}")
            tag = writer.tags[other]
        else:
            tag = writer.pick(list(MAKERS))
            lines.append(f"{name} = {writer.make(tag)}")
        writer.tags[name] = tag
    if random_.random() < 0.3:
        lines.append("step, peek = counter(3)")
    cells = [Cell("\n".join(lines), None)]
    for _ in range(1 + random_.randrange(5)):
        if random_.random() < 0.35:
            cells.append(writer.cell(None))
        cells.append(writer.cell(writer.pick(["", "", "0", "1"]) if writer.alone else ""))
    text = "\n".join(cell.source for cell in cells)
    used, old = set(), None
    while used != old:  # definitions use each other
        old = set(used)
        used = {name for name in DEFINITIONS if re.search(rf"\b{name}\b", text)}
        text += "".join(DEFINITIONS[name] for name in used - old)
    cells.insert(0, Cell(IMPORTS + "".join(DEFINITIONS[name] for name in DEFINITIONS if name in used), None))
    return cells


def smaller(cells: list[Cell], fails: Callable[[list[Cell]], bool]) -> list[Cell]:
    """Leave out cells and statements as long as it still fails."""

    def candidates(cells: list[Cell]):  # type: ignore[no-untyped-def]
        for index in range(len(cells)):
            yield cells[:index] + cells[index + 1 :]
        for index, cell in enumerate(cells):
            body = ast.parse(cell.source).body
            if len(body) > 1:
                for place in range(len(body)):
                    kept = "\n".join(ast.unparse(node) for node in body[:place] + body[place + 1 :])
                    yield [*cells[:index], Cell(kept, cell.ranks), *cells[index + 1 :]]
            if cell.ranks:
                yield [*cells[:index], Cell(cell.source, ""), *cells[index + 1 :]]

    changed = True
    while changed:
        changed = False
        for candidate in candidates(cells):
            if fails(candidate):
                cells, changed = candidate, True
                break
    return cells
