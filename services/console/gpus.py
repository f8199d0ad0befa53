"""The GPUs that this process may use, and how the processes of a run share them if there are too few."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile

from services.config import RunConfig
from services.console.errors import EXIT_CONFIG, ConsoleError

USED_SHARE = 0.9  # of a GPU's memory, as vLLM takes by default; the rest is for the driver and for fragments


def sharing(config: RunConfig, gpus: Sequence[str]) -> bool:
    """Return whether generators must share GPUs because there are too few. Raise `ConsoleError` where that cannot work."""
    ranks, tensor_parallel = config.trainer.ranks, config.generator.tensor_parallel
    wanted = ranks + config.generator.count * tensor_parallel
    if not gpus or wanted <= len(gpus):
        return False
    if max(ranks, tensor_parallel) > len(gpus):
        raise ConsoleError(
            f"trainer.ranks = {ranks} and generator.tensor_parallel = {tensor_parallel} each need that many GPUs, "
            f"but this machine has {len(gpus)}: lower them",
            EXIT_CONFIG,
        )
    if config.sync.backend == "nccl":
        raise ConsoleError(
            f"the run needs {wanted} GPUs but this machine has {len(gpus)}, and generators cannot share GPUs with "
            'sync.backend = "nccl": set it to "gloo", or lower trainer.ranks or generator.count',
            EXIT_CONFIG,
        )
    return True


def forced_backend(config: RunConfig, gpus: Sequence[str]) -> str:
    """Return `gloo` if generators share GPUs and sync.backend is `auto`, which would choose NCCL; else empty."""
    return "gloo" if sharing(config, gpus) and config.sync.backend == "auto" else ""


def memory_share(config: RunConfig, gpus: Sequence[str]) -> float | None:
    """Return the share of a GPU's memory for an engine that shares its GPU; None: it has the GPU to itself, or the run configures
    the share.

    All processes on the fullest GPU get the same.
    """
    if config.generator.engine != "vllm" or "gpu_memory_utilization" in config.generator.engine_options:
        return None
    if not sharing(config, gpus):
        return None
    return round(USED_SHARE / _on_fullest(config, gpus), 2)


def trainer_share(config: RunConfig, gpus: Sequence[str]) -> float:
    """Return the share of a GPU's memory that vLLM's engines leave to a trainer rank, 1 if it has a GPU to itself."""
    if config.generator.engine != "vllm" or not sharing(config, gpus):
        return 1.0
    taken = memory_share(config, gpus) or config.generator.engine_options["gpu_memory_utilization"]
    return max(0.0, 1.0 - taken * (_on_fullest(config, gpus) - 1))


def _on_fullest(config: RunConfig, gpus: Sequence[str]) -> int:
    """Return the number of processes on the GPU that has most of them."""
    processes = config.trainer.ranks + config.generator.count * config.generator.tensor_parallel
    return -(-processes // len(gpus))


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return list(takewhile(lambda name: name != "-1", filter(None, names)))  # as CUDA does
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    return [str(i) for i in range(count)]
