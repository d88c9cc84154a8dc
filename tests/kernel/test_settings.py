"""Global settings of libraries: those of the notebook hold on the ranks, and those that a cell makes hold here."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel

SETTINGS = {
    "dtype": ("torch.set_default_dtype(torch.float64)", "str(torch.ones(1).dtype)"),
    "grad": ("torch.set_grad_enabled(False)", "torch.ones(1, requires_grad=True).mul(2).requires_grad"),
    "deterministic": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())",
    ),
    "matmul": ("torch.set_float32_matmul_precision('high')", "torch.get_float32_matmul_precision()"),
    "cudnn": ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
    "anomaly": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "device": ("torch.set_default_device('meta')", "torch.ones(1).device.type"),
    "seterr": ("np.seterr(divide='raise')", "np.geterr()['divide']"),
    "numpy prints": ("np.set_printoptions(precision=2)", "repr(np.array([1.23456]))"),
    "decimal": ("decimal.getcontext().prec = 5", "str(decimal.Decimal(1) / 3)"),
    "recursion": ("sys.setrecursionlimit(2345)", "sys.getrecursionlimit()"),
}


def test_settings_of_libraries_hold_on_both_sides(fresh: Notebook) -> None:
    fresh.ok("import torch, numpy as np, decimal, sys")
    looks = "{" + ", ".join(f"{name!r}: {look}" for name, (_, look) in SETTINGS.items()) + "}"
    sets = "\n".join(one for one, _ in SETTINGS.values())
    fresh.ranks("pass")
    fresh.ok(sets)
    here = fresh.value(looks)
    fresh.ranks("there = " + looks)
    assert fresh.value("there") == here
    fresh.ok("%distributed restart")
    fresh.ranks("there = " + looks + "\ntorch.set_default_dtype(torch.float16)\nnp.seterr(divide='ignore')")
    assert fresh.value("there") == here
    assert fresh.value("(str(torch.get_default_dtype()), np.geterr()['divide'])") == ("torch.float16", "ignore")


def test_what_a_cell_sets_holds_here(fresh: Notebook) -> None:
    sets = "\n".join(one for one, _ in SETTINGS.values())
    fresh.ranks("import torch, numpy as np, decimal, sys\nif rank == 0:\n    " + sets.replace("\n", "\n    "))
    looks = "{" + ", ".join(f"{name!r}: {look}" for name, (_, look) in SETTINGS.items()) + "}"
    here = fresh.value(looks)
    fresh.ok(sets)
    assert fresh.value(looks) == here
    fresh.ranks("there = " + looks)  # rank 1 has not set them by itself
    assert fresh.value("ranks['there'][1]") == here


def test_settings_import_no_library(fresh: Notebook) -> None:
    fresh.ranks("import sys as s\nt = s.modules['torch']\nt.set_default_dtype(t.float64)\ndel s, t")
    assert fresh.value("'torch' in __import__('sys').modules") is False
    fresh.ok("import torch")
    assert fresh.value("str(torch.get_default_dtype())") == "torch.float64"
