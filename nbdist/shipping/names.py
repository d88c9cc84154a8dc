"""Which names does a piece of code read, bind and delete at the notebook's level?

Scoping comes from compiled code: the instructions of every code object, not `co_names`, which holds attribute names
too. What is surely bound before it is read comes from walking the statements in order, each compiled alone, so that
`loss = ...; print(loss)` does not ship an old `loss`.
"""

from __future__ import annotations

import ast
import dis
import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType

_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_DELETES = frozenset({"DELETE_NAME", "DELETE_GLOBAL"})
_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: functions have it, modules and class bodies do not

# Every module has these of its own.
_OWN = frozenset(
    [
        "__annotations__",
        "__builtins__",
        "__cached__",
        "__class__",
        "__conditional_annotations__",
        "__doc__",
        "__file__",
        "__loader__",
        "__name__",
        "__package__",
        "__spec__",
    ]
)
# Names between double underscores that Python or IPython binds in a module by itself: never a cell's own.
RESERVED = _OWN | frozenset(
    [
        "__",
        "___",
        "____",
        "__IPYTHON__",
        "__annotate__",
        "__builtin__",
        "__dict__",
        "__main__",
        "__path__",
        "__warningregistry__",
    ]
)
# IPython turns `%timeit f(x)` and `!echo {name}` into calls of these with the text as a constant.
_TEXT_CALLS = frozenset({"getoutput", "run_cell_magic", "run_line_magic", "system"})
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class Names:
    """The notebook-level names of a cell.

    Attributes:
        reads: read at the cell's top level before they are surely bound.
        maybe: read in a function that the cell defines, or where the cell may have bound them before.
        stores: bound somewhere in the cell, functions with `global` included.
        deletes: deleted before they are surely bound by the cell itself.
        star: the cell holds `from ... import *`, so that more may be bound.
    """

    reads: frozenset[str]
    maybe: frozenset[str]
    stores: frozenset[str]
    deletes: frozenset[str]
    star: bool


@dataclass
class CodeNames:
    """What one code object and those inside it do with notebook-level names."""

    now: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    deletes: set[str] = field(default_factory=set)


def code_names(code: CodeType) -> CodeNames:
    """The global names of a code object: `now` when it runs, `later` when a function defined in it is called."""
    found = CodeNames()
    _scan(code, found, later=False, top=True)
    return found


@lru_cache(maxsize=2048)
def globals_read(code: CodeType) -> frozenset[str]:
    """Every global name that a function with this code may read."""
    found = code_names(code)
    return frozenset((found.now | found.later) - _OWN)


def _scan(code: CodeType, found: CodeNames, later: bool, top: bool) -> None:
    class_body = not top and not code.co_flags & _OPTIMIZED
    own: set[str] = set()  # attributes that a class body has set so far
    loads = found.later if later else found.now
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation in _LOADS:
            if not (class_body and operation != "LOAD_GLOBAL" and name in own):
                loads.add(name)
        elif operation in _STORES:
            if class_body and operation == "STORE_NAME":
                own.add(name)
            else:
                found.stores.add(name)
        elif operation in _DELETES and not (class_body and operation == "DELETE_NAME"):
            found.deletes.add(name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, found, later or _runs_later(constant), top=False)


def _runs_later(code: CodeType) -> bool:
    """Is this the body of a function? Comprehensions, class bodies and generic parameters run where they stand."""
    if not code.co_flags & _OPTIMIZED:
        return False
    return code.co_name == "<lambda>" or not code.co_name.startswith("<")


