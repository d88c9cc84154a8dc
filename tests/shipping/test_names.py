"""Which names a cell reads."""

from __future__ import annotations

import builtins
import sys

import pytest

from nbdist.shipping import analyse

BUILTINS = frozenset(dir(builtins)) | {"get_ipython"}

READS = {
    "comprehension": ("[x*k for x in xs if x in (y for y in ys)]", {"k", "xs", "ys"}),
    "class body": ("class A(Base):\n  z = q\n  w = z", {"Base", "q"}),
    "class x = x": ("class A:\n  x = x", {"x"}),
    "augmented": ("t += 1", {"t"}),
    "augmented attribute": ("o.data[i] += v", {"o", "i", "v"}),
    "attribute is no name": ("o.data", {"o"}),
    "star import": ("from math import *\ny = sin(s)", {"sin", "s"}),
    "walrus": ("if (n := len(v)) > 3: print(n)", {"v"}),
    "match": (
        "match cmd:\n  case P(x=px, y=1) as whole: r = px\n  case [h, *rest]: r = h\n  case M.K: pass",
        {"cmd", "P", "M"},
    ),
    "f-string": ("f'{x=} {y!r:>{w}}'", {"x", "y", "w"}),
    "decorator": ("@deco(arg)\ndef f(a=dflt): pass", {"deco", "arg", "dflt"}),
    "annotations": ("def f(a: Ann) -> Ret: pass\nv: VAnn = 1", {"Ann", "Ret", "VAnn"}),
    "except": ("try:\n  z()\nexcept E as e:\n  print(e)", {"z", "E"}),
    "assigned first": ("x = 1\nprint(x)", set()),
    "with": ("with open(p) as fh: fh.read()", {"p"}),
    "target of a loop": ("for o.i in xs: pass", {"o", "xs"}),
    "await": ("await coro()", {"coro"}),
    "future annotations": ("from __future__ import annotations\ndef f(a: Ann): pass", set()),
    "first iterable": ("sum(i for i in src)", {"src"}),
    "import of a submodule": ("import os.path\nos.getcwd()", set()),
    "string annotation": ("x: 'Later' = 3", set()),
    "super": ("class B(A):\n  def m(self): return super().m() + __class__.k", {"A"}),
    "both branches bind": ("if c: x = 1\nelse: x = 2\nprint(x)", {"c"}),
    "branch that raises": ("if c: x = 1\nelse: raise E\nprint(x)", {"c", "E"}),
    "try binds or raises": ("try: x = f()\nexcept E: raise\nprint(x)", {"f", "E"}),
    "dunder names": ("print(__name__)", set()),
    "deleted, then read": ("x = 1\ndel x\nprint(x)", set()),
    "type parameters": ("def f(x): return x\nf(y)", {"y"}),
}

