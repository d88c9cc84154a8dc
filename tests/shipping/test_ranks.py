"""Ranks that are not copies of each other: each keeps its own until the notebook changes that very object."""

from __future__ import annotations

from pathlib import Path

import pytest

from .peers import Notebook


def test_own_values_survive_a_cell_that_only_reads(nb: Notebook) -> None:
    nb.cell("ni=([['r1']] if rank==1 else [])+[[0]]")
    assert nb["ni"] == [[0]]
    nb.cell("seen=ni")
    assert nb.on(1, "ni") == [["r1"], [0]]


def test_changed_object_that_a_rank_lacks_is_shipped_whole(nb: Notebook) -> None:
    nb.cell("ni=([['r1']] if rank==1 else [])+[[0]]")
    nb.here("ni[0].append('nb')")
    nb.cell("r=ni")
    assert nb.on(0, "ni") == nb.on(1, "ni") == [[0, "nb"]]
    assert nb.parcels == 2
    nb.here("ni[0].append('again')")
    nb.cell("r=ni")
    assert nb.parcels == 1, "rank 1 has the same objects now"
    assert nb.on(0, "ni") == nb.on(1, "ni") == [[0, "nb", "again"]]


def test_object_that_a_rank_lacks_inside_one_that_it_has(nb: Notebook) -> None:
    nb.here("log=[]")
    nb.cell("log.extend([{'r': rank}] * (rank + 1))")
    assert nb["log"] == [{"r": 0}]
    nb.here("log[0]['n']=1")
    nb.cell("r=log")
    assert nb.on(0, "log") == nb.on(1, "log") == [{"r": 0, "n": 1}]


def test_lacking_object_in_a_new_container(nb: Notebook) -> None:
    nb.cell("ni=([['r1']] if rank==1 else [])+[[0]]")
    nb.here("box={'x': ni}")
    nb.cell("r=box['x']")
    assert nb.on(0, "box['x']") == nb.on(1, "box['x']") == [[0]]
    assert nb.on(0, "box['x'] is ni")


def test_different_contents_survive_until_that_object_changes(nb: Notebook) -> None:
    nb.here("a=[0]; b=[0]; both=[a,b]")
    nb.cell("a[0]=rank; b[0]=rank")
    nb.here("b.append('nb')")
    nb.cell("r=both")
    assert nb.on(1, "a") == [1], "a was not changed in the notebook"
    assert nb.on(1, "b") == nb.on(0, "b") == [0, "nb"]


def test_attribute_of_an_object_that_differs(nb: Notebook) -> None:
    nb.here("class T: pass\nt=T(); t.a=0; t.b=0")
    nb.cell("t.a=rank; t.b=rank")
    nb.here("t.b=5")
    nb.cell("r=t")
    assert nb.on(1, "(t.a, t.b)") == (1, 5)


def test_name_that_only_the_lead_bound(nb: Notebook) -> None:
    nb.cell("if rank==0: only_here=[1]")
    nb.cell("r=only_here")
    assert nb.on(1, "only_here") == [1]


def test_name_that_another_rank_deleted(nb: Notebook) -> None:
    nb.here("x=[1]")
    nb.cell("if rank==1: del x")
    assert nb["x"] == [1]
    nb.cell("r=x")
    assert nb.on(1, "x") == [1]


def test_same_structure_keeps_tokens_on_all_ranks(nb: Notebook) -> None:
    nb.cell("import torch.nn as nn\nnet=nn.Sequential(nn.Linear(3,3),nn.Linear(3,3))")
    nb.here("net[0].weight.data.fill_(2.)")
    nb.cell("s=float(net[0].weight.sum())")
    assert nb.shipped == [] and nb.parcels == 1
    assert nb.on(0, "s") == nb.on(1, "s") == 18.0


def test_rank_that_did_not_run_catches_up(nb: Notebook) -> None:
    nb.here("x=[1]; class_=0")
    nb.cell("x.append(rank)")
    assert nb.on(1, "x") == [1, 1]
    nb.cell("x.append('only 0'); y=[x]", ranks=[0])
    assert nb["x"] == [1, 0, "only 0"] and nb.on(1, "x") == [1, 1]
    nb.cell("r=(x,y)")
    assert nb.on(1, "x") == [1, 0, "only 0"]
    assert nb.on(1, "y[0] is x")


def test_another_rank_leads(nb3: Notebook) -> None:
    nb3.here("x=[1]; d={'k': 1}")
    nb3.cell("x.append(rank)")
    nb3.cell("d['k']=rank; z=[rank]", ranks=[2, 1])
    assert nb3["d"] == {"k": 1} and nb3["z"] == [1]
    assert nb3["x"] == [1, 0], "rank 1's earlier own change does not come back with a later cell"
    nb3.cell("r=(x,d,z)")
    assert nb3.on(0, "(d,z)") == ({"k": 1}, [1])


def test_lead_reports_only_what_its_cell_changed(nb: Notebook) -> None:
    nb.here("x=[0]; y=[0]; pair=(x,y)")
    nb.cell("x[0]=rank; y[0]=rank")
    nb.cell("y.append(5); p=pair", ranks=[1])
    assert nb["x"] == [0] and nb["y"] == [1, 5]


def test_sets_of_objects_have_no_order(nb: Notebook) -> None:
    nb.cell("class P: pass\nitems=set()\nfor i in range(5):\n  p=P(); p.n=i; items.add(p)")
    nb.here("for p_ in items: p_.n+=10")
    nb.cell("r=sorted(p.n for p in items)")
    assert nb["r"] == [10, 11, 12, 13, 14] == nb.on(1, "r")