@lru_cache(maxsize=512)
def analyse(source: str, filename: str = "<cell>", flags: int = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) -> Names:
    """The names of a cell's source, which is plain Python. Cached by the text.

    Raises:
        SyntaxError: as compile() raises it.
    """
    tree = compile(source, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    # Errors that only the compiler sees (a `return` outside a function) are found here, for the whole cell.
    compile(source, filename, "exec", flags, dont_inherit=True)
    return _Reader(tree, filename, flags).names()


class _Reader:
    """Walks statements in order.

    `sure` is what is bound on every way to a statement, `None` for a place never reached.
    """

    def __init__(self, tree: ast.Module, filename: str, flags: int) -> None:
        self.tree, self.filename, self.flags = tree, filename, flags
        # Each piece is compiled alone and needs the cell's own __future__ imports.
        self.future: list[ast.stmt] = [
            s for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"
        ]
        self.reads: set[str] = set()
        self.maybe: set[str] = set()
        self.stores: set[str] = set()
        self.deletes: set[str] = set()
        self.star = False

    def names(self) -> Names:
        self.block(self.tree.body, set())
        maybe = (self.maybe | self._from_texts()) - self.reads - _OWN
        return Names(
            frozenset(self.reads - _OWN),
            frozenset(maybe),
            frozenset(self.stores - _OWN),
            frozenset(self.deletes - _OWN),
            self.star,
        )

    def _from_texts(self) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_CALLS:
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        found.update(_IDENTIFIER.findall(argument.value))
        return found

    def _compiled(self, node: ast.stmt | ast.expr) -> CodeNames:
        statement = ast.Expr(node) if isinstance(node, ast.expr) else node
        module = ast.Module([*self.future, statement], [])
        ast.fix_missing_locations(module)
        return code_names(compile(module, self.filename, "exec", self.flags, dont_inherit=True))

    def use(self, node: ast.stmt | ast.expr, sure: set[str]) -> CodeNames:
        """Note what a simple statement or an expression reads."""
        found = self._compiled(node)
        unknown = found.now - sure
        self.maybe |= (unknown & self.stores) | (found.later - sure)
        self.reads |= unknown - self.stores
        self.stores |= found.stores
        self.deletes |= found.deletes
        return found

    def expression(self, node: ast.expr, sure: set[str]) -> set[str]:
        """Note what an expression reads, in the order in which its parts run. Returns what is surely bound after it:
        `:=` where it may be skipped (`a and (b := c)`, comprehensions, lambdas) binds perhaps.
        """
        walrus = _walrus(node)
        if isinstance(node, ast.Starred):  # not legal alone
            return self.expression(node.value, sure)
        if not walrus:
            self.use(node, sure)
            return sure
        if isinstance(node, ast.NamedExpr):
            after = self.expression(node.value, sure) | {node.target.id}
            self.stores.add(node.target.id)
            return after
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.UnaryOp):
            true, false = self.condition(node, sure)
            return true & false
        if isinstance(node, ast.Compare):
            after = first = self.expression(node.comparators[0], self.expression(node.left, sure))
            for part in node.comparators[1:]:
                after = self.expression(part, after)
            return first
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            if not isinstance(node, ast.Lambda):
                self.stores |= walrus
            self.use(node, sure)
            return sure
        parts: list[ast.AST | None] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Dict):
            parts = [part for pair in zip(node.keys, node.values, strict=True) for part in pair]
        for child in parts:
            inner = child.value if isinstance(child, ast.keyword) else child
            if isinstance(inner, ast.expr):
                sure = self.expression(inner, sure)
        return sure

    def condition(self, node: ast.expr, sure: set[str]) -> tuple[set[str], set[str]]:
        """Note what a test reads. Returns what is surely bound (where it is true, where it is false)."""
        if isinstance(node, ast.BoolOp) and _walrus(node):
            every = isinstance(node.op, ast.And)
            true, false = self.condition(node.values[0], sure)
            for value in node.values[1:]:
                yes, no = self.condition(value, true if every else false)
                true, false = (yes, false & no) if every else (true & yes, no)
            return true, false
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            true, false = self.condition(node.operand, sure)
            return false, true
        if isinstance(node, ast.IfExp) and _walrus(node):
            true, false = self.condition(node.test, sure)
            (yes, no), (other_yes, other_no) = self.condition(node.body, true), self.condition(node.orelse, false)
            return yes & other_yes, no & other_no
        after = self.expression(node.operand if isinstance(node, ast.UnaryOp) else node, sure)
        return after, after

    def bind(self, target: ast.expr, sure: set[str]) -> set[str]:
        """Note what an assignment target binds, and what it reads (`o.x`, `a[i]`)."""
        bound: set[str] = set()
        for part in _targets(target):
            if isinstance(part, ast.Name):
                bound.add(part.id)
            elif isinstance(part, ast.Attribute | ast.Subscript):
                self.expression(part.value, sure)
                if isinstance(part, ast.Subscript):
                    self.expression(part.slice, sure)
        self.stores |= bound
        return bound

    def block(self, body: list[ast.stmt], before: set[str] | None) -> set[str] | None:
        sure = None if before is None else set(before)
        for statement in body:
            if sure is None:  # after raise, break, continue: cannot be reached, but its stores are still stores
                self.statement(statement, set(self.stores | self.reads))
            else:
                sure = self.statement(statement, sure)
        return sure

    def statement(self, node: ast.stmt, sure: set[str]) -> set[str] | None:
        handler = getattr(self, f"_{type(node).__name__}", None)
        return self._simple(node, sure) if handler is None else handler(node, sure)

    def _If(self, node: ast.If, sure: set[str]) -> set[str] | None:
        true, false = self.condition(node.test, sure)
        return _both(self.block(node.body, true), self.block(node.orelse, false))

    def _While(self, node: ast.While, sure: set[str]) -> set[str]:
        true, false = self.condition(node.test, sure)
        self.block(node.body, true)
        self.block(node.orelse, false)
        return true & false

    def _For(self, node: ast.For | ast.AsyncFor, sure: set[str]) -> set[str]:
        sure = self.expression(node.iter, sure)
        self.block(node.body, sure | self.bind(node.target, sure))
        self.block(node.orelse, sure)
        return sure

    _AsyncFor = _For

    def _With(self, node: ast.With | ast.AsyncWith, sure: set[str]) -> set[str] | None:
        for item in node.items:
            sure = self.expression(item.context_expr, sure)
            if item.optional_vars is not None:
                sure = sure | self.bind(item.optional_vars, sure)
        self.block(node.body, sure)
        return sure  # a context manager may swallow what its body raises, at any place

    _AsyncWith = _With

    def _Try(self, node: ast.Try, sure: set[str]) -> set[str] | None:
        after = self.block(node.orelse, self.block(node.body, sure))
        for handler in node.handlers:
            if handler.type is not None:
                self.expression(handler.type, sure)
            name = {handler.name} if handler.name else set()
            self.stores |= name
            self.deletes |= name  # `except E as e` deletes e at its end
            end = self.block(handler.body, sure | name)
            after = _both(after, None if end is None else end - name)
        final = self.block(node.finalbody, sure)
        if final is None:
            return None
        return None if after is None else after | final

    _TryStar = _Try

    def _Match(self, node: ast.Match, sure: set[str]) -> set[str]:
        sure = self.expression(node.subject, sure)
        for case in node.cases:
            names: set[str] = set()
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
                    names.add(part.name)
                elif isinstance(part, ast.MatchMapping) and part.rest:
                    names.add(part.rest)
                elif isinstance(part, ast.Name | ast.Attribute):
                    self.expression(part, sure)
            self.stores |= names
            inside = sure | names
            if case.guard is not None:
                inside, _ = self.condition(case.guard, inside)
            self.block(case.body, inside)
        return sure

    def _simple(self, node: ast.stmt, sure: set[str]) -> set[str] | None:
        if isinstance(node, ast.Break | ast.Continue):  # not legal alone, and they name nothing
            return None
        if isinstance(node, ast.Pass | ast.Global):
            return sure
        if isinstance(node, ast.Expr):
            return self.expression(node.value, sure)
        if isinstance(node, ast.Assign | ast.AugAssign) and _walrus(node):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.use(ast.Name(node.target.id, ast.Load()), sure)
            sure = self.expression(node.value, sure)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                sure = sure | self.bind(target, sure)
            return sure
        if isinstance(node, ast.AnnAssign | ast.Assert | ast.Raise | ast.Delete):
            self.stores |= _walrus(node)
        found = self.use(node, sure)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            self.star = True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            sure = sure | {node.name}  # not what a `global` inside may bind one day
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            bare = isinstance(node, ast.AnnAssign) and node.value is None
            sure = sure | (set() if bare else _bound_by(node))
        elif isinstance(node, ast.Delete):
            sure = sure - found.deletes
        return None if isinstance(node, ast.Raise) else sure


def _bound_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    return {part.id for target in targets for part in _targets(target) if isinstance(part, ast.Name)}


def _targets(target: ast.expr) -> list[ast.expr]:
    """The names, attributes and elements that an assignment target consists of."""
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [part for inner in target.elts for part in _targets(inner)]
    return [target]


def _walrus(node: ast.AST) -> set[str]:
    """The names that `:=` binds somewhere in a node."""
    return {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    """What is bound whichever of two ways was taken; a way that ends in `raise` does not count."""
    if one is None or other is None:
        return other if one is None else one
    return one & other
