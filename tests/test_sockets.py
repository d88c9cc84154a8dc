"""Sockets are noted, and shut down only while their descriptor still is what was noted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import sockets

Pair = tuple[socket.socket, socket.socket]


def make_pair() -> Pair:
    listener = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listener.getsockname())
    there, _ = listener.accept()
    listener.close()
    return here, there


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = make_pair()
    yield here, there
    here.close()
    there.close()


def noted(sock: socket.socket) -> sockets.Connection:
    return sockets.Connection(sock.getsockname()[1], sock.getpeername()[1], sockets.ESTABLISHED)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connections_of_this_process(pair: Pair) -> None:
    found = sockets.connections()
    for sock in pair:
        assert found[sock.fileno()] == noted(sock)


def test_the_way_without_proc_finds_the_same(pair: Pair) -> None:
    before = descriptors()
    found = sockets._connections_by_asking()
    assert descriptors() == before
    for sock in pair:
        assert found[sock.fileno()] == noted(sock)


def test_shut_down_frees_both_ends(pair: Pair) -> None:
    here, there = pair
    ended = threading.Event()

    def wait() -> None:
        assert there.recv(1) == b""
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert sockets.shut_down(here.fileno(), noted(here))
    thread.join(5)
    assert ended.is_set()
    assert here.recv(1) == b""
    assert here.fileno() >= 0  # closed by its owner only


def test_a_closed_descriptor_is_left_alone() -> None:
    here, there = make_pair()
    fd, connection = here.fileno(), noted(here)
    here.close()
    before = descriptors()
    assert not sockets.shut_down(fd, connection)
    assert descriptors() == before
    there.close()


def test_a_number_that_now_is_a_users_file(tmp_path: Path) -> None:
    here, there = make_pair()
    fd, connection = here.fileno(), noted(here)
    with open(tmp_path / "mine", "w+") as file:
        os.dup2(file.fileno(), fd)
        before = descriptors()
        assert not sockets.shut_down(fd, connection)
        assert descriptors() == before, "the duplicate is closed again"
        os.write(fd, b"still mine")
        assert (tmp_path / "mine").read_text() == "still mine"
    here.close()
    there.close()


def test_a_number_that_now_is_another_connection(pair: Pair) -> None:
    here, there = make_pair()
    fd, connection = here.fileno(), noted(here)
    mine, other = pair
    os.dup2(mine.fileno(), fd)
    assert not sockets.shut_down(fd, connection)
    mine.sendall(b"still mine")
    assert other.recv(100) == b"still mine"
    here.close()
    there.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_number_that_now_is_a_unix_socket(kind: socket.SocketKind) -> None:
    """Such a socket has no ports to compare: it is not the one, and nothing is raised."""
    here, there = make_pair()
    fd, connection = here.fileno(), noted(here)
    mine, other = socket.socketpair(socket.AF_UNIX, kind)
    os.dup2(mine.fileno(), fd)
    assert not sockets.shut_down(fd, connection)
    mine.sendall(b"still mine")
    assert other.recv(100) == b"still mine"
    for sock in (here, there, mine, other):
        sock.close()


def test_a_listener_and_an_unconnected_socket() -> None:
    here, there = make_pair()
    connection = noted(here)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as idle:
        for sock in (listener, idle):
            assert not sockets.shut_down(sock.fileno(), connection)
        socket.create_connection(listener.getsockname()).close()
    here.close()
    there.close()


def test_numbers_that_change_hands_all_the_time() -> None:
    """Another thread opens and closes connections under the very number that we try to shut down: none is ever hit."""
    here, there = make_pair()
    fd, connection = here.fileno(), noted(here)
    here.close()
    there.close()
    rounds, hit, end = [0, 0], [], threading.Event()

    def user(number: int) -> None:
        while not end.is_set():
            mine, other = make_pair()
            mine.sendall(b"x")
            if other.recv(1) != b"x":
                hit.append(mine)
            mine.close()
            other.close()
            rounds[number] += 1

    threads = [threading.Thread(target=user, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        while min(rounds) < 300 and all(thread.is_alive() for thread in threads):
            assert not sockets.shut_down(fd, connection)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert hit == []
    assert min(rounds) >= 300