def test_three_ranks_with_two_structures(nb3: Notebook) -> None:
    nb3.cell("v=[[rank]]*(1 if rank==0 else 2)")
    nb3.here("v[0].append('nb')")
    nb3.cell("r=v")
    assert nb3.parcels == 2, "ranks with the same needs share a parcel"
    assert [nb3.on(rank, "v") for rank in range(3)] == [[[0, "nb"]]] * 3


@pytest.fixture
def dist(nb: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    """A notebook whose ranks have a process group."""
    store = Path(tmp_path_factory.getbasetemp()) / "store"
    for remote in nb.remotes:
        remote.tell("group", str(store), 2)
    for remote in nb.remotes:
        remote.answer()
    return nb


def test_ddp_wrapper_stays_with_its_optimizer(dist: Notebook) -> None:
    dist.here("import torch, torch.nn as nn\nnet=nn.Linear(4,1); w=net.weight; nid=id(net)")
    dist.cell(
        "from torch.nn.parallel import DistributedDataParallel as DDP\nnet=DDP(net)\n"
        "o=torch.optim.SGD(net.parameters(),lr=.1)\n"
        "net(torch.ones(2,4)*(rank+1)).sum().backward(); o.step()"
    )
    assert dist.value("id(net)==nid and net.weight is w and type(net).__name__=='Linear'")
    assert dist.value("o.param_groups[0]['params'][0] is w")
    dist.here("w.data[:]=1.0")
    dist.cell(
        "k=type(net).__name__; same=net.module.weight is o.param_groups[0]['params'][0]\n"
        "v=net.module.weight.sum().item()\n"
        "o.zero_grad(); net(torch.ones(2,4)).sum().backward(); o.step()"
    )
    assert (dist["k"], dist["same"], dist["v"]) == ("DistributedDataParallel", True, 4)
    assert dist.shipped == []


def test_optimizer_made_on_ranks_and_weights_edited(dist: Notebook) -> None:
    dist.here("import torch, torch.nn as nn\nnet=nn.Linear(2,2)")
    dist.cell(
        "from torch.nn.parallel import DistributedDataParallel as DDP\nnet=DDP(net)\n"
        "op=torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1,2)).sum().backward(); op.step()"
    )
    dist.here("with torch.no_grad(): net.bias.fill_(7.)\nop.param_groups[0]['lr']=0.")
    dist.cell(
        "op.zero_grad(); net(torch.ones(1,2)).sum().backward(); op.step()\n"
        "k=(type(net).__name__, op.param_groups[0]['params'][0] is net.module.weight, net.module.bias[0].item(),\n"
        "   int(op.state[net.module.weight]['step']))"
    )
    assert dist["k"] == ("DistributedDataParallel", True, 7.0, 2)


def test_model_born_on_ranks_then_wrapped_and_edited(dist: Notebook) -> None:
    dist.cell(
        "import torch, torch.nn as nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "torch.manual_seed(0); bm=nn.Linear(2,2); bd=DDP(bm)"
    )
    assert dist["bd"] is dist["bm"]
    dist.here("with torch.no_grad(): bm.weight.fill_(2.)")
    dist.cell("k=(type(bm).__name__, type(bd).__name__, (bd.module.weight.sum()-4).item(), bd.module is bm)")
    assert dist["k"] == ("Linear", "DistributedDataParallel", 4.0, True)


def test_wrapper_inside_an_object(dist: Notebook) -> None:
    dist.here("import torch.nn as nn\nclass Tr:\n  def __init__(s): s.m=nn.Linear(2,1); s.e=0\ntr=Tr(); m0=tr.m")
    dist.cell("from torch.nn.parallel import DistributedDataParallel as DDP\ntr.m=DDP(tr.m); tr.e=1")
    dist.here("tr.e=2")
    dist.cell("k=(type(tr.m).__name__, tr.e)")
    assert dist["tr"].m is dist["m0"] and dist["tr"].e == 2
    assert dist["k"] == ("DistributedDataParallel", 2)


def test_what_the_user_shards_by_hand_comes_home_whole(dist: Notebook) -> None:
    dist.here(
        "import torch, torch.nn as nn\nfm=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300))\n"
        "w=fm[0].weight; s0=w.sum().item()"
    )
    dist.cell(
        "from torch.distributed.fsdp import fully_shard\nsf=fully_shard(fm)\no=torch.optim.SGD(fm.parameters(),lr=.1)\n"
        "fm(torch.ones(2,300)).sum().backward(); o.step(); r=type(fm).__name__\n"
        "s1=fm[0].weight.full_tensor().sum().item()"
    )
    assert dist["r"] == "FSDPSequential"
    assert type(dist["fm"]) is dist["nn"].Sequential and dist["fm"][0].weight is dist["w"] and dist["sf"] is dist["fm"]
    assert dist["s0"] != dist["s1"] == dist["w"].sum().item()
    assert dist["o"].param_groups[0]["params"][0] is dist["w"] and not dist["fm"]._forward_hooks
    dist.cell("r=(type(fm).__name__, type(sf).__name__, fm is sf)")
    assert dist["r"] == ("FSDPSequential", "FSDPSequential", True) and dist.gathered == 0
    dist.here("with torch.no_grad(): w[7] = 0; w[299] = 1")
    dist.cell("r=(w.full_tensor()[[7, 299]].sum(1).tolist(), w is fm[0].weight)")
    assert dist["r"] == ([0.0, 300.0], True) and dist.gathered == 0
