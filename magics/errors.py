"""A rank's exception, shown by Jupyter as if the cell had failed here: its own lines, no internals, causes kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn


def _shows(error: BaseException, lines: Any) -> None:
    try:
        error._render_traceback_ = lines  # type: ignore[attr-defined]
    except Exception:  # a class with __slots__: shown with our frames, which is ugly and not wrong
        pass


def raise_as_here(shell: Any, error: BaseException) -> NoReturn:
    """Raise an exception that `nbdist.launchers.failures.raisable` made: its traceback is the rank's."""
    traceback = error.__traceback__

    def lines() -> list[str]:
        try:
            told = shell.InteractiveTB.structured_traceback(type(error), error, traceback, tb_offset=0)
        except Exception as trouble:
            told = [f"{type(error).__name__}: {error}", f"(its traceback cannot be shown: {trouble})"]
        return told

    _shows(error, lines)
    print_without_our_frames(shell, error, lambda: traceback)
    raise error


def _asks_nobody(error: BaseException | None) -> bool:
    """Whether IPython prints it its own way and asks no `_render_traceback_`: a syntax error (of `exec`, or of an
    import), and where a group is in the chain of its causes.
    """
    if isinstance(error, SyntaxError):
        return True
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            return True
        error = error.__cause__ or error.__context__
    return False


def print_without_our_frames(shell: Any, error: BaseException, traceback: Callable[[], Any]) -> None:
    """Where IPython will not ask the error how it is shown: for this one, and once, the shell prints these frames."""
    if not _asks_nobody(error):
        return
    usual = shell.showtraceback
    had = "showtraceback" in vars(shell)

    def without_frames(*arguments: Any, **more: Any) -> None:
        if had:
            shell.showtraceback = usual
        else:
            del shell.showtraceback  # the instance's: the class's is back
        if sys.exc_info()[1] is error:
            error.__traceback__ = traceback()
        usual(*arguments, **more)

    shell.showtraceback = without_frames


def raise_plain(error: BaseException) -> NoReturn:
    """Raise an error of the user's call: its message says it all, and our frames would only hide it."""
    text = str(error)
    notes = list(getattr(error, "__notes__", ()))
    _shows(error, lambda: [f"{type(error).__name__}: {text}", *notes])
    raise error


def raise_syntax(shell: Any, error: SyntaxError) -> NoReturn:
    """A syntax error in the cell, found before anything started, shown as Jupyter shows it.

    IPython shows a SyntaxError with the frames through which it came, and asks nobody; for this one error, and once, it
    is told that it came through none.
    """
    usual = shell.showsyntaxerror

    def without_frames(filename: Any = None, running_compiled_code: bool = False) -> None:
        del shell.showsyntaxerror  # the instance's: the class's is back
        usual(filename, running_compiled_code and sys.exc_info()[1] is not error)

    shell.showsyntaxerror = without_frames
    raise error
