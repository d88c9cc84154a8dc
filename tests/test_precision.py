"""Mixed precision in one process: what a prepared model is, what it gives, what is refused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import os
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from nbdist import Accelerator, precision, views
from nbdist.kwargs import PRECISION_VARIABLE, AutocastKwargs, PrecisionType

ONES = torch.ones(1, 2)
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    note: str = "here"
    hidden: tuple[torch.Tensor, ...] = ()


class Inside(collections.OrderedDict):
    """Like a library's own output: a mapping whose items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Net(nn.Module):
    kept = "the class's"

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.seen = nn.Linear(2, 2), {"size": 2}, []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.layer(rows).dtype)
        return self.layer(rows)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.append(self(rows).dtype)
        self.seen.append(self.features(rows).dtype)
        return (rows @ self.layer.weight).mean()

    def features(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)

    def steps(self, rows: torch.Tensor) -> Any:
        yield self(rows)

    def weights(self) -> Any:
        return self.layer.weight

    def itself(self) -> Any:
        return self


def bf16(**options: Any) -> Accelerator:
    return Accelerator(mixed_precision="bf16", **options)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_mp1_the_dtype_of_outputs_can_be_chosen(kind: str) -> None:
    """MP1: float32 by default, the model's own with output_dtype="keep"."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for output_dtype, expected in (("float32", torch.float32), ("keep", half)):
        accelerator = Accelerator(mixed_precision=kind, output_dtype=output_dtype)
        model = accelerator.prepare(nn.Linear(2, 2))
        assert model(ONES).dtype is expected and accelerator.mixed_precision == kind
        assert model.weight.dtype is torch.float32
        assert accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)(ONES).dtype is expected
    with pytest.raises(ValueError, match="output_dtype='bf16': takes one of float32, keep"):
        Accelerator(output_dtype="bf16")


def test_a_prepared_model_is_the_users_with_another_call() -> None:
    accelerator, own = bf16(), Net()
    model = accelerator.prepare(own)
    assert isinstance(model, Net) and type(model).__name__ == "Net" and model is not own
    assert accelerator.unwrap_model(model) is own and accelerator.prepare(model) is model
    assert accelerator.prepare(own) is model and bf16().prepare(model) is model
    assert list(model.state_dict()) == list(own.state_dict()) == ["layer.weight", "layer.bias"]
    assert repr(model) == repr(own) and model.config is own.config and model.kept == "the class's"
    model.extra, model.other = 3, nn.Linear(1, 1)
    assert own.extra == 3 and own.other is model.other
    model.eval()
    assert not own.training and not own.layer.training
    own.register_forward_hook(lambda *_: torch.zeros(1))
    assert model(ONES).item() == 0.0
    assert "forward" not in vars(own) and type(own) is Net
    assert Net.forward(own, ONES).dtype is torch.float32  # the module itself computes as ever


def test_methods_run_under_autocast_too_and_inside_nothing_is_converted_twice() -> None:
    model = bf16().prepare(Net())
    assert model.loss(ONES).dtype is torch.float32
    assert model.seen == [torch.bfloat16, torch.float32, torch.bfloat16]  # in forward, of forward, of a method
    assert model.forward(ONES).dtype is torch.float32 and model.seen[-1] is torch.bfloat16
    assert next(model.steps(ONES)).dtype is torch.float32 and model.seen[-1] is torch.bfloat16
    assert model.itself() is model and model.weights() is model.layer.weight
    kept = bf16(output_dtype="keep").prepare(Net())
    assert kept.loss(ONES).dtype is torch.bfloat16 and kept.features(ONES).dtype is torch.bfloat16


def test_gradients_reach_the_users_parameters_in_full_precision() -> None:
    accelerator, own = bf16(), Net()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    before = own.layer.weight.detach().clone()
    accelerator.backward(model(ONES).mean())
    optimizer.step()
    assert own.layer.weight.grad.dtype is torch.float32 and not torch.equal(before, own.layer.weight)


def test_copied_pickled_and_saved_it_is_the_users_class() -> None:
    own = Net()
    model = bf16().prepare(own)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is Net and torch.equal(other.layer.weight, own.layer.weight)
    pair = pickle.loads(pickle.dumps([model, own]))
    assert pair[0] is pair[1]


class Strange(nn.Module):
    """A class with slots, and with words of its own for attributes that are not there."""

    __slots__ = ("__hidden", "count")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "count", 1)
        object.__setattr__(self, "_Strange__hidden", 5)
        self.layer = nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name != "made_up" else 42

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return super().__call__(rows) + self.__hidden

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


def _strange() -> nn.Module:
    return Strange()


def _parametrized() -> nn.Module:
    model = nn.Linear(2, 2)
    parametrize.register_parametrization(model, "weight", nn.Identity())
    return model


def _own_forward() -> nn.Module:
    model = nn.Linear(2, 2)
    model.forward = lambda rows: nn.functional.linear(rows, model.weight)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make",
    [
        _strange,
        _parametrized,
        _own_forward,
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: torch.jit.trace(nn.Linear(2, 2), ONES),
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        lambda: nn.Sequential(nn.Linear(2, 2)),
    ],
    ids=["slots", "parametrized", "forward of its own", "scripted", "traced", "compiled", "sequential"],
)
def test_modules_of_any_kind(make: Any) -> None:
    accelerator, own = bf16(output_dtype="keep"), make()
    model = accelerator.prepare(own)
    assert isinstance(model, type(own)) and model(ONES).dtype is torch.bfloat16
    assert accelerator.unwrap_model(model) is own and list(model.state_dict()) == list(own.state_dict())
    if isinstance(own, Strange):
        model.count += 1
        assert own.count == 2 and model.made_up == 42


def test_modules_that_cannot_be_seen_so_say_what_to_do() -> None:
    class Named(nn.Linear):
        def __init_subclass__(cls, *, name: str) -> None: ...

    with pytest.raises(TypeError, match=r"Named cannot have a subclass .*accelerator.autocast\(\)"):
        bf16().prepare(Named(1, 1))
    with pytest.raises(RuntimeError, match=r"LazyLinear is lazy.*call it once before prepare"):
        bf16().prepare(nn.LazyLinear(2))


def test_outputs_of_any_shape_become_float32_and_the_rest_stays_the_very_object() -> None:
    half = torch.ones(1, dtype=torch.bfloat16)
    for value in (
        [half, {"a": (half, 1)}],
        Pair(half, "x"),
        Output(half, hidden=(half,)),
        Inside(a=half, b="x"),
        torch.return_types.max((half, torch.tensor([1]))),
    ):
        new = precision.in_float32(value)
        assert type(new) is type(value)
        flat = str(new)
        assert "bfloat16" not in flat and "1." in flat, flat
    assert precision.in_float32(Inside(a=half)).a.dtype is torch.float32
    assert precision.in_float32(Output(half)).note == "here"
    parameter = nn.Parameter(half)
    for value in ([1, torch.ones(1)], {"a": None}, Pair(1, 2), Output(torch.ones(1)), parameter, Inside(a=1)):
        assert precision.in_float32(value) is value


def test_where_the_precision_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator().mixed_precision == "no" and Accelerator(mixed_precision=PrecisionType.BF16)
    monkeypatch.setitem(os.environ, PRECISION_VARIABLE, "BF16")
    assert Accelerator().mixed_precision == "bf16" and Accelerator(mixed_precision="no").mixed_precision == "no"
    monkeypatch.setitem(os.environ, PRECISION_VARIABLE, "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION='half': takes one of no, fp8, fp16, bf16"):
        Accelerator()
    monkeypatch.setitem(os.environ, PRECISION_VARIABLE, "")
    assert Accelerator().mixed_precision == "no"


def test_autocast_for_what_is_not_in_a_model() -> None:
    weight, accelerator = torch.ones(2, 2), bf16()
    with accelerator.autocast():
        assert (ONES @ weight).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (ONES @ weight).dtype is torch.float32
    with Accelerator().autocast():
        assert (ONES @ weight).dtype is torch.float32
    off = bf16(kwargs_handlers=[AutocastKwargs(enabled=False)], output_dtype="keep")
    assert off.prepare(Net()).loss(ONES).dtype is torch.float32


def test_mocked_a_device_that_lacks_the_precision_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(RuntimeError, match=r"='fp16': the device, cpu, cannot: .*'Half'. Use 'bf16' or 'no'"):
        Accelerator(mixed_precision="fp16")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: False)
    with pytest.raises(RuntimeError, match=r"Tesla T4 \(cuda\), has no bfloat16 .*; use 'fp16' or 'no'"):
        precision.resolve("bf16", torch.device("cuda"))


def test_a_view_goes_with_its_last_user() -> None:
    import gc
    import weakref

    class Short(nn.Linear):
        pass

    kinds = weakref.ref(Short)
    own = weakref.ref(bf16().prepare(Short(1, 1)))
    assert own() is None and not [view for view in views._views.values() if type(view).__name__ == "Short"]
    del Short
    gc.collect()
    assert kinds() is None
