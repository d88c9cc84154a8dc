"""Global settings of libraries that change what code computes: dtype and device by default, grad mode, determinism,
numpy's errors, decimal's context ... They hold on the ranks as they were set here, and here as a cell set them there.

No library is imported for it.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nbdist.magics import rank_settings, settings
from nbdist.worker.imports import when_imported

Section = dict[Any, Any]
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # how it is read, how it is put
_SHOWN = {"numpy": "numpy", "torch": "torch", "pandas": "pandas"}  # how values are printed: in both directions too


def read() -> dict[str, Section]:
    """All of them as they are, of the libraries that are loaded."""
    found: dict[str, Section] = {}
    for name, module in MODULES.items():
        if module in sys.modules:
            found[name] = section = {}
            for key, (get, _) in _settings(name).items():
                try:
                    section[key] = get()
                except Exception:  # this version of the library has no such setting
                    continue
    return found


def read_all() -> dict[str, Section]:
    """These, and how values are printed."""
    found = read()
    for name, module in _SHOWN.items():
        if module in sys.modules:
            try:
                found[f"shown {name}"] = settings.section(name)
            except Exception:
                continue
    return found


def changed(before: dict[str, Section], now: dict[str, Section]) -> dict[str, Section]:
    """What is not as it was, and can be sent."""
    found: dict[str, Section] = {}
    for name, section in now.items():
        old = before.get(name)
        if old == section:
            continue
        for key, value in section.items():
            if (old is None or key not in old or old[key] != value) and _pickles(value):
                found.setdefault(name, {})[key] = value
    return found


def news(told: dict[str, Section]) -> dict[str, Section]:
    """What ranks that were told this do not know; `told` is brought up to date."""
    now = read()
    new = changed(told.get("globals", {}), now)
    told["globals"] = now
    return new


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def put(new: dict[str, Section]) -> None:
    """Put these in place: at once where the library is loaded, else when it is imported."""
    for name, section in new.items():
        if name in MODULES:
            when_imported(MODULES[name], functools.partial(_put, name, section))
        else:
            rank_settings.put_shown(name.removeprefix("shown "), section)


def _put(name: str, section: Section, module: ModuleType) -> None:
    known = _settings(name)
    for key, value in section.items():
        if key in known:
            get, set_to = known[key]
            try:
                if get() != value:
                    set_to(value)
            except Exception:  # not to be had here: a device, for example
                continue


@functools.cache
def _settings(name: str) -> dict[str, Setting]:
    return _MAKERS[name](sys.modules[MODULES[name]])


def _attributes(owner: Any, *names: str) -> dict[str, Setting]:
    label = getattr(owner, "__name__", type(owner).__name__)
    return {
        f"{label}.{name}": (functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))
        for name in names
    }


def _sys(module: Any) -> dict[str, Setting]:
    return {"recursion": (sys.getrecursionlimit, sys.setrecursionlimit)}


def _locale(module: Any) -> dict[str, Setting]:
    return {"all": (lambda: module.setlocale(module.LC_ALL), lambda value: module.setlocale(module.LC_ALL, value))}


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal(module: Any) -> dict[str, Setting]:
    def get() -> Any:
        context = module.getcontext()
        traps = frozenset(signal.__name__ for signal, trapped in context.traps.items() if trapped)
        return (*(getattr(context, name) for name in _DECIMAL), traps)

    def put(value: Any) -> None:
        context = module.getcontext()
        for name, content in zip(_DECIMAL, value, strict=False):
            setattr(context, name, content)
        for signal in context.traps:
            context.traps[signal] = signal.__name__ in value[-1]

    return {"context": (get, put)}


def _numpy(module: Any) -> dict[str, Setting]:
    return {"errors": (module.geterr, lambda value: module.seterr(**value))}


def _torch(torch: Any) -> dict[str, Setting]:
    backends = torch.backends
    found: dict[str, Setting] = {
        # by name: a notebook may not have torch
        "dtype": (
            lambda: str(torch.get_default_dtype()).removeprefix("torch."),
            lambda value: torch.set_default_dtype(getattr(torch, value)),
        ),
        "device": (lambda: _device(torch), torch.set_default_device),
        "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "anomaly": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        "warn always": (torch.is_warn_always_enabled, torch.set_warn_always),
    }
    found |= _attributes(backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")
    found |= _attributes(
        backends.cuda.matmul,
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    for reads, puts in (
        ("flash_sdp_enabled", "enable_flash_sdp"),
        ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
        ("math_sdp_enabled", "enable_math_sdp"),
        ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
    ):
        if hasattr(backends.cuda, reads) and hasattr(backends.cuda, puts):
            found[reads] = (getattr(backends.cuda, reads), getattr(backends.cuda, puts))
    return found


def _device(torch: Any) -> str | None:
    """None for the usual one; a GPU without its number: it is each rank's own."""
    device = str(torch.get_default_device())
    return None if device == "cpu" else device.split(":")[0] if device.startswith("cuda") else device


MODULES = {"sys": "sys", "locale": "locale", "decimal": "decimal", "numpy errors": "numpy", "torch modes": "torch"}
_MAKERS: dict[str, Callable[[Any], dict[str, Setting]]] = {
    "sys": _sys,
    "locale": _locale,
    "decimal": _decimal,
    "numpy errors": _numpy,
    "torch modes": _torch,
}
