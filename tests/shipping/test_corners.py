"""What generated cells (tests/kernel/test_generated_cells.py) have found, each as a plain case."""

from __future__ import annotations

import collections

import pytest

from .peers import Notebook


def test_a_dict_of_the_users_is_filled_without_its_own_setitem(nb: Notebook) -> None:
    nb.here("""
class Reg(dict):
    def __setitem__(self, key, value): self.last = key; super().__setitem__(key, value)
class Log(list):
    def append(self, item): raise RuntimeError('not to be called')
    extend = append
class Bag(set):
    def __init__(self, first): super().__init__([first]); self.made = True
reg, log, bag = Reg(a=1), Log([1, 2]), Bag(3)
reg.me = reg
""")
    nb.cell("size = len(reg), len(log), len(bag), hasattr(reg, 'last')\nmade = Reg(b=reg), Log([log]), Bag(4)")
    assert nb["size"] == (1, 2, 1, False)
    assert not hasattr(nb["reg"], "last")
    other, logs, bags = nb["made"]
    assert other["b"] is nb["reg"]
    assert logs[0] is nb["log"]
    assert (bags, bags.made) == ({4}, True)
    nb.cell("reg['c'] = 2; bag.note = [bag.made]; bag.add(5)")
    assert (nb["reg"].last, nb["reg"].me) == ("c", nb["reg"])
    assert (nb["bag"].note, nb["bag"]) == ([True], {3, 5})


def test_the_class_of_a_container_stays_the_notebooks(nb: Notebook) -> None:
    nb.here("""
class Reg(dict):
    def size(self): return super().__len__()
reg, size = Reg(a=1), Reg.size
""")
    nb.cell("other = Reg(reg)")
    assert nb["Reg"].size is nb["size"]
    nb.cell("copied = type(reg)(reg)")  # reaches the class through its instance alone
    assert nb["Reg"].size is nb["size"]
    nb.here("Reg.limit = 3")
    nb.cell("seen = reg.limit")
    assert nb["seen"] == 3


def test_a_method_of_a_builtin_object_brings_its_object(nb: Notebook) -> None:
    nb.here("items, things = [], {}\nadd, put = items.append, things.__setitem__")
    nb.cell("add(1); put('k', items)")
    assert nb["items"] == [1]
    assert nb["things"]["k"] is nb["items"]


def test_bound_and_deleted_in_one_cell_is_deleted(nb: Notebook) -> None:
    nb.here("old = keep = 1")
    nb.cell("old = 2; del old\nif False:\n    keep = 2; del keep")
    assert "old" not in nb.ns
    assert nb["keep"] == 1
    nb.here("error = 1")
    nb.cell("error = 2\ntry: 1 / 0\nexcept ZeroDivisionError as error: pass")
    assert "error" not in nb.ns


def test_an_ordered_dict_has_attributes(nb: Notebook) -> None:
    nb.ns["ordered"] = collections.OrderedDict(a=1)
    nb.cell("ordered.mark = [4]")
    assert nb["ordered"].mark == [4]


@pytest.mark.parametrize(
    "source", ["np.arange(6.0)[::2]", "np.asfortranarray(np.ones((3, 2)))[1:]", "np.ones((2, 3))[:, 1]"]
)
def test_an_array_with_gaps_lies_the_same_on_both_sides(nb: Notebook, source: str) -> None:
    """A view of it that a cell makes looks at the right elements."""
    nb.here(f"import numpy as np, torch\ngaps = {source}\ngaps[...] = np.arange(gaps.size).reshape(gaps.shape)")
    nb.cell("whole, last, turned = torch.from_numpy(gaps), gaps[-1:], gaps.T\nmade = np.zeros((2, 3))[:, 1]")
    assert nb.value("(whole.numpy() == gaps).all() and (last == gaps[-1:]).all() and (turned == gaps.T).all()")
    nb.here("gaps += 1")
    assert nb.value("(whole.numpy() == gaps).all() and (last == gaps[-1:]).all() and (turned == gaps.T).all()")
    nb.cell("again = made[1:]")
    assert nb.value("again.base is not None and np.shares_memory(again, made)")


def test_an_array_of_objects_made_read_only(nb: Notebook) -> None:
    nb.here("import numpy as np\nitems = np.array([1, [2]], dtype=object)\nrecords = np.zeros(2, [('a', object)])")
    nb.cell("items.flags.writeable = records.flags.writeable = False")
    assert nb.value("(items.flags.writeable, records.flags.writeable)") == (False, False)
    nb.here("items.flags.writeable = True\nitems[0] = 5")
    nb.cell("items[1] = items[0]")
    assert nb.value("items.tolist()") == [5, 5]
    nb.here("fixed = np.array([1, [2]], dtype=object); fixed.flags.writeable = False")
    nb.cell("fixed[1].append(3); still = fixed.flags.writeable")
    assert nb.value("(fixed.tolist(), still, fixed.flags.writeable)") == ([1, [2, 3]], False, False)


