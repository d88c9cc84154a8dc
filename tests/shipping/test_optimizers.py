"""Optimizers keep all their attributes, both ways."""

from __future__ import annotations

from .peers import Notebook

NET = "import torch, torch.nn as nn\nnet=nn.Linear(2,1); w=net.weight; x=torch.ones(4,2)\n"
SAM = NET + (
    "class SAM(torch.optim.Optimizer):\n"
    "  def __init__(self, params, base, rho=.05, **kw):\n"
    "    super().__init__(params, dict(rho=rho, **kw))\n"
    "    self.base_optimizer = base(self.param_groups, **kw)\n"
    "    self.param_groups = self.base_optimizer.param_groups\n"
    "    self.rounds = 0\n"
    "  @torch.no_grad()\n"
    "  def step(self, closure=None):\n"
    "    self.rounds += 1\n"
    "    self.base_optimizer.step()\n"
)
STEP = "opt.zero_grad(); net(x).sum().backward(); opt.step()\n"


def test_an_optimizer_inside_an_optimizer(nb: Notebook) -> None:
    nb.here(
        SAM + "opt=SAM(net.parameters(), torch.optim.SGD, lr=.1, momentum=.9); base=opt.base_optimizer; w0=w.clone()"
    )
    nb.cell(
        STEP + "k=opt.param_groups is opt.base_optimizer.param_groups, opt.param_groups[0]['params'][0] is net.weight"
    )
    assert nb["k"] == (True, True)
    assert nb.value("opt.base_optimizer is base and opt.rounds==1 and 'momentum_buffer' in base.state[w]")
    assert nb.value("opt.param_groups is base.param_groups and not torch.equal(w, w0)")
    nb.here(STEP)
    nb.cell(STEP + "k=opt.rounds")
    assert nb["k"] == 3 and nb.value("opt.rounds==3")


def test_lbfgs(nb: Notebook) -> None:
    nb.here(NET + "opt=torch.optim.LBFGS(net.parameters(), lr=.1)")
    source = "def closure():\n  opt.zero_grad(); loss=(net(x)**2).mean(); loss.backward(); return loss\n"
    nb.cell(source + "first=opt.step(closure).item(); last=opt.step(closure).item(); k=opt._params[0] is net.weight")
    assert nb["last"] < nb["first"] and nb["k"] and nb.value("opt._params[0] is w and opt.state[w]['n_iter']>0")
    nb.here("opt.step(closure)")
    nb.cell("opt.step(closure)")


def test_attributes_of_the_users_own(nb: Notebook) -> None:
    nb.here(NET + "opt=torch.optim.AdamW(net.parameters()); opt.my_note='x'; opt.gone=1; oid=id(opt)")
    nb.cell("k=opt.my_note; opt.my_note='y'; opt.more=[1]; del opt.gone\n" + STEP)
    assert nb["k"] == "x"
    assert nb.value("opt.my_note=='y' and opt.more==[1] and not hasattr(opt,'gone') and id(opt)==oid")
    nb.here("opt.my_note='z'; opt.more.append(2)")
    nb.cell("k=opt.my_note, opt.more, opt.state[net.weight]['step'].item()\n" + STEP)
    assert nb["k"] == ("z", [1, 2], 1) and nb.value("opt.state[w]['step'].item()==2")


def test_step_hooks_and_schedulers(nb: Notebook) -> None:
    nb.here(
        SAM + "calls=[]\nopt=SAM(net.parameters(), torch.optim.SGD, lr=1.)\n"
        "hook=opt.register_step_post_hook(lambda *a: calls.append('h'))\n"
        "sch=torch.optim.lr_scheduler.StepLR(opt, 1); mine=opt.step"
    )
    nb.cell(STEP + "sch.step()\nk=sch.optimizer is opt, 'step' in vars(opt), type(opt).step.hooked")
    assert nb["k"] == (True, False, True) and nb["calls"] == ["h"]
    assert nb.value("opt.step is mine and opt.param_groups[0]['lr']<1 and sch.optimizer is opt")
    nb.cell("o2=torch.optim.Adam(net.parameters()); o2.tag='t'; s2=torch.optim.lr_scheduler.StepLR(o2,1)")
    assert nb.value(
        "o2.tag=='t' and o2.param_groups[0]['params'][0] is w and s2.optimizer is o2 and 'step' not in vars(o2)"
    )
    nb.here("net(x).sum().backward(); o2.step()")
    nb.cell("o2.step(); k='step' in vars(o2), o2.state[net.weight]['step'].item()")
    assert nb["k"] == (True, 2)
