"""A rank's life: start, then receive a cell, run it, give back what it made, until the notebook is gone.

The main thread runs user code and nothing else may; a control thread reads every message, so that a rank which is
stuck still answers
where it is and can be cut free.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

from nbdist import state, system
from nbdist.config.detect import note_rank
from nbdist.shipping import Away, Parcel
from nbdist.shipping.link import Link, LinkClosed, Message
from nbdist.sockets import ESTABLISHED, connections
from nbdist.worker import cells, environment
from nbdist.worker.blackbox import BlackBox
from nbdist.worker.groups import Groups
from nbdist.worker.guests.torch_distributed import DefaultGroup
from nbdist.worker.holdings import device_memory, holdings
from nbdist.worker.interrupts import Interrupts
from nbdist.worker.one_cell import Pending, give_what_is_pending, run_cell
from nbdist.worker.output import Output
from nbdist.worker.postmortem import Postmortem
from nbdist.worker.resync import resync
from nbdist.worker.where import where

GUESTS = ("nbdist.worker.guests.torch_ddp", "nbdist.worker.guests.torch_fsdp")


def main(index: int, specs: list[dict[str, Any]]) -> None:
    """Runs in a fresh child of the fork server. Never returns."""
    for other, spec in enumerate(specs):  # every rank is given the descriptors of all: an end of file would never come
        if other != index:
            for handle in spec["files"]:
                handle.close()
    spec = specs[index]
    # multiprocessing forces `forkserver` as the default in its children; a DataLoader over a notebook's class then
    # fails.
    multiprocessing.set_start_method(None, force=True)
    control, stdout, stderr, records, place = (os.dup(handle.fileno()) for handle in spec.pop("files"))
    os.setsid()  # Jupyter's stop button signals the notebook's group: we relay it on purpose, and only then
    _die_with_the_supervisor(spec)
    link = Link.from_fd(control)
    cells.install()
    output = Output(stdout, stderr, records)
    os.close(stdout)
    os.close(stderr)
    link.send("hello", pid=os.getpid())
    try:
        rank = Rank(spec, link, output, place)
    except BaseException as error:
        with contextlib.suppress(LinkClosed):
            link.send("failed", error=f"{type(error).__name__}: {error}", whole=traceback.format_exc())
        os._exit(1)
    link.send("ready")
    rank.serve()


def _die_with_the_supervisor(spec: dict[str, Any]) -> None:
    watched = [spec["notebook"]]
    if not system.end_with_parent():  # by SIGKILL: torch had set SIGINT, which a rank survives
        # Both: each rank has a copy of the descriptor by whose end the fork server would know that the supervisor has
        # ended.
        watched += [os.getppid(), spec["supervisor"]]
    if os.getppid() == 1:
        os._exit(0)

    def watch(handles: list[system.Handle]) -> None:
        system.wait_for_one(handles)
        os.killpg(0, signal.SIGKILL)

    handles = [system.Handle(pid) for pid in watched]
    threading.Thread(target=watch, args=(handles,), daemon=True, name="nbdist-watch").start()


class Rank:
    """One rank.

    Args:
        spec: the start message: rank, world_size, pool, port, store_key, device, threads, runner, surroundings,
            notebook (its pid).
    """

    def __init__(self, spec: dict[str, Any], link: Link, output: Output, place: int) -> None:
        self.number: int = spec["rank"]
        self.cell: int | None = None  # the In[n] that runs, 0 for a call
        note_rank(self.number)
        self.link, self.output = link, output
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.interrupts = Interrupts()
        self.interrupts.install()
        self.black_box = BlackBox(place, self.interrupts.is_cell_file, self.interrupts.main_thread)
        self.postmortem = Postmortem(self.interrupts.is_cell_file)
        self.surroundings = environment.Surroundings(spec)
        self.surroundings.restore({})
        environment.set_threads(spec["threads"])
        environment.seed_as_a_fresh_process()
        environment.silence_false_alarms()
        self._choose_device(spec)
        self.default_group = DefaultGroup()
        self.groups = Groups(spec)
        self.groups.open()
        self.default_group.adopt()
        self.default_group.install()
        state.pool_groups = self.groups
        module = types.ModuleType("__main__")  # dataclasses, enum, typing and pickle look there
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.away = Away(self.namespace, self.number)
        self.pending: Pending | None = None  # a cell whose code has ended, and which has not given back what it made
        state.replaced_hooks.append(self.away.replaced)
        self.runner = importlib.import_module(spec["runner"]).make_runner(self.namespace, spec, output)
        for name in GUESTS:
            importlib.import_module(name).install()
        threading.Thread(target=self._read, daemon=True, name="nbdist-control").start()

    def _choose_device(self, spec: dict[str, Any]) -> None:
        import torch

        if spec["device"] == "cuda":
            if torch.cuda.device_count() <= spec["rank"]:
                built = " and was built without CUDA" if torch.version.cuda is None else ""
                raise RuntimeError(f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here{built}")
            torch.cuda.set_device(spec["rank"])
        # The variable that chooses devices has only this pool's: rank i has the i-th of them, as under torchrun.
        state.use_device(
            torch.device(spec["device"], *([spec["rank"]] if spec["device"] == "cuda" else ())), spec["why"]
        )

    # ---------------------------------------------------------------- control thread

    def _read(self) -> None:
        while True:
            try:
                message = self.link.receive()
            except LinkClosed:
                os.killpg(0, signal.SIGKILL)
                return
            try:  # whatever happens here, this thread goes on: it is the only way in
                if not self._answer_at_once(message):
                    self.inbox.put(message)
            except Exception:
                with contextlib.suppress(Exception):
                    self.link.send("trouble", whole=traceback.format_exc())

    def _answer_at_once(self, message: Message) -> bool:
        kind = message.kind
        if kind == "where":
            answer = where(self.interrupts)
            if self.cell is None:  # for those that wait for this rank
                answer["reached"] = self.groups.reached()
            self.link.send("where", query=message["query"], answer=answer)
        elif kind == "status":
            self.link.send("status", query=message["query"], answer=self._status())
        elif kind == "freeze":
            boundary = state.step_boundary
            step = boundary.freeze() if self.interrupts.running else None
            self.link.send("frozen", query=message["query"], answer=(step, boundary.coming))
        elif kind == "release":
            if message["target"] is not None:
                self.interrupts.asked = True
                self.agreed = True
            state.step_boundary.release(message["target"])
        elif kind == "abandon":
            self.interrupts.abandoned = True  # the next cell begins anew, and its message comes behind this one
        elif kind == "cut":
            self.interrupts.asked = True
            self.link.send("cut", query=message["query"], answer=self.groups.cut(message["store"], message["more"]))
        elif kind == "unfinished":
            self.link.send("unfinished", query=message["query"], answer=not all(map(_is_over, list(state.unfinished))))
        elif kind == "connections":
            ports = {one[:2] for one in connections().values() if one.state == ESTABLISHED}
            self.link.send("connections", query=message["query"], answer=ports)
        else:
            return False
        return True

    def _status(self) -> dict[str, Any]:
        device = state.current().device
        return {
            "cell": self.cell,
            "line": where(self.interrupts)["line"] if self.cell is not None else None,
            "device": str(device),
            "memory": device_memory(device),
            "holds": holdings(self.namespace, self.runner.injected),
        }

    # ---------------------------------------------------------------- main thread

    def serve(self) -> None:
        handlers = {
            "cell": self._cell,
            "give": self._give,
            "heal": self._heal,
            "peek": self._peek,
            "resync": self._resync,
            "debug": self._debug,
        }
        while True:
            try:
                message = self.inbox.get()
                handler = handlers.get(message.kind)
                if handler is not None:
                    handler(message)
            except LinkClosed:
                os._exit(0)
            except KeyboardInterrupt:  # a signal that came a moment late
                continue
            except BaseException:  # ours, not the user's: tell, and stay
                with contextlib.suppress(LinkClosed):
                    self.link.send("trouble", whole=traceback.format_exc())

    def _cell(self, message: Message) -> None:
        try:
            self.cell = message.fields.get("count", 0)
            cells.begin(message["cell"])
            run_cell(self, message)
        finally:
            self.cell = None

    def _give(self, message: Message) -> None:
        give_what_is_pending(self, message)

    def repair(self) -> None:
        """Wrappers that were left in the middle of something are put right, before anything else looks at them."""
        self.repaired = True
        self.call(state.interrupt_hooks, "after the interrupt: ")

    def call(self, hooks: Iterable[Callable[[], None]], when: str = "") -> None:
        """Call each of these; one that fails is told."""
        for hook in list(hooks):
            try:
                hook()
            except Exception as error:
                print(f"nbdist: {when}{type(error).__name__}: {error}", file=sys.stderr)

    def _heal(self, message: Message) -> None:
        error, how = None, None
        try:
            self.default_group.reopen()
            # What one rank rebuilds, all must: also those whose own part of the cell went well.
            if message["repair"] and not self.repaired:
                self.repair()
            if message["generation"]:
                gc.collect()  # what an interrupted cell's exception still holds in a circle: dead groups, with threads
                how = self.groups.heal(message["generation"], message["names"], message["count"])
            if how == "made again":
                self.default_group.adopt()
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
        self.link.send("healed", query=message["query"], answer={"error": error, "how": how})

    def _peek(self, message: Message) -> None:
        name, attributes, whole = message["name"], tuple(message["attributes"]), message["whole"]
        reached = None
        if whole:
            self.default_group.reopen()
        else:
            reached = self.away.reach_of(name, attributes)
        if reached is not None and message["asks"]:  # else it was asked for by name, and the notebook knows what it is
            parcel = Parcel(b"")
        else:
            parcel = self.away.peek(name, attributes, whole=whole)
        try:
            self.link.send("peeked", parcel.head, parcel.files, query=message["query"], answer=reached)
        finally:
            parcel.close()

    def _resync(self, message: Message) -> None:
        self.default_group.reopen()
        try:
            answer: Any = resync(self.namespace, self.runner.injected)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.link.send("resynced", query=message["query"], answer=answer)

    def _debug(self, message: Message) -> None:
        """A command of the notebook's %debug; expressions are the user's code, so they can be stopped."""
        self.interrupts.begin()
        answer: dict[str, Any] = {"text": "*** KeyboardInterrupt\n", "over": False}
        try:
            self.interrupts.start()
            answer = self.postmortem.answer(message["command"])
        except KeyboardInterrupt:
            pass
        finally:
            self.interrupts.end()
        self.link.send("debugged", query=message["query"], answer=answer)


def _is_over(one: Any) -> bool:
    """Whether what goes on behind the cells has been finished."""
    over: bool = one.finish(0)
    return over
