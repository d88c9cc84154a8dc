"""Names are found among the user's variables, and nothing of theirs changes by it."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nbdist.checkpoint import contents
from nbdist.checkpoint.naming import parameters_of, variable_of


def test_looking_for_a_name_keeps_nothing_alive() -> None:
    model = nn.Linear(1, 1)
    gone = weakref.ref(model)
    found = variable_of(model)
    del model
    assert found == ("model", None) and gone() is None


def test_what_the_user_has_of_locals_stays() -> None:
    model = nn.Linear(1, 1)
    mine = locals()
    assert variable_of(model) == ("model", None)
    assert mine["model"] is model


def test_what_wraps_a_part_is_not_in_a_name() -> None:
    """A child of the user's called `module` is."""
    inner = nn.ModuleDict({"module": checkpoint_wrapper(nn.Linear(2, 2)), "plain": nn.Linear(2, 2)})
    model = nn.Sequential(nn.DataParallel(inner), torch.compile(nn.Linear(2, 2), backend="eager"))
    names = ["0.module.weight", "0.module.bias", "0.plain.weight", "0.plain.bias", "1.weight", "1.bias"]
    assert sorted(contents.model_state(model)) == sorted(names)
    found = parameters_of({"net": model})
    assert sorted(name for known in found.values() for name in known) == sorted(f"net/{name}" for name in names)
