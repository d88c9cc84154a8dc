"""What torch can do here. Imports torch, and starts no CUDA: asked in the supervisor, or in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.config import gpus
from nbdist.config.machine import Facts, cpu_precisions, gib


def torch_facts(environment: Mapping[str, str]) -> Facts:
    import torch
    import torch.distributed as dist

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    if getattr(torch.version, "hip", None):
        built = f"ROCm {torch.version.hip}"
    facts = [
        ("torch", f"{torch.__version__}, built for {built or 'the CPU' if not _mps(torch) else 'the CPU and MPS'}")
    ]
    if not dist.is_available():
        facts.append(("backends", "none: this torch was built without torch.distributed"))
    else:
        known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        names = [name for name, available in known.items() if available()]
        if "nccl" in names:
            version = torch.cuda.nccl.version()
            names[names.index("nccl")] = (
                f"nccl {'.'.join(map(str, version)) if isinstance(version, tuple) else version}"
            )
        facts.append(("backends", ", ".join(names)))
    there = gpus.look(environment)
    facts.append(("GPUs", f"{gpus.how_many(there.count)} for ranks: {there.why}"))
    capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", lambda: "unknown")()
    facts.append(("precision", f"{cpu_precisions()}; torch's kernels are {capability}"))
    return facts


def gpu_facts() -> Facts:
    """Each NVIDIA GPU of the machine, visible or not."""
    return [
        (
            f"GPU {gpu.index}",
            f"{gpu.name}, {gib(gpu.memory)}, {gib(gpu.memory - gpu.used)} free, {gpu.mode} mode, {_precisions(gpu)}",
        )
        for gpu in gpus.gpus()
    ]


def _precisions(gpu: gpus.Gpu) -> str:
    try:
        capability = float(gpu.capability)
    except ValueError:
        return f"compute capability {gpu.capability}"
    kinds = [name for name, least in (("fp16", 7.0), ("bf16", 8.0), ("fp8", 8.9)) if capability >= least]
    return f"compute capability {gpu.capability}: {', '.join(kinds) or 'fp32 only'} in hardware"


def _mps(torch: object) -> bool:
    return bool(torch.backends.mps.is_built())  # type: ignore[attr-defined]
