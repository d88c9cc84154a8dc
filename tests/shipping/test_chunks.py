"""Large memory: only what has changed is sent, it is put in place under every view, and memory stays one copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.shipping import Away, Home
from nbdist.shipping.chunks import CHUNK, Hashes, digest_of
from nbdist.shipping.kinds_memory import once
from nbdist.shipping.pages import written
from nbdist.shipping.regions import PAGE, Region

from .peers import Notebook

MIB = 1 << 20


def own_memory(nb: Notebook, rank: int, name: str) -> int:
    """Bytes that a rank has written of a mapped tensor: pages of its own."""
    nb.remotes[rank].ask("execute", "from nbdist.shipping.pages import written")
    pages = nb.on(rank, f"written({name}.data_ptr(), {name}.nbytes, {PAGE})")
    return sum(pages) * PAGE


def test_one_element_changed_by_the_notebook(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(4<<20); v=t[3<<20:]; a=t.numpy()")
    nb.cell("x=(t[5].item(), v[0].item(), a[1]); version=t._version")
    nb.here("t[5]=1; v[7]=2")
    nb.cell("x=(t[5].item(), v[7].item(), a[5], a[(3<<20)+7], t.detach().sum().item()); rose=t._version>version")
    assert nb["x"] == (1, 2, 1, 2, 3) and nb["rose"] and not nb.again
    assert 2 * MIB <= nb.size < 2.1 * MIB
    assert [nb.on(rank, "t.detach().sum().item()") for rank in (0, 1)] == [3, 3]


def test_one_element_changed_by_a_rank(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(4<<20); v=t[1<<20:]; a=t.numpy(); before=t.data_ptr(); version=t._version")
    nb.cell("t[5]=1; a[2<<20]=4; count=0")
    assert (nb["t"][5].item(), nb["v"][1 << 20].item(), nb["a"][5]) == (1, 4, 1)
    assert nb["t"].data_ptr() == nb["before"] and nb["t"]._version > nb["version"]
    nb.cell("count+=1; t[6]=1")
    assert nb["t"].sum() == 6


def test_a_graph_of_before_is_refused(nb: Notebook) -> None:
    nb.here("import torch; t=torch.ones(1<<20); w=torch.ones(1, requires_grad=True); loss=(w*t).sum()")
    nb.cell("t[0]=2")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nb.here("loss.backward()")
    nb.cell("w2=torch.ones(1, requires_grad=True); loss2=[(w2*t).sum()]; r=0; keep=loss2")
    nb.here("t[1]=2")
    nb.cell("seen=None; x=t[1].item()\ntry: keep[0].backward()\nexcept RuntimeError as e: seen=str(e)")
    assert nb["x"] == 2 and (nb["seen"] is None or "modified by an inplace operation" in nb["seen"])


def test_writes_of_a_rank_stay_its_own_until_the_notebook_changes_that_object(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(4<<20); u=torch.zeros(4<<20)")
    nb.cell("x=t[0].item()+u[0].item()")
    nb.remotes[1].ask("execute", "t[9]=rank; u[9]=rank")
    nb.here("t[3<<20]=5")
    nb.cell("x=t[0].item()+u[0].item()")
    assert nb.again  # rank 1 had other content where nothing was sent
    assert nb.on(1, "(t[9].item(), t[3<<20].item(), u[9].item())") == (0, 5, 1)
    nb.here("t[3<<20]=6")
    nb.cell("x=t[0].item()")
    assert not nb.again and nb.on(1, "t[3<<20].item()") == 6


@pytest.mark.parametrize(
    "there",
    ["t.data=t.data.clone().double()", "t.resize_(1<<20)", "t.data=torch.zeros(0)", "t.t_()", "t.data=t.data.clone()"],
)
def test_a_rank_has_another_object_there(nb: Notebook, there: str) -> None:
    nb.here("import torch; t=torch.zeros(1<<10, 1<<11); t+=1")
    nb.cell("x=t.sum().item()")
    nb.remotes[1].ask("execute", "import torch\nwith torch.no_grad(): " + there)
    nb.here("t[1, 5]=3")
    nb.cell("x=t.sum().item()")
    assert nb.on(1, "tuple(t.shape), t.sum().item(), t[1,5].item()") == ((1 << 10, 1 << 11), (1 << 21) + 2, 3)


def test_a_written_chunk_is_given_back_when_the_notebooks_replaces_it(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(4<<20)")
    nb.cell("t+=1")
    assert own_memory(nb, 1, "t") == 16 * MIB
    nb.here("t+=1")
    nb.cell("x=t[0].item()")
    assert nb["x"] == 2 and own_memory(nb, 1, "t") == own_memory(nb, 0, "t") == 0
    nb.cell("t[5]=7")
    nb.here("t[6]=8")
    nb.cell("x=t[:7].tolist()")
    assert nb["x"] == [2, 2, 2, 2, 2, 7, 8] and own_memory(nb, 0, "t") == 0


def test_odd_offsets_and_dtypes(nb: Notebook) -> None:
    nb.here(
        "import torch, numpy as np; raw=np.zeros(5<<20, np.uint8); f=raw[4:-4].view(np.float32)[1:]; o=raw[3:]\n"
        "h=torch.from_numpy(raw)[2:].view(torch.bfloat16); b=torch.zeros(3<<20, dtype=torch.bool)\n"
        "c=torch.zeros(1<<19, dtype=torch.complex64); p=torch.zeros(1<<10, 1<<10).t(); every=torch.zeros(1<<20)[::2]"
    )
    names = ("raw", "f", "o", "h", "b", "c", "p", "every")
    read = "all_=[" + ",".join(names) + "]; r=[str(x.sum().item()) for x in all_]"
    nb.cell(read)
    nb.here("f[9]=1; o[1<<20]=3; h[70000]=2; b[5]=True; c[7]=1j; p[3, 1000]=4; every[1000]=5")
    nb.cell(read)
    assert not nb.again and nb["r"] == [str(nb.value(name).sum().item()) for name in names]
    nb.cell(read + "; f[10]=1; o[2<<20]=3; h[70001]=2; b[6]=True; c[8]=1j; p[4, 1000]=4; every[1001]=5")
    nb.cell(read)
    assert nb["r"] == [str(nb.value(name).sum().item()) for name in names]
    for name in names:
        assert nb.on(1, f"{name}.sum().item()") == nb.value(name).sum().item()


def test_read_only_arrays_and_inference_tensors(nb: Notebook) -> None:
    nb.here(
        "import torch, numpy as np; a=np.zeros(1<<20); a.flags.writeable=False\n"
        "with torch.inference_mode(): i=torch.zeros(1<<20)"
    )
    nb.cell("x=a[0]+i[0].item()")
    nb.here("a.flags.writeable=True; a[5]=1; a.flags.writeable=False\nwith torch.inference_mode(): i[5]=1")
    nb.cell("x=a[5]+i[5].item(); w=a.flags.writeable\nwith torch.inference_mode(): i[6]=1")
    assert nb["x"] == 2 and not nb["w"] and nb["i"].sum() == 2 and not nb["a"].flags.writeable


def test_pieces_do_not_pile_up(nb: Notebook) -> None:
    """Each file of a piece is freed when another takes its place, and many small ones are replaced by a whole."""

    nb.here("import torch; t=torch.zeros(4<<20)")
    before = [nb.files(rank) for rank in (0, 1)]
    sizes = []
    for index in range(40):
        nb.here(f"t[{index % 16}<<18]=1+{index}")
        nb.cell("x=t[0].item()")
        sizes.append(nb.size)
    assert sorted(sizes)[2] < 1.1 * MIB and max(sizes[1:]) > 15 * MIB  # mostly pieces, now and then all of it
    for rank in (0, 1):
        assert len(nb.files(rank) - before[rank]) <= 17  # the whole, and a piece for each chunk
        assert nb.on(rank, "t.tolist()[::1<<18]") == nb.value("t.tolist()[::1<<18]")
    nb.here("t+=1")
    nb.cell("x=t[0].item()")
    assert [len(nb.files(rank) - before[rank]) for rank in (0, 1)] == [1, 1]
    nb.here("del t")
    nb.cell("x=1")
    assert [nb.files(rank) - before[rank] for rank in (0, 1)] == [set(), set()]


def test_descriptors_and_memory_of_the_exchange_stay_flat(nb: Notebook) -> None:
    nb.here("import torch, numpy as np; t=torch.zeros(1<<20); a=np.zeros(1<<20)")
    look = "(len(__import__('os').listdir('/proc/self/fd')), len(open('/proc/self/maps').readlines()))"
    for index in range(60):
        nb.here(f"t[{index}]=1")
        nb.cell(f"a[{index}]=1; t[-{index}-1]=2")
        if index == 10:
            first = [eval(look), nb.on(0, look), nb.on(1, look)]
    for (files, maps), (files_first, maps_first) in zip(
        [eval(look), nb.on(0, look), nb.on(1, look)], first, strict=True
    ):
        assert files == files_first and maps < maps_first + 30
    assert nb["t"].sum() == 180 and nb["a"].sum() == 60


def test_what_was_not_written_is_not_hashed_again() -> None:
    file = os.memfd_create("test")
    os.pwrite(file, os.urandom(5 * MIB), 0)
    region = Region(file, 0, 24, 5 * MIB - 24)
    os.close(file)
    address, length = region.address + 24, 5 * MIB - 24
    whole = digest_of(address, length)
    assert isinstance(whole, Hashes) and len(region.hashes) == 5
    array = np.frombuffer(region.buffer(0), np.uint8)
    assert array.copy()[0] == array[0]  # as memory that is not a mapping of ours:
    copy = array.copy()
    assert digest_of(copy.__array_interface__["data"][0], length) == whole
    if written(address, length, CHUNK) is None:
        pytest.skip("this system does not say which pages were written")
    array[3 * CHUNK + 5000] += 1
    assert written(address, length, CHUNK) == [False, False, False, True, False]
    copy[3 * CHUNK + 5000] += 1
    assert digest_of(address, length) == digest_of(copy.__array_interface__["data"][0], length) != whole


class Two:
    """Home and one Away in this process, and a plain namespace beside them."""

    def __init__(self) -> None:
        self.ns: dict[str, Any] = {}
        self.space: dict[str, Any] = {}
        self.home, self.away = Home(self.ns, 1), Away(self.space, 0)

    def cell(self, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Ship every name, have the edit made there, and take in what came of it."""
        shipment = self.home.ship(self.ns)
        for _, parcel in shipment.parcels:
            self.away.receive(parcel.head, [os.dup(file) for file in parcel.files])
        self.away.commit()
        self.home.commit(shipment)
        self.away.begin((), shipment.names, True)
        if edit is not None:
            edit(self.space)
        arrival = self.home.accept(self.away.give(lead=True), {})
        assert not arrival.notes and not arrival.handles, arrival


