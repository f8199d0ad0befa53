"""Which processes a run on this machine consists of, and which GPUs each may see. Pure.

Guarantees: trainer ranks get the first GPUs, generators those after them; nobody shares a GPU unless there are too few
and weights travel by gloo, as two NCCL members cannot be on one GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.console.errors import EXIT_CONFIG, ConsoleError
from services.protocol.config import RunConfig


@dataclass(frozen=True)
class PodPlan:
    """One service process."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)  # laid over the common environment


@dataclass(frozen=True)
class UnitPlan:
    """Pods that live and die together: all trainer ranks, or a single pod of another kind."""

    name: str
    pods: tuple[PodPlan, ...]
    collective: bool = False  # the pods meet at MASTER_PORT, a new one with every start


def plan_units(config: RunConfig, config_path: Path, gpus: Sequence[str] = ()) -> list[UnitPlan]:
    """The units of a run; `gpus` are the devices' names for CUDA_VISIBLE_DEVICES, none on a CPU machine."""
    ranks, tensor_parallel = config.trainer.ranks, config.generator.tensor_parallel
    share = sharing(config, gpus)

    def visible(first: int, count: int) -> dict[str, str]:
        if not gpus:
            return {}
        chosen = [gpus[(first + i) % len(gpus) if share else first + i] for i in range(count)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(chosen))}

    def pod(kind: str, name: str, environ: Mapping[str, str]) -> PodPlan:
        argv = (sys.executable, "-m", f"services.{kind}", "--config", str(config_path), "--name", name)
        return PodPlan(name, argv, {**environ, "GRPO_CONFIG": str(config_path), "GRPO_POD": name})

    trainers = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        trainers.append(pod("trainer", f"trainer-{rank}", {**place, **visible(0, ranks)}))
    generators = [
        pod("generator", f"generator-{i}", visible(ranks + i * tensor_parallel, tensor_parallel))
        for i in range(config.generator.count)
    ]
    return [
        UnitPlan("dataprep-0", (pod("dataprep", "dataprep-0", {"CUDA_VISIBLE_DEVICES": ""}),)),
        UnitPlan("trainer", tuple(trainers), collective=True),
        *(UnitPlan(generator.name, (generator,)) for generator in generators),
    ]


def sharing(config: RunConfig, gpus: Sequence[str]) -> bool:
    """Whether generators share GPUs with others, for want of GPUs. Raises `ConsoleError` where that cannot work."""
    ranks, tensor_parallel = config.trainer.ranks, config.generator.tensor_parallel
    wanted = ranks + config.generator.count * tensor_parallel
    if not gpus or wanted <= len(gpus):
        return False
    if max(ranks, tensor_parallel) > len(gpus):
        raise ConsoleError(
            f"trainer.ranks = {ranks} and generator.tensor_parallel = {tensor_parallel} need as many GPUs each, "
            f"and this machine shows {len(gpus)}: lower them",
            EXIT_CONFIG,
        )
    if config.sync.backend == "nccl":
        raise ConsoleError(
            f"the run wants {wanted} GPUs and this machine shows {len(gpus)}; generators can share GPUs with "
            'sync.backend = "gloo" only, not "nccl": set it, or lower trainer.ranks or generator.count',
            EXIT_CONFIG,
        )
    return True


def common_environment(environ: Mapping[str, str], config: RunConfig, gpus: Sequence[str]) -> dict[str, str]:
    """What every service inherits. Configuration comes from the file alone, so overrides for the console are left out."""
    common = {name: value for name, value in environ.items() if not name.startswith("GRPO__")}
    common.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not gpus:
        common.setdefault("OMP_NUM_THREADS", "1")  # generators, trainer and verifiers share the cores
    if Path(config.model.path).is_dir():
        common.setdefault("HF_HUB_OFFLINE", "1")  # nothing to fetch, so no waiting for a network
    return common


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them, found without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    return [str(i) for i in range(count)]
