"""Process groups of a rank, in a group of one: cut, healed in place, made again; the default one closed and opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry
from torch.nn.parallel import DistributedDataParallel

from nbdist import sockets
from nbdist.worker import backends
from nbdist.worker.groups import Groups
from nbdist.worker.guests.torch_distributed import DefaultGroup

OURS = ("init_process_group", "destroy_process_group", "_new_process_group_helper")


@pytest.fixture
def rank() -> Iterator[tuple[Groups, DefaultGroup]]:
    """As nbdist.worker.main.Rank makes them."""
    before = {name: getattr(registry, name) for name in OURS}
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    default = DefaultGroup()
    groups = Groups({"rank": 0, "world_size": 1, "port": store.port, "store_key": "key", "device": "cpu"})
    groups.open()
    default.adopt()
    default.install()
    yield groups, default
    for name, function in before.items():
        setattr(registry, name, function)
        if hasattr(dist, name):
            setattr(dist, name, function)
    default.reopen()
    dist.destroy_process_group()
    del store


def works(group: Any = None) -> None:
    value = torch.ones(2)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [1.0, 1.0]


def heal(groups: Groups, generation: int) -> str:
    return groups.heal(generation, sorted(group.name for group in groups.known()), groups.count())


def test_this_torch_can_heal_in_place(rank: tuple[Groups, DefaultGroup]) -> None:
    """Where this fails, torch's private interface has changed: look at `_heal_one`."""
    assert rank[0].self_test()
    assert rank[0].heal_works()


def test_this_torch_lets_replaced_backends_end(rank: tuple[Groups, DefaultGroup]) -> None:
    """Where this fails, a private symbol of torch has changed: look at nbdist.worker.backends."""
    assert backends.works()
    assert not backends.take_out(dist.HashStore()), "only from what is a ProcessGroup"


def test_healed_groups_are_the_same_objects(rank: tuple[Groups, DefaultGroup]) -> None:
    groups, _ = rank
    mine, world = dist.new_group([0]), registry.GroupMember.WORLD
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    assert {group.ranks for group in groups.known()} == {(0,)}
    for generation in (1, 2, 3):
        groups.cut(store_too=generation == 2)
        assert heal(groups, generation) == "healed"
        assert registry.GroupMember.WORLD is world
        works()
        works(mine)
        model(torch.ones(1, 2)).sum().backward()
        works(dist.new_group([0]))
        DistributedDataParallel(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()
        groups.store.set("after", "wards")
        assert groups.store.get("after") == b"wards"


def test_a_connection_that_gets_the_number_of_a_closed_socket_is_noted(rank: tuple[Groups, DefaultGroup]) -> None:
    """A backend that is replaced closes its listener while the next one connects; what is not noted is not cut."""
    groups, _ = rank
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as replaced:
        mine = socket.create_connection(listener.getsockname())
        before = sockets.connections()
        here = socket.create_connection(listener.getsockname())
        os.dup2(here.fileno(), replaced.fileno())
        here.close()
        groups._note(before)
        noted = set(groups._noted)
        groups._noted.clear()
        assert replaced.fileno() in noted
        assert mine.fileno() not in noted
        mine.close()


def test_what_was_not_noted_is_cut_when_named(rank: tuple[Groups, DefaultGroup]) -> None:
    groups, _ = rank
    with socket.create_server(("127.0.0.1", 0)) as listener:
        named, mine = (socket.create_connection(listener.getsockname()) for _ in range(2))
        assert groups.cut(store_too=False) == 0
        assert groups.cut(store_too=False, more=[(named.getsockname()[1], named.getpeername()[1])]) == 1
        assert named.recv(1) == b""
        listener.accept()[0].close()
        there, _ = listener.accept()
        mine.sendall(b"x")
        assert there.recv(1) == b"x"
        for sock in (named, mine, there):
            sock.close()


def test_names_of_new_groups_follow_the_largest_count(rank: tuple[Groups, DefaultGroup]) -> None:
    """A rank that has made fewer groups than another would give the next one another name."""
    groups, _ = rank
    groups.heal(1, [], groups.count() + 5)
    assert groups.count() >= 6
    count = groups.count()
    groups.heal(2, [], 1)
    assert groups.count() == count


def test_made_again_when_it_does_not_work(
    rank: tuple[Groups, DefaultGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    groups, default = rank

    def broken() -> bool:
        raise AttributeError("_register_backend")

    groups.self_test = broken  # type: ignore[method-assign]
    old = registry.GroupMember.WORLD
    for generation in (1, 2):
        default.reopen()
        assert heal(groups, generation) == "made again"
        default.adopt()
        assert registry.GroupMember.WORLD is not old
        works()
        old = registry.GroupMember.WORLD
    told = capsys.readouterr().err
    assert told.count("is not possible with torch") == 1
    assert "_register_backend" in told
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    works()


def test_where_collectives_stand(rank: tuple[Groups, DefaultGroup]) -> None:
    groups, _ = rank
    before = groups.status()
    works()
    after = groups.status()
    assert before["known"] is after["known"]
    assert not after["point to point"]
    # torch keeps the record of groups that earlier tests of this process have dropped
    moved = {name: where for name, where in after["groups"].items() if where != before["groups"].get(name)}
    assert len(moved) == 1, (before, after)
    for begun, ended in moved.values():
        assert begun == ended


# ---------------------------------------------------------------- the default group


def test_closed_and_opened(rank: tuple[Groups, DefaultGroup]) -> None:
    _, default = rank
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="closed already"):
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1)
    works()
    dist.destroy_process_group(dist.group.WORLD)
    assert not dist.is_initialized()
    default.reopen()
    works()


def test_refused(rank: tuple[Groups, DefaultGroup]) -> None:
    with pytest.raises(ValueError, match="starts with it open"):
        dist.init_process_group("gloo")
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"world_size=2\): this is rank 0 of a pool of 1; .* -n 2"):
        dist.init_process_group("gloo", world_size=2, rank=0)
    with pytest.raises(ValueError, match="rank=1"):
        dist.init_process_group("gloo", rank=1)
    assert not dist.is_initialized()


def test_what_is_not_followed_is_said_once(
    rank: tuple[Groups, DefaultGroup], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("nccl", timeout=timedelta(seconds=5))
        works()
    told = capsys.readouterr().err
    assert told.count("goes on with gloo") == 1
    assert told.count("keeps its own timeout") == 1


def test_other_groups_are_really_destroyed(rank: tuple[Groups, DefaultGroup]) -> None:
    mine = dist.new_group([0])
    dist.destroy_process_group(mine)
    assert mine not in registry._world.pg_map
    works()
