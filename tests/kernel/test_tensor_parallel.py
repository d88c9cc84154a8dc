"""Tensor parallel in a notebook: Stop while one rank waits for the other in the middle of a layer."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook
from tests.kernel.trouble import all_here, magic, was_stopped

pytestmark = pytest.mark.kernel

TRAINER = """
from nbdist import Accelerator
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)
def loss(model, number):
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).pow(3).mean()
_accelerator = Accelerator(strategy="tp")
_bare, _optimizer = make()
_bare.tp_plan = {"1": "colwise", "3": "rowwise"}
_model, _optimizer = _accelerator.prepare(_bare, _optimizer)
made = []
"""

TRAIN = """
for number in range({start}, {start} + 8):
    _optimizer.zero_grad()
    if number == {stop} and "{where}" == "forward":
        print("here", "abcdefgh"[rank])
        time.sleep(60 * rank)
    value = loss(_model, number)
    if number == {stop} and "{where}" == "backward":
        print("here", "abcdefgh"[rank])
        time.sleep(60 * rank)
    _accelerator.backward(value)
    _optimizer.step()
    made.append(number)
"""

COMPARE = """
_right, _plain = make()
for number in made:
    _plain.zero_grad()
    loss(_right, number).backward()
    _plain.step()
whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in _bare.parameters()]
worst = max((one - other).abs().max().item() for one, other in zip(whole, _right.parameters()))
print(made, worst < 1e-5)
"""


def test_stopped_in_a_layer_it_trains_on(nb: Notebook) -> None:
    nb.ok(magic(TRAINER, 2))
    for where, start in (("forward", 0), ("backward", 8)):
        code = TRAIN.format(start=start, stop=start + 5, where=where)
        was_stopped(nb.run(magic(code, 2), stop_after=0.2, stop_when=all_here(2)))
    nb.ok(magic(TRAIN.format(start=16, stop=-1, where=""), 2))
    told = nb.ok(magic(COMPARE, 2)).text
    assert f"{[*range(5), *range(8, 13), *range(16, 24)]} True" in told, told
