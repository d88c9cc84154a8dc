"""One Jupyter server and one browser for all tests here, and notebooks opened in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.server import Server

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Quiet, offline, and able to run as root in a container.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    # no name but this machine's resolves: what a page needs from elsewhere is missing, and seen to be
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
FRONT_ENDS = ("lab", "notebook")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(240))


def chromium() -> str:
    """The browser to test with.

    Raises:
        LookupError: there is none; with the one thing to do.
    """
    chosen = os.environ.get("NBDIST_CHROMIUM")
    if chosen and shutil.which(chosen) is None:
        raise LookupError(f"NBDIST_CHROMIUM={chosen} is no program that can be run: set it to a Chromium")
    found = chosen or next((name for name in _NAMES if shutil.which(name)), None)
    if found is None:
        raise LookupError(
            "no Chromium is installed: `apt-get install chromium` as root (Debian), or set NBDIST_CHROMIUM"
        )
    return str(shutil.which(found))


# These are scoped to this folder, not to the session: while Playwright is up an event loop runs in the main thread,
# which jupyter_client and nbclient of the tests elsewhere would meet.


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    try:
        program = chromium()
    except LookupError as trouble:
        if os.environ.get("CI") or os.environ.get("NBDIST_REQUIRE_BROWSER"):
            pytest.fail(str(trouble))
        pytest.skip(str(trouble))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def open_notebook(server: Server, browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a notebook for one test: front-end, path, and the cells to write there (none: the file is there)."""
    from tests.browser.opened import Opened, write

    opened: list[Any] = []

    def open_one(front_end: str, path: str, cells: list[Any] | None = None, kernel: bool = True) -> Any:
        if cells is not None:
            write(server.root / path, cells)
        opened.append(Opened(server, browser, front_end, path, kernel))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    server.end_kernels()


@pytest.fixture(scope="module", params=FRONT_ENDS)
def notebook(request: pytest.FixtureRequest, server: Server, browser: Any) -> Iterator[Any]:
    """One notebook a module and front-end, with nbdist loaded; each test adds cells of its own."""
    yield from _shared(request, server, browser, request.param)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, server: Server, browser: Any) -> Iterator[Any]:
    """The same, in JupyterLab alone."""
    yield from _shared(request, server, browser, "lab")


def _shared(request: pytest.FixtureRequest, server: Server, browser: Any, front_end: str) -> Iterator[Any]:
    from tests.browser.opened import Opened, write

    path = f"{request.module.__name__.rpartition('.')[2]}-{front_end}.ipynb"
    write(server.root / path, ["%load_ext nbdist"])
    opened = Opened(server, browser, front_end, path)
    opened.ok(0)
    yield opened
    opened.close()
    server.end_kernels()
