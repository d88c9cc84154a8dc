"""A rank for the shipping tests: an Away behind a socket. Started as a program by `peers.py`."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import socket
import struct
import sys
import traceback
import types
from typing import Any


def send(sock: socket.socket, value: Any, files: tuple[int, ...] | list[int] = ()) -> None:
    data = pickle.dumps(value, 5)
    sock.sendall(struct.pack("<QI", len(data), len(files)))
    for start in range(0, len(files), 250):
        socket.send_fds(sock, [b"f"], list(files[start : start + 250]))
    sock.sendall(data)


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = sock.recv(min(count - len(parts), 1 << 20))
        if not piece:
            raise EOFError
        parts += piece
    return bytes(parts)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    length, count = struct.unpack("<QI", _exactly(sock, 12))
    files: list[int] = []
    while len(files) < count:
        _, more, _, _ = socket.recv_fds(sock, 1, min(250, count - len(files)))
        files += more
    return pickle.loads(_exactly(sock, length)), files


class Peer:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reset(1)

    def reset(self, world: int) -> None:
        from nbdist.shipping import Away

        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.namespace["__builtins__"] = builtins
        self.namespace.update(rank=self.rank, world_size=world)
        self.away = Away(self.namespace, self.rank)

    def group(self, store: str, world: int) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=world)

    def decode(self, files: list[int], head: bytes) -> None:
        self.extra = self.away.receive(head, files)

    def commit(self) -> None:
        self.away.commit()

    def rollback(self) -> None:
        self.away.rollback()

    def run(self, source: str, stores: Any, reads: Any, lead: bool) -> str | None:
        self.away.begin(stores, reads, lead)
        try:
            exec(compile(source, "<cell>", "exec"), self.namespace)
        except BaseException:
            return traceback.format_exc()
        return None

    def call(self, reads: Any, lead: bool) -> None:
        function, arguments, keywords = self.extra
        self.away.begin((), reads, lead)
        self.result = function(*arguments, **keywords)

    def result_of(self) -> Any:
        return self.result

    def reach(self, **options: Any) -> Any:
        self.away._table.kinds.spread |= "torch.distributed.tensor" in sys.modules
        return self.away.reach(**options)

    def gather(self, *arguments: Any, **options: Any) -> None:
        self.away.gather(*arguments, **options)

    def give(self, **options: Any) -> Any:
        return self.away.give(**options)

    def peek(self, name: str, attributes: tuple[str, ...] = (), **options: Any) -> Any:
        return self.away.peek(name, attributes, **options)

    def evaluate(self, source: str) -> Any:
        """For tests only: what an expression gives on this rank, its own memory included."""
        return eval(source, self.namespace)

    def execute(self, source: str) -> None:
        exec(source, self.namespace)

    def tokens(self) -> int:
        return len(self.away._table.objects)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    peer = Peer(int(sys.argv[2]))
    import torch  # before the first command, so that it is not measured

    torch.set_num_threads(1)
    send(sock, ("ok", "hello"))
    while True:
        try:
            (name, arguments, options), files = receive(sock)
        except EOFError:
            return
        try:
            if name == "decode":
                arguments = (files, *arguments)
            elif name == "give" and options.pop("with_result", False):
                options["extra"] = peer.result
            result = getattr(peer, name)(*arguments, **options)
            parcel_files = getattr(result, "files", [])
            if hasattr(result, "head"):
                send(sock, ("parcel", result.head), parcel_files)
                result.close()
            else:
                send(sock, ("ok", result))
        except BaseException as error:
            with contextlib.suppress(Exception):
                pickle.loads(pickle.dumps(error))
                error.add_note(traceback.format_exc())
                send(sock, ("error", error))
                continue
            send(sock, ("error", RuntimeError(traceback.format_exc())))


if __name__ == "__main__":
    main()
