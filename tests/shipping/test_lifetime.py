"""Memory: what is shared, what stays private, and that it is freed."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest

from nbdist.shipping import Home

from .peers import Notebook


def test_new_view_of_known_memory_shares_it_on_the_rank(nb: Notebook) -> None:
    nb.here("import torch, numpy as np; t=torch.zeros(50000); a=np.zeros(50000)")
    nb.cell("r=t[0].item()+a[0]")
    nb.here("v=t[100:200]; w=a[::2]; n=t.numpy()")
    nb.cell("v.fill_(3); w[1]=4; n[0]=5; r=(t[150].item(), a[2], t[0].item())")
    assert nb["r"] == (3, 4, 5)
    assert nb["t"][150] == 3 and nb["a"][2] == 4 and nb["n"][0] == 5 == nb["t"][0]


def test_view_made_on_the_rank_shares_memory_in_the_notebook(nb: Notebook) -> None:
    nb.here("import torch, numpy as np; t=torch.zeros(50000); a=np.zeros(500); d=torch.zeros(10)")
    nb.cell("v=t[100:200]; w=a[::-1]; x=torch.from_numpy(a); y=d.numpy()")
    nb.here("v.fill_(3); w[0]=4; x[0]=2; y[1]=7")
    assert nb["t"][150] == 3 and nb["a"][-1] == 4 and nb["a"][0] == 2 and nb["d"][1] == 7


def test_writes_of_a_rank_stay_its_own(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(1<<18)")
    nb.cell("r=t.sum().item()")
    for remote in nb.remotes:
        remote.ask("execute", "t[5]=rank+1")
    assert [nb.on(rank, "t[5].item()") for rank in (0, 1)] == [1.0, 2.0] and nb["t"][5] == 0


def test_unchanged_tensor_is_not_sent_again(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(1<<20)")
    nb.cell("r=t.sum().item()")
    assert nb.size > 4 << 20
    nb.cell("r=t.sum().item()")
    assert nb.size < 2000 and nb.returned < 2000


def test_deleted_name_is_freed_on_both_sides(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(1<<20); keep=[1]")
    nb.cell("keep.append(t.sum().item()); import weakref; wr=weakref.ref(t)")
    here = weakref.ref(nb["t"])
    nb.here("del t")
    nb.home.prune()
    gc.collect()
    assert here() is None
    nb.cell("keep.append(1)")
    assert not nb.on(0, "'t' in globals()") and nb.on(0, "wr() is None")


def test_element_dropped_from_a_list_is_freed_on_both_sides(nb: Notebook) -> None:
    nb.here("import torch; ts=[torch.zeros(1<<20) for _ in range(3)]")
    nb.cell("import weakref; wr=weakref.ref(ts[1]); r=len(ts)")
    here = weakref.ref(nb["ts"][1])
    nb.here("del ts[1]")
    nb.home.prune()
    gc.collect()
    assert here() is None
    nb.cell("r=len(ts)")
    gc.collect()
    assert nb["r"] == 2
    for remote in nb.remotes:
        remote.ask("execute", "import gc; gc.collect()")
    assert nb.on(0, "wr() is None")


def test_rebinding_many_times_does_not_grow_the_tables(nb: Notebook) -> None:
    nb.here("x=[0]")
    nb.cell("y=[x]")
    for index in range(5):
        nb.here(f"x=[[{index}], [1]]")
        nb.cell("y=[x]")
    tokens = [remote.ask("tokens") for remote in nb.remotes]
    assert len(nb.home._table.objects) < 12 and max(tokens) < 16, tokens


def test_memory_files_are_freed_when_unmapped(nb: Notebook) -> None:
    before = [nb.files(rank) for rank in (0, 1)]
    nb.here("import torch; t=torch.ones(8<<18)")
    nb.cell("r=t[0].item()")
    assert [len(nb.files(rank) - before[rank]) for rank in (0, 1)] == [1, 1]
    nb.here("del t")
    nb.cell("r=1")
    for remote in nb.remotes:
        remote.ask("execute", "import gc; gc.collect()")
    assert [nb.files(rank) - before[rank] for rank in (0, 1)] == [set(), set()]


def test_a_long_session_stays_flat(nb: Notebook) -> None:
    """Rebound tensors, lists of lists made anew, objects of ranks, deleted names: nothing of them stays."""
    look = "(len(__import__('os').listdir('/proc/self/fd')), len(open('/proc/self/maps').readlines()), rss())"
    rss = "def rss(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])"
    nb.here("import torch, numpy as np")
    for remote in nb.remotes:
        remote.ask("execute", rss)

    def seen() -> list[tuple[int, ...]]:
        scope: dict[str, Any] = {}
        exec(rss, scope)
        counts = [len(nb.home._table.objects), *(remote.ask("tokens") for remote in nb.remotes)]
        here = (len(nb.home._table.snapshots), len(nb.home._handles), *eval(look, scope))
        return [tuple(counts), here, nb.on(0, look), nb.on(1, look)]

    for index in range(150):
        nb.here(f"big=torch.full((1<<19,), {index}.); rows=[[{index}, [j]] for j in range(20)]; extra{index}=[1]")
        nb.cell(
            f"out=[r[0] for r in rows]; rows.append([rank]); own=np.zeros(1<<17); gen=(i for i in rows); z=extra{index}"
        )
        nb.here(f"del extra{index}")
        if index == 60:
            first = seen()
    last = seen()
    assert last[0] == first[0]
    assert last[1][:3] == first[1][:3] and [s[-3] for s in last[2:]] == [s[-3] for s in first[2:]]
    for before, after in zip(first[1:], last[1:], strict=True):
        assert after[-2] <= before[-2] + 20 and after[-1] <= before[-1] + (
            16 << 10
        )  # mappings; KiB: one round is 3 MiB


def test_no_room_for_descriptors_is_said_before_anything_is_sent(nb: Notebook) -> None:
    import resource

    import psutil  # noqa: F401 (loaded, as in a notebook whose `%distributed status` was asked)

    nb.here("import torch; t=torch.ones(1<<20); small=[1]")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]  # fills the numbers below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="no room for more open files"):
            nb.home.ship({"t", "small"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in held:
            os.close(file)
    nb.cell("t[0]=5; small.append(2)")
    assert nb["t"][0] == 5 and nb["small"] == [1, 2]


def test_many_large_tensors_need_few_descriptors(nb: Notebook) -> None:
    nb.here("import torch; ts=[torch.ones(1<<15) for _ in range(400)]")
    before = len(os.listdir("/proc/self/fd"))
    nb.cell("r=sum(t[0].item() for t in ts); import os; fds=len(os.listdir('/proc/self/fd')); us=[t+1 for t in ts]")
    assert nb["r"] == 400 and nb["fds"] < 60 and len(nb["us"]) == 400
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_importing_shipping_imports_neither_torch_nor_ipython() -> None:
    import subprocess
    import sys

    code = (
        "import sys, nbdist.shipping as s; ns={'x':[1]}; h=s.Home(ns,1); sh=h.ship(['x']); a=s.Away({},0);"
        "a.receive(sh.parcels[0][1].head, []); a.commit(); h.commit(sh); a.begin([],['x']); a.namespace['x'].append(2);"
        "h.accept(a.give(lead=True), {}); assert ns['x']==[1,2];"
        "assert not {'torch','numpy','pandas','IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prune_without_changes_is_quick(nb: Notebook) -> None:
    import time

    nb.here("names=[f'n{i}' for i in range(10000)]")
    for index in range(10000):
        nb.ns[f"n{index}"] = index
    shipment = nb.home.ship(set(nb["names"]))
    nb.deliver(shipment)
    start = time.perf_counter()
    nb.home.prune()
    assert time.perf_counter() - start < 0.02


def test_home_keeps_nothing_after_forget() -> None:
    class Thing:
        pass

    namespace = {"x": Thing()}
    home = Home(namespace, 1)
    home.commit(home.ship(["x"]))
    gone = weakref.ref(namespace.pop("x"))
    home.forget()
    gc.collect()
    assert gone() is None