DTYPES = ["float32", "bfloat16", "float64", "uint8", "bool", "complex64"]
VIEWS = [
    "{b}[{i}:]", "{b}[:-{i}]", "{b}[::{s}]", "{b}.view(torch.uint8)[{i}:]", "{b}[:{n}].view(2, -1).t()",
    "{b}[:{n}].view(4, -1)[1:3, 5:]", "{b}.numpy()[{i}::{s}]", "{b}.view(torch.uint8).numpy()[::-1][{i}:]",
    "{b}[:{n}].view(-1, 64)[:, 3]", "{b}[:1].expand(5)", "{b}[:0]", "torch.as_strided({b}, (1000, 300), (7, 3), {i})",
]  # fmt: skip
EDIT = st.tuples(st.sampled_from(["here", "there"]), st.integers(0, 3), st.integers(0, 10**9), st.integers(1, 400_000))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.sampled_from(VIEWS), st.integers(1, 5000), st.integers(2, 9)), min_size=1, max_size=3),
    st.lists(EDIT, max_size=6),
)
def test_random_edits_of_random_views(dtype: str, views: list[tuple[str, int, int]], edits: list[Any]) -> None:
    """Whatever is written on either side, through whatever view: both sides are equal, aliases kept."""
    two = Two()
    base = torch.zeros(
        3 * MIB // torch.empty(0, dtype=getattr(torch, dtype)).itemsize + 17, dtype=getattr(torch, dtype)
    )
    names = ["b"]
    two.ns["b"] = base
    for index, (form, i, s) in enumerate(views):
        if dtype == "bfloat16":
            form = form.replace(".numpy()", ".view(torch.int16).numpy()") if "uint8" not in form else form
        text = form.format(b="b", i=i, s=s, n=len(base) // 256 * 256)
        names.append(f"v{index}")
        two.ns[names[-1]] = eval(text, {"torch": torch}, {"b": base})
    where = {name: address(two.ns[name]) for name in names}
    two.cell()
    for side, which, at, count in edits:
        name = names[which % len(names)]

        def edit(space: dict[str, Any], name: str = name, at: int = at, count: int = count) -> None:
            value = space[name]
            if isinstance(value, torch.Tensor):
                value = once(value)
            if len(value):
                value[at % len(value) :][:count] = at % 2 or (1 if dtype == "bool" else 3)  # other bytes are no bool

        was, other = base.clone(), (two.space if side == "here" else two.ns)["b"]
        version = other._version
        if side == "here":
            edit(two.ns)
            two.cell()
        else:
            two.cell(edit)
        assert other._version > version or bool((was == base).all())
        for each in names:
            mine, theirs = two.ns[each], two.space[each]
            assert bool((mine == theirs).all()), (each, side, name)
            assert address(mine) == where[each]
            if len(mine):
                assert address(theirs) - address(two.space["b"]) == where[each] - where["b"]


def address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0]
