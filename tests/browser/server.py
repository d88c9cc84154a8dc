"""A Jupyter server of this environment with private folders, which serves JupyterLab and Notebook 7 to a browser."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from tests.kernel.notebook import MARK, marked_with, wait_gone

START = 90.0  # seconds; 1.5 on an idle machine

# Whatever else is installed must not take part: some wrap every kernel or rewrite every output.
_FOREIGN_SERVER = ("jupyter_distributed", "ipyparallel", "jupyter_collaboration", "jupyter_lsp")
_FOREIGN_LAB = ("jupyter-distributed", "ipyparallel-labextension", "@jupyter/collaboration-extension")
_PRIVATE = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "IPYTHONDIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
)


class Server:
    """Use as a context manager; no process of it is left afterwards, kernels and ranks included.

    Args:
        folder: empty; gets the notebooks (`root`), the private folders and the log.

    Raises:
        RuntimeError: it ended before it answered; with its log.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.token = secrets.token_hex(16)
        port = _free_port()
        self.base = f"http://127.0.0.1:{port}"
        self.private = {name: folder / name.lower() for name in _PRIVATE}
        self._configure()
        self._log = folder / "server.log"
        command = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            *(f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"),
            *("--LabApp.extension_manager=readonly", "--LabApp.news_url="),  # asks nobody outside
            "--ServerApp.log_level=WARN",
        ]
        own = {name: str(path) for name, path in self.private.items()}
        environment = {**os.environ, **own, **dict([self.mark.split("=")]), "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        for path in self.private.values():
            path.mkdir()
        config = self.private["JUPYTER_CONFIG_DIR"]
        extensions = {"jupyterlab": True, "notebook": True, **dict.fromkeys(_FOREIGN_SERVER, False)}
        # window.jupyterapp, in either front-end: commands and models are asked directly
        seen = {"expose_app_in_browser": True}
        _write(config / "jupyter_server_config.json", {"ServerApp": {"jpserver_extensions": extensions}})
        _write(config / "jupyter_lab_config.json", {"LabApp": seen})
        _write(config / "jupyter_notebook_config.json", {"JupyterNotebookApp": seen})
        _write(config / "labconfig" / "page_config.json", {"disabledExtensions": dict.fromkeys(_FOREIGN_LAB, True)})
        news = {"fetchNews": "false", "checkForUpdates": False}  # a pop-up, and a question to jupyter.org
        apputils = self.private["JUPYTERLAB_SETTINGS_DIR"] / "@jupyterlab" / "apputils-extension"
        _write(apputils / "notification.jupyterlab-settings", news)

    def _wait(self) -> None:
        end = time.monotonic() + START
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"the Jupyter server ended with {self._process.returncode}:\n{self.log()}")
            try:
                self.ask("status")
                return
            except OSError:
                if time.monotonic() > end:
                    raise RuntimeError(f"the Jupyter server does not answer after {START} s:\n{self.log()}") from None
                time.sleep(0.1)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def ask(self, path: str, method: str = "GET", timeout: float = 5.0) -> Any:
        """One request to its API, like "sessions"; what it answers."""
        request = urllib.request.Request(
            f"{self.base}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def kernels(self) -> list[str]:
        return [kernel["id"] for kernel in self.ask("kernels")]

    def end_kernels(self) -> None:
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE", timeout=30)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.ask("shutdown", "POST")  # which ends the kernels as well
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        left = wait_gone(marked_with(self.mark), 5.0)
        for process in left:
            process.kill()
        assert not left, f"left behind after the server's end: {[(p.pid, p.name()) for p in left]}"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
