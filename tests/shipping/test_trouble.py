"""What cannot travel, what fails half-way, and that nothing else is spoiled by it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from nbdist.shipping import CannotReceive, CannotShip, Home, NotEnoughMemory, Parcel, RankedValue, handle_facts, memory

from .peers import CellError, Notebook


def test_refused_name_says_where_and_what(nb: Notebook) -> None:
    nb.here("import threading\ncfg={'a':[1,{'lock':threading.Lock()}]}")
    with pytest.raises(CannotShip) as caught:
        nb.cell("cfg")
    assert str(caught.value).startswith(
        "cannot ship 'cfg' (dict): cfg['a'][1]['lock'] is a lock, which cannot leave its process."
    )
    assert (caught.value.name, caught.value.path, caught.value.type_name) == ("cfg", "cfg['a'][1]['lock']", "dict")
    nb.cell("z=1")
    assert nb["z"] == 1


@pytest.mark.parametrize(
    ("here", "path"),
    [
        ("class A: pass\nx=A(); x.b=A(); x.b.g=(i for i in ())", "x.b.g is a live generator"),
        ("def mk():\n  f=open('/dev/null')\n  return lambda: f\nx=mk()", "x.<closure variable f> is an open file"),
        ("import socket; x=[socket.socket()]", "x[0] is a socket"),
        ("x=(i for i in ())", "a live generator"),
        (
            "from nbdist import Accelerator\nx=[Accelerator()]\nwith x[0].accumulate(): pass",
            "x[0] is an Accelerator: it belongs to its rank",  # and not what it holds
        ),
    ],
)
def test_refused_paths(nb: Notebook, here: str, path: str) -> None:
    nb.here(here)
    with pytest.raises(CannotShip) as caught:
        nb.cell("x")
    assert path in str(caught.value)


def test_known_object_that_gained_a_lock(nb: Notebook) -> None:
    nb.here("import threading\nd={'n':[1]}")
    nb.cell("d['n'].append(2)")
    nb.here("d['lock']=threading.Lock()")
    with pytest.raises(CannotShip, match=r"d\['lock'\] is a lock"):
        nb.cell("d")
    nb.here("del d['lock']; d['m']=3")
    nb.cell("r=dict(d)")
    assert nb["r"] == {"n": [1, 2], "m": 3}


def test_attribute_of_a_captured_object_that_cannot_come_back(nb: Notebook) -> None:
    nb.here("class T: pass\nt=T(); t.n=1; t.lock=None; d={'a': 1}")
    arrival = nb.cell("import threading\nt.n=2; t.lock=threading.Lock(); d['b']=(i for i in ()); d['c']=3")
    assert nb["t"].n == 2 and nb["t"].lock is None and nb["d"] == {"a": 1, "c": 3}
    assert any("t.lock (lock) was left as it was" in note for note in arrival.notes), arrival.notes
    assert any("d['b'] (generator) was left as it was" in note for note in arrival.notes), arrival.notes
    assert nb.on(0, "t.lock is not None")
    nb.cell("t.n=3")
    assert nb["t"].n == 3


def test_list_that_gained_what_cannot_come_back(nb: Notebook) -> None:
    nb.here("x=[1]; y=[1]")
    arrival = nb.cell("x.append(i for i in ()); y.append(2)")
    assert nb["x"] == [1] and nb["y"] == [1, 2]
    assert len(arrival.notes) == 1 and arrival.notes[0].startswith("x (list) was left as it was")


def test_value_that_cannot_be_rebuilt_here_spoils_nothing(nb: Notebook) -> None:
    nb.here("known=[1]; import os; pid=os.getpid()")
    arrival = nb.cell(
        "import os\n"
        "class Bad:\n"
        "    def __setstate__(self, state):\n"
        "        import os\n"
        "        if os.getpid()==pid: raise ValueError('not here')\n"
        "    def __getstate__(self): return {'x': 1}\n"
        "before=[1]; bad=Bad(); holder=[bad]; good=[before]; known.append(good); last={'k': good}"
    )
    assert isinstance(nb["bad"], RankedValue) and isinstance(nb["holder"], RankedValue)
    assert "cannot be rebuilt here" in repr(nb["bad"]) and "not here" in repr(nb["bad"])
    assert nb["known"] == [1, [[1]]] and nb["known"][1] is nb["good"] and nb["last"]["k"][0] is nb["before"]
    assert sorted(arrival.handles) == ["bad", "holder"]
    nb.here("good.append(5)")
    nb.cell("r=(type(bad).__name__, good, holder[0] is bad, last['k'] is good, known[1] is good)")
    assert nb["r"] == ("Bad", [[1], 5], True, True, True)


def test_progress_bar_becomes_a_handle(nb: Notebook) -> None:
    nb.cell("from tqdm import tqdm\nbar=tqdm(total=3, disable=True); kept=[1]")
    assert isinstance(nb["bar"], RankedValue) and nb["kept"] == [1]


def test_rank_that_cannot_decode_rolls_back_everywhere(nb: Notebook) -> None:
    nb.here("a=[1]; import os; pid=os.getpid()")
    nb.cell("a.append(2)")
    nb.here(
        "class Bad:\n"
        "    def __getstate__(self): return {'x': 1}\n"
        "    def __setstate__(self, state):\n"
        "        import os\n"
        "        if os.getpid()!=pid: raise ValueError('not there')\n"
        "bad=Bad(); a.append(3); new=[1]"
    )
    with pytest.raises(CannotReceive, match=r"'bad'.*not there") as caught:
        nb.cell("(a, new, pid, bad)")
    assert caught.value.name == "bad"
    assert nb.on(0, "a") == [1, 2] and not nb.on(0, "'new' in globals() or 'bad' in globals()")
    nb.cell("r=(a, new)")
    assert nb.on(1, "r") == ([1, 2, 3], [1])


def test_after_an_exception_what_was_made_is_back(nb: Notebook) -> None:
    nb.here("pe=[1]")
    with pytest.raises(CellError):
        nb.cell("pe.append(3); qq=5; raise ValueError('x')")
    assert nb["pe"] == [1, 3] and nb["qq"] == 5


def test_return_limit_keeps_the_largest_on_the_ranks(nb: Notebook) -> None:
    arrival = nb.cell("import torch\nbig=torch.zeros(1<<20); small=torch.ones(10); n=1", limit=1 << 20)
    assert isinstance(nb["big"], RankedValue) and nb["small"].sum() == 10 and nb["n"] == 1
    assert "over the return limit of 1.0 MiB" in repr(nb["big"]) and handle_facts(nb["big"]).size >= 4 << 20
    assert list(arrival.handles) == ["big"], arrival
    nb.cell("big[0]=1; r=big.sum().item()")
    assert nb["r"] == 1
    assert nb.peek(0, "big").sum() == 1
    assert "over the limit" in repr(nb.peek(0, "big", limit=1000))


def test_captured_change_over_the_limit_is_left(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(1<<20)")
    arrival = nb.cell("t+=1; n=1", limit=1 << 20)
    assert nb["t"].sum() == 0 and nb["n"] == 1
    assert arrival.notes and "t (Tensor) was left as it was: over the return limit" in arrival.notes[0]


def test_return_only_some_names(nb: Notebook) -> None:
    nb.here("a=[1]; b=[1]; c=5")
    nb.cell("a.append(2); b.append(2); c=6; d=7", only=frozenset({"a", "d"}))
    assert nb["a"] == [1, 2] and nb["b"] == [1] and nb["c"] == 5 and nb["d"] == 7
    nb.cell("b.append(3)")
    assert nb["b"] == [1, 2, 3]


def test_return_nothing(nb: Notebook) -> None:
    nb.here("a=[1]; c=5")
    arrival = nb.cell("a.append(2); c=6; d=7; del a", only=frozenset())
    assert nb["a"] == [1] and nb["c"] == 5 and "d" not in nb.ns
    assert not (arrival.bound or arrival.deleted or arrival.handles)
    assert nb.on(0, "(c, d)") == (6, 7)


def test_handle_answers_attributes(nb: Notebook) -> None:
    nb.cell(
        "import threading\nclass T: pass\ntrainer=T(); trainer.lock=threading.Lock(); trainer.state=T()\n"
        "trainer.state.log=[{'loss': 1.}]; trainer.state.lock=threading.Lock()"
    )
    handle = nb["trainer"]
    assert "trainer.lock is a lock" in repr(handle)
    assert handle.state.log == [{"loss": 1.0}]
    assert isinstance(handle.state, RankedValue) and "trainer.state" in repr(handle.state)
    with pytest.raises(AttributeError):
        _ = handle.nothing
    for use in (lambda: handle(), lambda: len(handle), lambda: iter(handle), lambda: handle + 1, lambda: handle[0]):
        with pytest.raises(TypeError, match="%%distributed"):
            use()
    with pytest.raises(TypeError):
        handle.x = 1


def test_handle_goes_on_after_the_rank_rebinds_the_name(nb: Notebook) -> None:
    nb.cell("g=(i for i in range(5))")
    nb.here("kept=g")
    nb.cell("g=1")
    nb.cell("r=next(kept)")
    assert nb["g"] == 1 and nb["r"] == 0


def test_peek(nb: Notebook) -> None:
    nb.cell("class P:\n  def m(self): return 2\np=P(); p.v=[rank]; loss=rank*2.; g=(i for i in ())")
    assert [nb.peek(rank, "loss") for rank in range(2)] == [0.0, 2.0]
    copy = nb.peek(1, "p")
    assert type(copy) is nb["P"] and copy.v == [1] and copy is not nb["p"]
    assert nb.peek(1, "p", "v") == [1]
    with pytest.raises(NameError, match="'nope'"):
        nb.peek(1, "nope")
    with pytest.raises(AttributeError):
        nb.peek(1, "p", "nope")
    assert isinstance(nb.peek(1, "g"), RankedValue)
    nb.here("P.m=lambda self: 5")
    nb.peek(0, "p")
    assert nb["p"].m() == 5, "looking does not bring old methods back"


def test_forget(nb: Notebook) -> None:
    nb.here("a=[1]")
    nb.cell("a.append(2); g=(i for i in ())")
    handle = nb["g"]
    nb.home.forget()
    for remote in nb.remotes:
        remote.ask("reset", 2)
    nb.cell("a.append(3)")
    assert nb["a"] == [1, 2, 3] and nb.shipped == ["a"]
    assert "replaced" in repr(handle)
    with pytest.raises(TypeError, match="replaced"):
        handle()
    with pytest.raises(CannotShip, match="replaced"):
        nb.cell("g")


def test_the_ranks_keep_what_was_not_to_come_back(nb: Notebook) -> None:
    """`--no-return`: until the notebook rebinds the name, also where they had never seen the notebook's value."""
    nb.here("known, other = [1], [1]")
    nb.cell("known")
    nb.cell("known, other = [2], [2]", only=frozenset())
    nb.cell("seen = known + other")
    assert (nb["known"], nb["other"], nb["seen"]) == ([1], [1], [2, 2])
    nb.here("other = [3]")
    nb.cell("seen = known + other")
    assert nb["seen"] == [2, 3]
    nb.here("alone = [1]")
    nb.cell("alone = [2]", ranks=[0], only=frozenset())
    nb.cell("alone.append(5)", only=frozenset())
    assert (nb.on(0, "alone"), nb.on(1, "alone"), nb["alone"]) == ([2, 5], [1, 5], [1])


