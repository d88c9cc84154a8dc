"""Progress bars in a rank: text, since a rank has no widgets and no terminal.

`tqdm.auto` and transformers choose text by themselves: they look for a kernel and find none.
"""

from __future__ import annotations

import io
import weakref
from types import ModuleType
from typing import Any

from IPython.display import display

from nbdist.worker.imports import when_imported

_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


def install() -> None:
    """Once, at the start of a rank; nothing is imported for it."""
    when_imported("tqdm.notebook", _tqdm)
    when_imported("rich.console", _rich)
    when_imported("rich.live", _rich_live)


def _tqdm(module: ModuleType) -> None:
    """Asked for by name, the bar for notebooks would be a widget, whose messages nobody here would carry."""
    from tqdm.std import tqdm, trange

    for name in ("tqdm_notebook", "tqdm"):
        setattr(module, name, tqdm)
    for name in ("tnrange", "trange"):
        setattr(module, name, trange)


def _rich(module: ModuleType) -> None:
    """A console writes displays, as in a notebook. rich looks for the class of a kernel's shell and finds none; then
    it would take ipykernel's FORCE_COLOR for a terminal whose cursor can be moved, and write a bar anew at each step.
    """
    usual = module.Console.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("file") is None and options.get("force_terminal") is None:
            options.setdefault("force_jupyter", True)
        usual(self, *args, **options)

    module.Console.__init__ = init


def _rich_live(module: ModuleType) -> None:
    """What moves (bars, `Live`, a status) is a display that is updated; rich would take a widget for it."""
    live: Any = module.Live
    refresh, stop = live.refresh, live.stop
    handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def show(self: Any, data: dict[str, str]) -> None:
        if self in handles:
            handles[self].update(data, raw=True)
        else:
            handles[self] = display(data, raw=True, display_id=True)

    def refresh_here(self: Any) -> None:
        if not self.console.is_jupyter:
            refresh(self)
            return
        from rich.console import Console

        page = Console(file=io.StringIO(), record=True, width=self.console.width, force_terminal=True)
        page.print(self.renderable)
        told = page.export_text(clear=False)
        show(self, {"text/html": page.export_html(code_format=_PAGE, inline_styles=True), "text/plain": told})

    def stop_here(self: Any) -> None:
        stop(self)
        if self.console.is_jupyter and self.transient and self in handles:
            show(self, {"text/html": "", "text/plain": ""})

    live.refresh, live.stop = refresh_here, stop_here