def test_data_of_another_shape_below_a_gradient(nb: Notebook) -> None:
    nb.here("import torch\nweight = torch.nn.Parameter(torch.ones(3))")
    nb.cell("weight.grad = torch.full_like(weight, 2.0)\nweight.data = torch.arange(4.0)")
    assert nb.value("(weight.tolist(), weight.grad.tolist())") == ([0.0, 1.0, 2.0, 3.0], [2.0] * 3)
    nb.here("other = torch.zeros(3)\nother.grad = torch.ones(3)\nother.data = torch.arange(4.0)")
    nb.cell("other.data.add_(1)")
    assert nb.value("(other.tolist(), other.grad.tolist())") == ([1.0, 2.0, 3.0, 4.0], [1.0] * 3)


def test_a_tensor_that_is_given_other_memory_leaves_what_shared_the_old(nb: Notebook) -> None:
    """`p.data = new`, a common way to swap weights: a `p.data` taken before keeps the old values."""
    nb.here("import torch\nweight = torch.nn.Parameter(torch.ones(3))\nbackup, third = weight.data, torch.zeros(3)")
    nb.cell("weight.data = torch.full((3,), 2.0)\nnew = weight.data[1:]")
    assert nb.value("(weight.tolist(), backup.tolist(), new.tolist())") == ([2.0] * 3, [1.0] * 3, [2.0] * 2)
    nb.here("new.fill_(7)\nbackup.fill_(5)")
    nb.cell("new[0] = 8\nbackup[0] = 6\nweight, third")
    assert nb.value("(weight.tolist(), backup.tolist())") == ([2.0, 8.0, 7.0], [6.0, 5.0, 5.0])
    nb.here("weight.data = third")
    nb.cell("third += 1; weight")
    assert nb.value("(weight.tolist(), third.tolist(), new.tolist())") == ([1.0] * 3, [1.0] * 3, [8.0, 7.0])
    nb.cell("weight.data = backup")
    nb.cell("weight.data[0] = 9", ranks=[1])
    nb.here("backup[1] = 10")
    assert nb.value("weight.tolist()") == [9.0, 10.0, 5.0]


def test_a_tensor_that_is_given_another_shape_in_place_goes_on_sharing(nb: Notebook) -> None:
    nb.here("import torch\nbase = torch.arange(6.0).reshape(2, 3)\nview = base[1]")
    nb.cell("base.t_(); base.unsqueeze_(0); base[0, 0, 1] = 30; view")
    assert nb.value("(tuple(base.shape), view.tolist())") == ((1, 3, 2), [30.0, 4.0, 5.0])
    nb.here("view[1] = 40; base.squeeze_(0)")
    nb.cell("view[2] = base[1, 1] + 1; base")
    assert nb.value("base.t().tolist()") == [[0.0, 1.0, 2.0], [30.0, 40.0, 41.0]]


def test_other_memory_reaches_a_rank_that_did_not_run(nb: Notebook) -> None:
    nb.here("import torch\nweight = torch.full((4,), 2)")
    nb.cell("weight.data = torch.arange(6.0)", ranks=[1])
    nb.cell("part = weight[:4].view(2, 2)")
    assert nb.value("(weight.tolist(), part.tolist())") == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [[0.0, 1.0], [2.0, 3.0]])
    nb.here("part[0, 0] = 9\narray = weight.detach().numpy()")
    nb.cell("first = weight[0].item(); array[1] = 8")
    assert nb.value("(first, weight[1].item())") == (9.0, 8.0)


def test_an_array_over_a_tensors_memory_outlives_what_the_tensor_had(nb: Notebook) -> None:
    nb.here("import torch\nweight = torch.full((9,), 2.0)")
    nb.cell("array = weight.numpy()")
    nb.cell("weight.data = torch.zeros(4)")
    nb.here("other = [torch.full((9,), 7.0) for _ in range(50)]")
    assert nb.value("array.tolist()") == [2.0] * 9
    assert nb.on(0, "array.tolist()") == [2.0] * 9


def test_a_shallow_copy_of_a_module_shares_its_empty_parts(nb: Notebook) -> None:
    """`copy.copy(model)` holds the very dicts of the model; a hook put into one is in both."""
    nb.here("import copy, torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\ndef hook(*_): calls.append(1)")
    nb.here("calls, hooks, plain = [], model._forward_hooks, model._parameters")
    nb.cell("shallow = copy.copy(model)")
    assert nb["shallow"]._forward_hooks is nb["model"]._forward_hooks is nb["hooks"]
    assert nb["shallow"]._parameters is nb["model"]._parameters is nb["plain"]
    nb.cell("handle = shallow.register_forward_hook(hook); model.extra = torch.nn.Parameter(torch.ones(1))")
    assert list(nb["model"]._forward_hooks.values()) == [nb["hook"]]
    assert nb["shallow"].extra is nb["model"].extra
    nb.here("model(torch.ones(1, 2)); shallow(torch.ones(1, 2))\nhandle.remove()")
    nb.cell("model(torch.ones(1, 2)); shallow(torch.ones(1, 2))\nleft = len(shallow._forward_hooks)")
    assert (nb["calls"], nb["left"]) == ([1, 1], 0)
    nb.here("later = copy.copy(model[0])")
    nb.cell("later.register_forward_hook(hook); model(torch.ones(1, 2))")
    assert nb.value("model[0]._forward_hooks is later._forward_hooks and len(later._forward_hooks)") == 1
    assert nb["calls"] == [1, 1, 1]
