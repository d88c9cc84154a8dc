"""Names are found among the user's variables, and nothing of theirs changes by it."""

from __future__ import annotations

import weakref

from torch import nn

from nbdist.checkpoint.naming import variable_of


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
