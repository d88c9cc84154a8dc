"""The process between the notebook and its ranks: it owns the fork server, the rendezvous store, and death.

Started by `nbdist.launchers.client`; it ends when the notebook's process ends, however that ends, and takes every
descendant with it:
it is a subreaper (so that daemonised grandchildren stay findable) and watches a pidfd of the notebook. End of file
on the control socket
would not do: a child that the notebook forked holds a copy of it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection, forkserver, util
from typing import Any

from nbdist import system
from nbdist.config import gpus
from nbdist.config.torch_facts import gpu_facts, torch_facts
from nbdist.launchers.processes import descendants, kill, kill_descendants
from nbdist.shipping.link import Link, LinkClosed
from nbdist.shipping.wire import FILES_A_RANK

RANK_MAIN = "nbdist.worker.main"
SWEEP_EVERY = 0.2  # seconds between looks for processes whose rank has died


# Process groups of ranks that may have left something behind. Empty where orphans are adopted: they are found below us.
groups: list[int] = []


def end() -> None:
    kill_descendants(os.getpid())
    end_groups(groups)
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # the fork server's socket; its own way out is atexit
    os._exit(0)


def end_groups(pids: Iterable[int]) -> None:
    """SIGKILL what these ranks have started and what stayed in their process groups."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def watch(notebook: int) -> None:
    """Ends us when the notebook's process ends."""
    handle = system.Handle(notebook)
    if os.getppid() == notebook:  # else it has ended before we looked
        system.wait_for_one([handle])
    end()


def own_children() -> tuple[int, set[int]]:
    """The fork server's pid, and all our children that are not what a rank left: asked before there are ranks.

    multiprocessing keeps both pids to itself; where it has other names for them, the server is the child that has our
    preloaded modules to import, so the one that was started last.
    """
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)  # type: ignore[attr-defined]
    if server is not None and tracker is not None:
        return server, {server, tracker}
    mine = {pid for pid, (parent, _) in system.parents().items() if parent == os.getpid()}
    return server or max(mine, default=0), mine


class Ranks:
    """The processes of one pool."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.context.processes]

    def alive(self) -> bool:
        return any(code is None for code in self.exit_codes())


class Supervisor:
    def __init__(self, link: Link, adopts: bool) -> None:
        self.link, self.adopts = link, adopts
        self.server, self.own = own_children()
        self.pools: dict[str, Ranks] = {}
        self.lock = threading.Lock()

    def open_store(self) -> int:
        """A rendezvous store on a loopback socket that we bound ourselves: no race for the port, nothing on other
        interfaces.
        """
        import torch.distributed as dist

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def start(self, pool: str, specs: list[dict[str, Any]], files: list[int]) -> list[int]:
        """Fork the ranks of a pool; the files are FILES_A_RANK for each, in order."""
        import torch.multiprocessing

        rank_main = importlib.import_module(RANK_MAIN).main
        # Connection is the one kind of descriptor that multiprocessing hands to a forkserver child.
        handles = [connection.Connection(fd) for fd in files]
        for index, spec in enumerate(specs):
            spec["files"] = handles[index * FILES_A_RANK : (index + 1) * FILES_A_RANK]
            spec["supervisor"] = os.getpid()
            spec["store_key"] = f"{pool}-{secrets.token_hex(8)}" if index == 0 else specs[0]["store_key"]
        try:
            context = torch.multiprocessing.start_processes(
                rank_main, (specs,), nprocs=len(specs), join=False, start_method="forkserver"
            )
        finally:
            for handle in handles:
                handle.close()
        with self.lock:
            self.pools[pool] = Ranks(context)
        if not self.adopts:
            groups.extend(context.pids())
        return context.pids()

    def sweep(self) -> None:
        """End what a dead rank left behind: its DataLoader workers and subprocesses are re-parented to us."""
        while True:
            time.sleep(SWEEP_EVERY)
            known = list(groups)  # before the table: a rank that starts meanwhile is not in it, and has not ended
            table = system.parents()
            if table.get(self.server, (0, "Z"))[1] == "Z":  # its ranks ended with it; the notebook starts another of us
                end()
            self._end_groups_of_the_dead(known, table)
            for pid, (parent, _) in table.items():
                if parent == os.getpid() and pid not in self.own:
                    for below in [*descendants(pid), pid]:
                        kill(below)
                    try:
                        os.waitpid(pid, os.WNOHANG)
                    except OSError:
                        pass

    def _end_groups_of_the_dead(self, known: list[int], table: dict[int, tuple[int, str]]) -> None:
        """Without adoption the orphans of a rank are init's; those that stayed in its process group are found by
        that.
        """
        for pid in known:
            if table.get(pid, (0, "Z"))[1] == "Z":
                groups.remove(pid)
                end_groups([pid])

    def serve(self) -> None:
        while True:
            try:
                message = self.link.receive()
            except LinkClosed:
                return
            try:
                answer = self.answer(message.kind, message.fields, message.files)
            except Exception as error:  # told to the notebook, which raises it there
                answer = {"error": f"{type(error).__name__}: {error}"}
            try:
                self.link.send("answer", **answer)
            except LinkClosed:
                return

    def answer(self, kind: str, fields: dict[str, Any], files: list[int]) -> dict[str, Any]:
        if kind == "start":
            return {"pids": self.start(fields["pool"], fields["specs"], files)}
        if kind == "exit codes":
            return {"codes": self.pools[fields["pool"]].exit_codes()}
        if kind == "devices":
            return {"devices": gpus.look(fields["environment"])}
        if kind == "facts":
            return {"facts": [*torch_facts(fields["environment"]), *gpu_facts()]}
        if kind == "end pool":
            ranks = self.pools.pop(fields["pool"], None)
            if ranks is not None:
                for process in ranks.context.processes:
                    process.kill()
                for process in ranks.context.processes:
                    process.join(2)
            return {}
        raise ValueError(f"unknown request {kind!r}")


def main(fd: int, notebook: int, preload: list[str]) -> None:
    """The supervisor's life. Sends one `up` message when a start would be quick."""
    adopts = system.adopt_orphans()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # a module that asks for CUDA in the fork server must not start it
    )
    os.environ["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = (
        "YES"  # macOS ends children of a process that uses its frameworks
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter's stop button is for the notebook alone
    threading.Thread(target=watch, args=(notebook,), daemon=True).start()
    link = Link.from_fd(fd)
    os.environ["NBDIST_SUPERVISOR"] = str(os.getpid())
    os.environ["NBDIST_PRELOAD"] = ",".join(preload)
    multiprocessing.set_forkserver_preload(["nbdist.launchers.preload"])
    forkserver.ensure_running()
    del os.environ["NBDIST_SUPERVISOR"], os.environ["NBDIST_PRELOAD"]
    supervisor = Supervisor(link, adopts)
    try:
        port = supervisor.open_store()
        link.send("up", pid=os.getpid(), server=supervisor.server, port=port)
    except Exception as error:
        link.send("up", error=f"{type(error).__name__}: {error}")
        end()
    threading.Thread(target=supervisor.sweep, daemon=True).start()
    supervisor.serve()
    end()
