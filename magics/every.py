"""`%distributed on | off`: every cell runs on the ranks, as if `%%distributed OPTIONS` were its first line.

By IPython's own ways: an input transformer puts the magic in front of what the user typed, before IPython sees it, and
events tell when a cell runs, so that what a running cell transforms itself (`%run script.ipy`, `%%time`) is left alone.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

# Cell magics that stay around the cell: what they make (a time, a captured output) is the notebook's.
AROUND = frozenset({"time", "capture"})
# Magics whose text is code of the user's: it runs where cells run.
OF_CODE = frozenset({"time", "timeit", "prun", "memit", "mprun", "lprun"})
# A cell that begins with one of these is about the notebook.
OF_THE_NOTEBOOK = frozenset({"distributed", "load_ext", "reload_ext", "unload_ext"})
_FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class EveryCell:
    """Follows the cells of one shell, and puts the magic in front of them while it is on.

    Attributes:
        options: the magic's line while it is on, else None.
        typed: what the user typed in the cell that runs now; None between cells.
    """

    has_side_effects = True  # IPython: not for deciding whether what is typed so far is complete

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.options: str | None = None
        self.typed: str | None = None
        self._depth = 0  # cells that run now: one, and those that it runs itself
        self._request: Any = None  # the frontend's request that began the outermost
        self._off = False  # a transformation of our own
        self._told = False
        self._here: str | None = None  # a cell that stays in the notebook
        self._wrapped = False  # the cell has the magic in front of it

    def install(self) -> None:
        self.shell.input_transformers_cleanup.append(self)
        for event, callback in self._events():
            self.shell.events.register(event, callback)

    def remove(self) -> None:
        self.shell.input_transformers_cleanup.remove(self)
        for event, callback in self._events():
            self.shell.events.unregister(event, callback)

    def _events(self) -> list[tuple[str, Any]]:
        return [
            ("pre_execute", self._begin),
            ("pre_run_cell", self._typed),
            ("post_execute", self._end),
        ]

    # ---------------------------------------------------------------- which cell runs

    def _parent(self) -> dict[str, Any]:
        """The frontend's message that is handled now; empty in a terminal."""
        get_parent = getattr(self.shell, "get_parent", None)
        try:
            return (get_parent() if get_parent is not None else None) or {}
        except LookupError:
            return {}

    def _running(self) -> bool:
        """A cell runs, and it was begun by the request that is handled now: one whose end was never told is over."""
        return self._depth > 0 and self._request == self._number()

    def _number(self) -> Any:
        return self._parent().get("header", {}).get("msg_id")

    def _typed_by_the_user(self) -> bool:
        """Frontends and their extensions run code of their own too: silently, and without a number."""
        content = self._parent().get("content") or {}
        return not content.get("silent", False) and content.get("store_history", True)

    def _begin(self) -> None:
        if self._running():
            self._depth += 1
        else:
            self._depth, self._request, self.typed = 1, self._number(), None

    def _typed(self, info: Any) -> None:
        if self._depth != 1:
            return
        self.typed = info.raw_cell
        if self._here is not None and self._here == info.raw_cell and not self._told:
            self._told = True
            print(
                "nbdist: this cell ran in the notebook: cells of magics and ! alone, and of another cell magic, do "
                "while `%distributed on` (said once; `%distributed?` tells more)",
                file=sys.stderr,
            )

    def _end(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self.typed = self._here = None
            self._wrapped = False

    def show_as_typed(self) -> None:
        """At the start of a cell: `In[n]` is what it would be without the magic in front, which was not typed."""
        history = getattr(getattr(self.shell, "history_manager", None), "input_hist_parsed", None)
        if history and self._wrapped and self.typed is not None and "distributed" in history[-1]:
            with contextlib.suppress(Exception):  # a cell whose own text cannot be transformed
                history[-1] = self.plain(self.typed).rstrip("\n")

    # ---------------------------------------------------------------- the magic in front

    @contextlib.contextmanager
    def _left_alone(self) -> Iterator[None]:
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def plain(self, text: str) -> str:
        """A text as plain Python, without the magic in front."""
        with self._left_alone():
            return self.shell.transform_cell(text)

    def __call__(self, lines: list[str]) -> list[str]:
        if self.options is None or self._off or self._running() or not self._typed_by_the_user():
            return lines
        wrapped = self._wrap("".join(lines))
        self._wrapped = wrapped is not None
        if wrapped is None:
            return lines
        return wrapped.splitlines(keepends=True)

    def _wrap(self, text: str) -> str | None:
        """The cell with the magic in front; None for one that stays in the notebook."""
        first, newline, rest = text.partition("\n")
        words = first[2:].split(None, 1) if first.startswith("%%") else []
        if words and words[0] in AROUND:
            inner = self._wrap(rest)
            return None if inner is None else first + newline + inner
        if first.startswith("%%"):
            if not words or words[0] not in OF_CODE:
                if words and words[0] != "distributed":
                    self._here = text.rstrip("\n")
                return None
        elif not self._has_code(text):
            return None
        return f"%%distributed {self.options}\n{text}"

    def _has_code(self, text: str) -> bool:
        """Is there anything but magics and `!`? A cell that cannot be read is IPython's to refuse."""
        try:
            body = compile(self.plain(text), "<cell>", "exec", _FLAGS).body
        except (SyntaxError, ValueError):
            return False
        if not body:
            return False
        names = [_magic(statement) for statement in body]
        if names[0] in OF_THE_NOTEBOOK:
            return False
        if any(name is None or name in OF_CODE for name in names):
            return True
        self._here = text.rstrip("\n")
        return False


def _magic(statement: ast.stmt) -> str | None:
    """The name of the magic that a statement is, `!` as "system"; None for Python."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    shell = call.func.value
    if not (isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython"):
        return None
    if call.func.attr in ("system", "getoutput"):
        return "system"
    if call.func.attr != "run_line_magic" or not call.args or not isinstance(call.args[0], ast.Constant):
        return None
    return str(call.args[0].value)
