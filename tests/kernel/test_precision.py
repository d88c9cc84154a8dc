"""Mixed precision in a notebook: chosen on the magic's line; the model comes home as the user made it."""

from __future__ import annotations

from tests.kernel.notebook import Notebook

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)
    def forward(self, rows): return self.layer(rows)
    def loss(self, rows): return self(rows).mean()
net = Net()
"""
TRAIN = """
from nbdist import Accelerator
accelerator = Accelerator(output_dtype="keep")
told = accelerator.mixed_precision
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.125))
loss = model.loss(torch.full((1, 1), 1.0 + 2 * rank))
dtype = str(loss.dtype)
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
del optimizer
"""


def test_a_cell_in_another_precision_and_the_model_at_home(nb: Notebook) -> None:
    nb.ok(NET)
    nb.ok(f"%%distributed -n 2 --mixed-precision bf16\n{TRAIN}")
    assert nb.value("(told, dtype, net.layer.weight.item())") == ("bf16", "torch.bfloat16", 0.75)
    assert nb.value("(type(net) is Net, model is net, type(model).__name__)") == (True, True, "Net")
    assert nb.value("str(net(torch.ones(1, 1)).dtype)") == "torch.float32"
    nb.ok("%%distributed -n 2\nagain = str(model.loss(torch.ones(1, 1)).dtype), type(model).__name__")
    assert nb.value("again") == ("torch.bfloat16", "DistributedDataParallel")  # prepared as before
    nb.ok(f"%%distributed -n 2\n{TRAIN}")  # the same ranks, without the option
    assert nb.value("(told, dtype, net.layer.weight.item())") == ("no", "torch.float32", 0.5)
    nb.ok(f"%%distributed -n 1 --mixed-precision fp16\n{TRAIN}")
    assert nb.value("(told, dtype, net.layer.weight.item(), model is net)") == (
        "fp16",
        "torch.float16",
        0.5,
        True,
    )  # skipped: float16 ends at 65504
    nb.ok("%%distributed -n 1\nagain = str(model.loss(torch.ones(1, 1)).dtype), type(model) is Net")
    assert nb.value("again") == ("torch.float16", False)
