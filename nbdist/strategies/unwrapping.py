"""The bare model out of whatever was put around it, when no Accelerator is at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from nbdist import checks, views


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model without DistributedDataParallel, DataParallel and, if asked, torch.compile.

    Args:
        model: a model, wrapped or not; modules that are in it stay as they are unless `recursive`.
        keep_fp32_wrapper: no effect: forward is never replaced.
        keep_torch_compile: whether a torch.compile that the user had put on stays. One around a wrapper never does.
        recursive: take wrappers off the modules inside too, in place.
    """
    checks.kind(model, torch.nn.Module, "extract_model_from_parallel: model", "a torch.nn.Module")
    keep_torch_compile = checks.flag(keep_torch_compile, "extract_model_from_parallel: keep_torch_compile", True)
    recursive = checks.flag(recursive, "extract_model_from_parallel: recursive")
    bare = views.bare(model)
    compiled = getattr(bare, "_orig_mod", None)
    if compiled is not None and (
        not keep_torch_compile or isinstance(compiled, DistributedDataParallel | DataParallel | views.View)
    ):
        bare = views.bare(compiled)
    while isinstance(bare, DistributedDataParallel | DataParallel):
        bare = views.bare(bare.module)
    while not keep_torch_compile and (compiled := getattr(bare, "_orig_mod", None)) is not None:
        bare = compiled
    if recursive:
        for name, child in list(bare.named_children()):
            inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True)
            if inner is not child:
                setattr(bare, name, inner)
    return bare
