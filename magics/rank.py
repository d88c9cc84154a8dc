"""Runs a cell on a rank as IPython would run it here: magics, `!cmd`, top-level await, displays, the last expression.

The one module of magics/ that lives inside a rank; the worker is told its name in the start message and knows it as
a CellRunner.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import linecache
import os
import shutil
import subprocess
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist import messages, state
from nbdist.magics import global_settings, rank_progress, rank_settings
from nbdist.magics.autoreload import reload_as_autoreload
from nbdist.magics.rank_display import RankDisplayHook, RankDisplayPublisher, show_last, what_was_shown
from nbdist.magics.rank_names import INJECTED, RunningRanks
from nbdist.shipping.versions import RankModules
from nbdist.worker.output import Output

_CONFIG = Config()
_CONFIG.HistoryManager.enabled = False
_CONFIG.InteractiveShell.xmode = "Context"


# Magics about the notebook's own shell, its history and its keyboard; on a rank they would do nothing, or harm.
_THE_NOTEBOOKS = [
    *("distributed", "store", "debug", "pdb", "history", "hist", "recall", "rep", "rerun", "macro", "save", "notebook"),
    *("edit", "ed", "pastebin", "connect_info", "qtconsole", "logstart", "logon", "logoff", "logstate", "logstop"),
]
# What a shell of its own would hide from %who.
_HIDDEN = ("In", "Out", "exit", "quit", "open", "display", "get_ipython")


def _refusal(magic: str) -> Any:
    def refuse(*arguments: str) -> None:
        raise UsageError(
            f"{magic} belongs to the notebook's own shell, and this cell runs on ranks: use it in an ordinary cell"
        )

    return refuse


class RankShell(InteractiveShell):
    """The shell that `get_ipython()` gives in a rank."""

    display_pub_class = RankDisplayPublisher
    displayhook_class = RankDisplayHook
    told_by_the_notebook = False

    def init_sys_modules(self) -> None:
        pass  # __main__ is the rank's namespace already

    def init_user_ns(self) -> None:
        pass  # In, Out, get_ipython, exit ... are the notebook's; also after a %reset here

    def init_magics(self) -> None:
        super().init_magics()
        for name in _THE_NOTEBOOKS:
            self.register_magic_function(_refusal(f"%{name}"), "line", name)
            self.register_magic_function(_refusal(f"%%{name}"), "cell", name)

    def reset(self, *arguments: Any, **more: Any) -> None:
        kept = {name: self.user_ns[name] for name in (*_HIDDEN, "_oh", "_ih", "_dh") if name in self.user_ns}
        super().reset(*arguments, **more)
        self.user_ns.update(kept)

    def enable_gui(self, gui: Any = None) -> None:
        pass  # %matplotlib inline asks for it; a rank has no event loop of a window

    def init_history(self) -> None:
        super().init_history()
        self.history_manager.enabled = False

    def init_display_formatter(self) -> None:
        super().init_display_formatter()
        self.display_formatter.active_types = [*self.display_formatter.format_types]

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        """Of an error after which the cell goes on: most often a `_repr_html_` that raised."""
        if self.told_by_the_notebook:
            return
        shown = what_was_shown(getattr(evalue, "__traceback__", None))
        if shown is not None:
            rank = RankDisplayPublisher.rank
            print(f"nbdist: rank {rank} cannot show a {shown}: {etype.__name__}: {evalue}", file=sys.stderr)
        print(self.InteractiveTB.stb2text(stb), file=sys.stderr)

    def system(self, command: str) -> None:
        """`!command`: its output in order with Python's own, and a Stop ends it as in a terminal."""
        command = self.var_expand(command, depth=1)
        program = shutil.which(os.environ.get("SHELL") or "sh") or "/bin/sh"  # as IPython's own
        with subprocess.Popen(
            [program, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                while chunk := os.read(process.stdout.fileno(), 65536):
                    sys.stdout.write(chunk.decode("utf-8", "replace"))
            except BaseException:
                process.kill()
                raise
        self.user_ns["_exit_code"] = process.returncode


class CellRunner:
    """One a rank; see nbdist.worker.runner."""

    injected = INJECTED

    def __init__(self, namespace: dict[str, Any], spec: dict[str, Any], output: Output) -> None:
        self._namespace = namespace
        self._rank, self._size = spec["rank"], spec["world_size"]
        self._told_of_folder = False
        self._loop: asyncio.AbstractEventLoop | None = None
        RankModules.upgrade = staticmethod(reload_as_autoreload)
        RankDisplayPublisher.output, RankDisplayPublisher.rank = output, self._rank
        keep = {name: sys.__dict__[name] for name in ("stdout", "stderr", "excepthook", "displayhook")}
        RankShell.clear_instance()
        self.shell = RankShell.instance(config=_CONFIG, user_module=sys.modules["__main__"], user_ns=namespace)
        for name in list(namespace):
            if name not in ("__builtins__", "__name__", "__doc__", "__loader__", "__spec__", "__package__"):
                del namespace[name]  # In, Out, exit ... are the notebook's
        for name, value in keep.items():
            setattr(sys, name, value)
        from IPython.display import display

        rank_progress.install()
        vars(builtins).update(get_ipython=lambda: self.shell, display=display)

    def prepare(self, cell: dict[str, Any]) -> None:
        values = {
            "rank": self._rank,
            "local_rank": self._rank,
            "world_size": self._size,
            "ranks": RunningRanks(cell["ranks"]),
            "device": state.current().device,
        }
        hidden = self.shell.user_ns_hidden
        for name in INJECTED:
            hidden.pop(name, None)
        for name in cell["inject"]:
            self._namespace[name] = hidden[name] = values[name]
        hidden.update({name: self._namespace[name] for name in _HIDDEN if name in self._namespace})
        rank_settings.apply(cell.get("settings", {}), self.shell)
        global_settings.put(cell.get("globals", {}))
        self._settings = global_settings.read_all()

    def run(self, cell: dict[str, Any], extra: Any) -> Any:
        for file, source in cell["sources"].items():
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        messages.known_as.update(cell.get("cells", {}))
        for kind, module, name, function in (extra or {}).get("formatters", ()):
            self.shell.display_formatter.formatters[kind].for_type_by_name(module, name, function)
        body, last = self._compile(cell["source"], cell["file"], cell["flags"])
        self.shell.execution_count = cell["count"]
        folder = _folder()
        history = self._namespace.setdefault("_dh", [folder])  # %cd wants it
        try:
            self._execute(body)
            if last is None:
                return None
            value = self._execute(last)
            show_last(self.shell, value, cell["source"], cell.get("shows", ""))
            return value
        finally:
            if self._namespace.get("_dh") is history and "_dh" not in cell["reads"]:
                del self._namespace["_dh"]
            self._note_folder(folder, cell)
            self.shell.events.trigger("post_execute")  # matplotlib's inline backend shows its figures here

    def _note_folder(self, before: str, cell: dict[str, Any]) -> None:
        """Every cell begins in the notebook's folder; who changes it here is told so, once."""
        if self._rank == cell["lead"] and not self._told_of_folder and _folder() != before:
            self._told_of_folder = True
            print(
                "nbdist: the folder is changed for this cell alone: %cd in an ordinary cell changes it for both",
                file=sys.stderr,
            )

    def settings(self) -> dict[str, Any]:
        return global_settings.changed(self._settings, global_settings.read_all())

    def finish(self, value: Any) -> None:
        pass

    def _compile(self, source: str, file: str, flags: int) -> tuple[Any, Any]:
        tree = ast.parse(source, file)
        last: ast.Expr | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body[-1]
            del tree.body[-1]
        body = compile(tree, file, "exec", flags, dont_inherit=True)
        if last is None:
            return body, None
        future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        for node in future:
            for alias in node.names:
                flags |= getattr(__import__("__future__"), alias.name).compiler_flag
        return body, compile(ast.Expression(last.value), file, "eval", flags, dont_inherit=True)

    def _execute(self, code: Any) -> Any:
        result = eval(code, self._namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            return self._await(result)
        return result

    def _await(self, coroutine: Any) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task], timeout=0.2))
            raise


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


def warm() -> None:
    """In the fork server: a first shell costs 20 ms, a second one 3."""
    RankShell.instance(config=_CONFIG)
    RankShell.clear_instance()


def make_runner(namespace: dict[str, Any], spec: dict[str, Any], output: Output) -> CellRunner:
    return CellRunner(namespace, spec, output)