def test_what_was_made_anew_without_coming_back_stands_for_a_dead_handle(nb: Notebook) -> None:
    """`--no-return` leaves the old handle in the notebook; the ranks read what they have now."""
    nb.cell("g, h = (i for i in ()), 0")
    nb.home.forget()
    for remote in nb.remotes:
        remote.ask("reset", 2)
    nb.cell("g = (i for i in (4, 5))", only=frozenset())
    nb.cell("first = next(g)")
    nb.cell("second = next(g)")
    assert (nb["first"], nb["second"]) == (4, 5)
    assert "replaced" in repr(nb["g"])
    nb.here("g = [6]")
    nb.cell("g.append(7)")
    assert nb["g"] == [6, 7]


def test_handle_of_another_pool(nb: Notebook) -> None:
    other = Home({}, 1)
    nb.ns["h"] = other._handles.make("h", {"type": "T", "key": "h@1", "reason": "r", "label": "h"})
    with pytest.raises(CannotShip, match="another pool"):
        nb.cell("h")


def test_launch_keeps_identity(nb: Notebook) -> None:
    nb.here("log=[]\ndef train(config, out): out.append(config['n']); log.append(1); return out, {'new': [1]}\nout=[]")
    result = nb.launch(nb["train"], {"n": 3}, out=nb["out"])
    assert result[0] is nb["out"] and nb["out"] == [3] and result[1] == {"new": [1]} and nb["log"] == [1]


