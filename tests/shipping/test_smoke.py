from .peers import Notebook


def test_first(nb: Notebook) -> None:
    nb.here("l=[1,2]; l2=l; import torch; t=torch.zeros(100000); v=t[::2]")
    nb.cell("l.append(rank); t[4]=7; import torch.nn as nn; m=nn.Linear(2,2)")
    assert nb["l"] == [1, 2, 0] and nb["l2"] is nb["l"]
    assert nb["v"][2] == 7
    w = nb["m"].weight
    nb.cell("m.weight.data.fill_(3.)")
    assert nb.shipped == [] and w.sum() == 12
