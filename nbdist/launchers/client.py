"""The notebook's side of the supervisor: starting it in the background, and asking it for things."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from nbdist.config.gpus import CHOOSES, DEVICE_FILES, Devices
from nbdist.launchers.processes import kill_descendants
from nbdist.launchers.shield import shielded
from nbdist.shipping.link import Link, LinkClosed, Message

END_LIMIT = 0.5  # seconds for the supervisor to end by itself
START_LIMIT = 120.0  # seconds until the supervisor must have imported torch; a cold disk is slow

# What the fork server imports, so that a rank has it at once. The worker brings torch.
PRELOAD = ("nbdist.worker.main", "torch.utils.data", "nbdist.worker.calls")


class SupervisorLost(RuntimeError):
    """The supervisor could not start, or has ended; the message has its last words."""


class Supervisor:
    """A running supervisor process. `warm()` returns at once; `up()` waits until ranks can be forked.

    Args:
        preload: modules that every rank of this process will need, besides the worker.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        here, there = Link.pair()
        self.link = here
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = [*PRELOAD, *preload]
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from nbdist.launchers.supervisor import main; "
            f"main({there.fileno()}, {os.getpid()}, {arguments!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[there.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
        )
        there.close()
        self._lock = threading.Lock()
        self._up: Message | None = None
        self._lost = False  # its end of the socket is closed: it is ending, or has

    @property
    def alive(self) -> bool:
        return not self._lost and self.process.poll() is None

    @property
    def is_up(self) -> bool:
        """Whether `up()` would return at once."""
        return self._up is not None or bool(select.select([self.link], [], [], 0)[0])

    def is_ending(self, within: float = 0.5) -> bool:
        """It has ended, or does so now: its fork server is gone."""
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def up(self) -> Message:
        """Wait until the fork server is ready. Its fields: pid, server, port of the store."""
        with self._lock:
            if self._up is None:
                # Waiting may be interrupted, reading a message may not: the next one would begin in its middle.
                if not select.select([self.link], [], [], START_LIMIT)[0]:
                    raise SupervisorLost(self._last_words("did not start", f"nothing within {START_LIMIT:.0f} s"))
                try:
                    with shielded():
                        message = self.link.receive()
                except LinkClosed as error:
                    raise SupervisorLost(self._last_words("did not start", error)) from None
                if message.fields.get("error"):
                    raise SupervisorLost(self._last_words("could not start", message["error"]))
                self._up = message
        return self._up

    def request(self, kind: str, files: Sequence[int] = (), /, **fields: Any) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises:
            SupervisorLost: it is gone, or could not do it; the message says why.
        """
        self.up()
        with self._lock:
            try:
                with shielded():
                    self.link.send(kind, b"", files, **fields)
                    answer = self.link.receive().fields
            except LinkClosed as error:
                self._lost = True
                raise SupervisorLost(self._last_words("has ended", error)) from None
        if "error" in answer:
            raise SupervisorLost(f"the supervisor could not do {kind!r}: {answer['error']}")
        return answer

    def _last_words(self, what: str, why: object) -> str:
        self._words.seek(0)
        words = self._words.read()[-2000:].decode("utf-8", "replace").strip()
        return f"nbdist's supervisor process {what}: {why}" + (f"\n{words}" if words else "")

    def end(self) -> None:
        """End it, and with it every rank."""
        kill_descendants(self.process.pid)
        self.link.close()  # it ends by that, and tidies up
        try:
            self.process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._words.close()


_current: Supervisor | None = None
_guard = threading.Lock()
_preload: tuple[str, ...] = ()


def supervisor(preload: Sequence[str] = ()) -> Supervisor:
    """This process's supervisor; started when there is none that lives. A forked child starts its own."""
    global _current, _preload
    with _guard:
        _preload = tuple(dict.fromkeys([*_preload, *preload]))
        if _current is None or _current_pid != os.getpid() or not _current.alive:
            _start()
        assert _current is not None
        return _current


_current_pid = 0


def _start() -> None:
    global _current, _current_pid
    _current, _current_pid = Supervisor(_preload), os.getpid()


_devices: dict[tuple[str | None, ...], Devices] = {}


def devices() -> Devices:
    """GPUs that ranks could use with the environment as it is now, counted in the supervisor: this process imports
    and initialises nothing for it.
    """
    if sys.platform == "linux" and not any(map(os.path.exists, DEVICE_FILES)):
        return Devices()
    key = tuple(map(os.environ.get, CHOOSES))
    if key not in _devices:
        _devices[key] = supervisor().request("devices", environment=dict(os.environ))["devices"]
    return _devices[key]


def facts() -> list[tuple[str, str]]:
    """What torch can do here, told by the supervisor, which has it.

    Raises:
        SupervisorLost: it could not start (torch is missing, or broken); the message has its last words.
    """
    told: list[tuple[str, str]] = supervisor().request("facts", environment=dict(os.environ))["facts"]
    return told


def end_supervisor() -> None:
    """End this process's supervisor, if there is one."""
    global _current
    with _guard:
        if _current is not None and _current_pid == os.getpid():
            _current.end()
        _current = None