def test_extra_that_cannot_travel(nb: Notebook) -> None:
    nb.here("def f(): return (i for i in ())")
    assert isinstance(nb.launch(nb["f"]), RankedValue)


def test_not_enough_memory_is_said_before_anything_starts(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    nb.here("import torch; t=torch.ones(1<<20); small=[1]")
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    with pytest.raises(NotEnoughMemory) as caught:
        nb.cell("t[0]=5; small.append(2)")
    assert caught.value.needed >= 4 << 20 and caught.value.free == 1 << 20
    assert nb["t"].sum() == 1 << 20 and nb["small"] == [1]
    monkeypatch.undo()
    nb.cell("t[0]=5; small.append(2)")
    assert nb["t"][0] == 5 and nb["small"] == [1, 2]


def test_available_memory_is_sensible() -> None:
    assert 1 << 20 < memory.available_memory() < 1 << 60


def test_parcel_closes_once() -> None:
    read, write = os.pipe()
    os.close(write)
    parcel = Parcel(b"", [read])
    parcel.close()
    parcel.close()
    with pytest.raises(OSError):
        os.fstat(read)


def test_accelerate_patched_forward_stays_on_the_rank(nb: Notebook) -> None:
    nb.here("import torch, torch.nn as nn; net=nn.Linear(2,2); w=net.weight")
    nb.cell(
        "import threading\nlk=threading.Lock(); net._original_forward=net.forward; plain=net.forward\n"
        "def patched(x):\n    with lk: return plain(x)+1\n"
        "net.forward=patched; net.weight.data.fill_(1.)"
    )
    assert "forward" not in nb["net"].__dict__ and nb["w"].sum() == 4
    nb.cell("r='forward' in net.__dict__")
    assert nb["r"]


def test_in_place_growth_of_mapped_memory(nb: Notebook) -> None:
    nb.here("import torch; t=torch.zeros(100000)")
    with pytest.raises(CellError, match="not resizable"):
        nb.cell("t.resize_(200000)")
    assert nb["t"].shape == (100000,)


def test_graph_of_before_is_refused_after_an_in_place_return(nb: Notebook) -> None:
    nb.here("import torch; v=torch.ones(3,requires_grad=True); y=(v.exp()*v).sum()")
    nb.cell("with torch.no_grad(): v.mul_(3)")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nb["y"].backward()


def test_hook_ids_do_not_collide(nb: Notebook) -> None:
    import torch.utils.hooks as hooks

    nb.here(
        "import torch.nn as nn; m=nn.Linear(2,2); calls=[]; h=m.register_forward_hook(lambda *a: calls.append('a'))"
    )
    nb.cell("import torch; m.register_forward_hook(lambda *a: calls.append('b')); m(torch.ones(1,2))")
    assert nb["calls"] == ["a", "b"] and len(nb["m"]._forward_hooks) == 2
    assert hooks.RemovableHandle.next_id > max(nb["m"]._forward_hooks)


def _on_meta(value: Any) -> bool:
    return value.device.type == "meta"


def test_tensor_on_a_device_that_is_meta_keeps_its_device(nb: Notebook) -> None:
    nb.here("import torch; t=torch.empty(3, device='meta'); lin=torch.nn.Linear(2,2,device='meta')")
    nb.cell("r=(t.device.type, lin.weight.device.type); u=torch.empty(2,device='meta')")
    assert nb["r"] == ("meta", "meta") and _on_meta(nb["u"])


def test_hooks_of_tensors_stay_and_that_is_said(nb: Notebook) -> None:
    nb.here("import torch; w=torch.ones(2,requires_grad=True); hits=[]; h=w.register_hook(lambda g: hits.append(1))")
    shipment = nb.home.ship(["w"])
    assert shipment.notes == [
        "the functions that a tensor got by register_hook stay in the notebook: register them inside the cell"
    ]
    nb.home.rollback(shipment)
    nb.cell("(w*2).sum().backward()")
    assert nb["w"].grad.tolist() == [2.0, 2.0] and nb["hits"] == []


def test_object_whose_own_code_raises_is_refused_by_name(nb: Notebook) -> None:
    nb.here("class A:\n  def __getstate__(self): raise ValueError('no state')\na=[A()]")
    with pytest.raises(CannotShip, match=r"a\[0\] is an A.*no state"):
        nb.cell("a")


def test_unreadable_object_on_the_rank_becomes_a_handle(nb: Notebook) -> None:
    nb.cell("class A:\n  def __getstate__(self): raise ValueError('no state')\na=A(); b=1")
    assert isinstance(nb["a"], RankedValue) and nb["b"] == 1 and "no state" in repr(nb["a"])


def test_object_that_the_notebook_forgot_during_the_cell(nb: Notebook) -> None:
    nb.here("a=[1]; b=[1]")
    nb.cell("a.append(2); b.append(2)")
    original = nb.home.accept

    def forgetful(*arguments: Any, **options: Any) -> Any:
        nb.home._table.drop(nb.home._table.tokens[id(nb["a"])])
        return original(*arguments, **options)

    nb.home.accept = forgetful  # type: ignore[method-assign]
    arrival = nb.cell("a.append(3); b.append(3); c=[a]; d=[b]")
    assert nb["b"] == [1, 2, 3] and nb["d"][0] is nb["b"] and nb["a"] == [1, 2]
    assert isinstance(nb["c"], RankedValue) and arrival.notes


DEEP = [
    "class N: pass\nv = N()\np = v\nfor i in range(3000): p.next = N(); p = p.next\ndel p",
    "v = []\nfor i in range(3000): v = [v, i]",
]


@pytest.mark.parametrize("made", DEEP)
def test_nested_too_deeply(nb: Notebook, made: str) -> None:
    nb.here(made)
    with pytest.raises(
        CannotShip, match=r"'v' \(\w+\): it is nested too deeply .*300\d levels.*inside the cell"
    ) as caught:
        nb.cell("v")
    assert caught.value.path == "v" and "before (`del`)" not in str(caught.value)
    nb.cell("def f(): return v")
    assert "nested too deeply" in nb.left_out["v"]
    nb.here("del v")
    arrival = nb.cell(made)
    assert "nested too deeply" in repr(arrival.handles["v"]) + str(arrival.handles["v"])


def test_a_recursion_of_the_users_own_is_not_called_nesting(nb: Notebook) -> None:
    nb.here("class R:\n  def __reduce__(self): return self.__reduce__()\nv = {'a': R()}")
    with pytest.raises(CannotShip, match=r"v\['a'\] is .*RecursionError"):
        nb.cell("v")