MAYBE = {
    "global": ("def f():\n  global n\n  n += 1\nf()", {"n"}),
    "function then assigned": ("def f(): return x\nx = 1\nf()", {"x"}),
    "lambda": ("(lambda u: u + off)(1)", {"off"}),
    "nonlocal": ("def f():\n  a=1\n  def g():\n    nonlocal a\n    a = bb\n  g()", {"bb"}),
    "method": ("class A:\n  def m(self): return z", {"z"}),
    "may be bound before": ("if c: x = 1\nprint(x)", {"x"}),
    "loop variable": ("for i in it: acc.append(i)\nprint(i)", {"i"}),
    "line magic": ("get_ipython().run_line_magic('timeit', '-n1 f(x)')", {"f", "x"}),
    "shell": ("get_ipython().system('echo {name}')", {"name"}),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    source, want = READS[name]
    assert analyse(source).reads - BUILTINS == want


@pytest.mark.parametrize("name", MAYBE)
def test_maybe(name: str) -> None:
    source, want = MAYBE[name]
    names = analyse(source)
    assert want <= names.maybe and not want & names.reads


def test_stores_and_deletes() -> None:
    names = analyse(
        "a = 1\ndel b\nfor c in x: pass\ndef d():\n  global e\n  e = 1\nwith f() as g: pass\nfrom m import *"
    )
    assert names.stores == {"a", "c", "d", "e", "g"} and names.deletes == {"b"} and names.star
    assert analyse("try: 1/0\nexcept E as e: pass").deletes == {"e"}


def test_syntax_error_passes_through() -> None:
    with pytest.raises(SyntaxError) as caught:
        analyse("x = = 1", "<cell 3>")
    assert caught.value.filename == "<cell 3>"
    with pytest.raises(SyntaxError):
        analyse("return 5")


def test_future_flag_of_the_shell() -> None:
    import __future__

    import ast

    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag
    assert analyse("def f(a: Ann): pass", "<cell>", flags).reads == set()
    assert analyse("def f(a: Ann): pass").reads == {"Ann"}


def test_cached_by_text() -> None:
    assert analyse("q = w + 1") is analyse("q = w + 1")


LEGAL = {
    "break": ("for i in r:\n  if i > lim: break\n  a = i\nelse: pass", {"r", "lim"}),
    "continue": ("while go():\n  if skip: continue\n  work()", {"go", "skip", "work"}),
    "break in try": ("for i in r:\n  try: f(i)\n  except E: continue\n  finally: g()", {"r", "f", "E", "g"}),
    "break in with": ("while 1:\n  with cm() as c:\n    c.step(k)\n    break", {"cm", "k"}),
    "break in match": ("for m in ms:\n  match m:\n    case 'stop': break\n    case _: continue", {"ms"}),
    "break in except*": ("try: f()\nexcept* E as e:\n  for i in r: break", {"f", "E", "r"}),
    "after break": ("while 1:\n  x = 1\n  break\n  print(x)", set()),
    "return in a function": ("def f(): return k\nf()", set()),
    "yield in a function": ("def f():\n  for i in (1,):\n    x = yield i\n    if x: break\nlist(f())", set()),
    "top-level async": (
        "async for a in src():\n  if a: break\nasync with cm() as c: await c.go(a2)\ny = [i async for i in src()]",
        {"src", "cm", "a2"},
    ),
    "global at the top": ("global x\nx = y", {"y"}),
    "captures": (
        "match p:\n  case [a, *b] if q(a): r = b\n  case {'k': v, **rest}: r = rest\n  case (C.X | D()) as w: r = w",
        {"p", "q", "C", "D"},
    ),
    "stars": (
        "for x in *aa, *bb: print(*cc, **dd)\nf, *g = hh\nd[1:2, *ii] = 0",
        {"aa", "bb", "cc", "dd", "hh", "d", "ii"},
    ),
    "slice as target": ("for d[lo:hi], o[1:2, k] in xs: pass", {"d", "lo", "hi", "o", "k", "xs"}),
    "del in a loop": ("for i in r:\n  t = f(i)\n  del t, d[i], o.x", {"r", "f", "d", "o"}),
    "annotation alone": ("v: T\nfor i in r:\n  w: U = 1\n  continue", {"T", "U", "r"}),
    "annotated attribute": ("o.x: T = 1", {"o", "T"}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_statements_that_are_legal_in_their_place_only(name: str) -> None:
    source, want = LEGAL[name]
    assert analyse(source).reads - BUILTINS == want


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_type_aliases_and_parameters() -> None:
    names = analyse("type X[T] = dict[T, V]\ndef f[T: B](a: T) -> X: pass\nclass C[T](Base): pass\nprint(X)")
    assert {"Base"} <= names.reads and not {"T", "X"} & (names.reads | names.maybe) and "X" in names.stores


@pytest.mark.parametrize(
    "source",
    ["break", "if x: continue", "return 5", "yield 1", "for i in r: return", "nonlocal x", "x = 1\nglobal x", "a = *b"],
)
def test_out_of_place_is_the_error_of_the_whole_cell(source: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        analyse("pass\n" + source, "<cell 7>")
    assert caught.value.filename == "<cell 7>" and (caught.value.lineno or 0) >= 2


PERHAPS = {
    "with": "with suppress(ValueError):\n  int('a')\n  lr = 5\nprint(lr)",
    "with that raises": "with cm():\n  if c: lr = 1\n  raise E\nprint(lr)",
    "and": "if ok and (lr := 9): pass\nprint(lr)",
    "or": "a or (lr := f())\nprint(lr)",
    "or, true": "if a or (lr := f()): print(lr)",
    "not": "if not (a and (lr := f())): print(lr)",
    "conditional": "y = (lr := 1) if a else 2\nprint(lr)",
    "comprehension": "[lr := i for i in r]\nprint(lr)",
    "comprehension, condition": "y = [i for i in r if (lr := i)]\nprint(lr)",
    "chain": "a < b < (lr := 3)\nprint(lr)",
    "in an argument": "f(a and (lr := 3), *[lr])",
    "keyword": "f(k=a or (lr := 3), **{'b': lr})",
    "f-string": "f'{a and (lr := 3)}'\nprint(lr)",
    "for": "for i in r: lr = i\nprint(lr)",
    "walrus in for": "for i in r:\n  if (lr := i): pass\nprint(lr)",
    "while": "while c():\n  lr = 1\n  break\nprint(lr)",
    "while and": "while c() and (lr := 1): pass\nprint(lr)",
    "try": "try:\n  f()\n  lr = 5\nexcept E: pass\nprint(lr)",
    "try, walrus": "try: f(lr := 5)\nexcept E: print(lr)",
    "match": "match p:\n  case 1: lr = 2\nprint(lr)",
    "guard": "match p:\n  case 1 if (lr := q): pass\nprint(lr)",
    "assert": "assert (lr := f())\nprint(lr)",
    "augmented": "x += a and (lr := 2)\nprint(lr)",
}  # fmt: skip


@pytest.mark.parametrize("name", PERHAPS)
def test_what_is_bound_perhaps_is_read_perhaps(name: str) -> None:
    names = analyse(PERHAPS[name])
    assert "lr" in names.maybe and "lr" in names.stores and "lr" not in names.reads


SURELY = {
    "and, inside": "if ok and (lr := 9): print(lr)",
    "or, else": "if ok or (lr := 9): pass\nelse: print(lr)",
    "not": "if not (lr := f()): pass\nprint(lr)",
    "first": "if (lr := f()) and b: pass\nprint(lr)",
    "both": "(lr := 1) if a else (lr := 2)\nprint(lr)",
    "comparison": "if 1 < (lr := f()) < 3: pass\nprint(lr)",
    "while": "while (lr := f()): print(lr)\nprint(lr)",
    "order": "f(lr := 2, lr, k=lr)",
    "dict": "{'a': (lr := 1), lr: lr}",
    "value": "y = x[(lr := 2)]\nprint(lr)",
    "nested": "(z := (lr := 2))\nprint(lr, z)",
    "in a with": "with cm():\n  lr = 2\n  print(lr)",
    "item of a with": "with (lr := cm()): pass\nprint(lr)",
}


@pytest.mark.parametrize("name", SURELY)
def test_what_is_surely_bound_is_not_read(name: str) -> None:
    names = analyse(SURELY[name])
    assert "lr" not in names.reads | names.maybe


def test_read_before_walrus_and_names_of_inner_scopes() -> None:
    assert "x" in analyse("if x > 0 and (x := 5): pass").reads
    assert "y" in analyse("(lambda: (y := 1))()\nprint(y)").reads
    assert "j" in analyse("d[[j for j in r][0]] = 1\nprint(j)").reads
    assert analyse("f(*(a := b), **c)").reads - BUILTINS == {"f", "b", "c"}
