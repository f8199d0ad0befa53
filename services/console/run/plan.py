"""Plans the processes of a run on this machine, and the GPUs that each may use. Pure.

Guarantees: trainer ranks get the first GPUs and generators the next ones. Generators share GPUs only if there are too few and
weights travel by gloo, because two NCCL members cannot use the same GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from services.config import RunConfig
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.runtime.child_processes import STOP_S, ProcessPlan, ServicePlan, rank_environment
from services.store.records import RunState

TRAINER = "trainer"  # name of the ranks together
USED_SHARE = 0.9  # of a GPU's memory, as vLLM takes by default; the rest is for the driver and for fragments
GENERATORS_PER_CORE = 4  # more would only take memory and time from each other
TRAINER_STOP_S = 30.0  # time for a stopping trainer to finish its step and save
TRACKER_STOP_S = 30.0  # time for a stopping tracker to account for the end of the others and then close its outputs


def plan_units(config: RunConfig, config_path: Path, gpus: Sequence[str] = ()) -> list[ServicePlan]:
    """Return the children of a run. `gpus`: names of the devices for CUDA_VISIBLE_DEVICES; empty on a CPU machine.

    A child's plan does not depend on generator.count, so scaling only adds or removes the last generators.
    """
    ranks, tensor_parallel = config.trainer.ranks, config.generator.tensor_parallel
    sharing(config, gpus)  # refuses what does not fit

    def visible(first: int, count: int) -> dict[str, str]:
        if not gpus:
            return {}
        chosen = [gpus[(first + i) % len(gpus)] for i in range(count)]  # wraps around only where GPUs may be shared
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(chosen))}

    def pod(kind: str, name: str, environ: Mapping[str, str]) -> ProcessPlan:
        argv = (sys.executable, "-m", f"services.{kind}", "--config", str(config_path), "--name", name)
        return ProcessPlan(name, argv, {**environ, "GRPO_CONFIG": str(config_path), "GRPO_POD": name})

    trainers = []
    for rank in range(ranks):
        place = rank_environment(rank, rank, ranks, "127.0.0.1")
        trainers.append(pod("trainer", f"trainer-{rank}", {**place, **visible(0, ranks)}))
    generators = [
        pod("generator", f"generator-{i}", visible(ranks + i * tensor_parallel, tensor_parallel))
        for i in range(config.generator.count)
    ]
    environments = [pod("environment", "environment-0", {"CUDA_VISIBLE_DEVICES": ""})] if config.environments else []
    trackers = (
        [pod("tracker", "tracker-0", {"CUDA_VISIBLE_DEVICES": ""})] if config.tracking.trackers or config.samples.keep else []
    )
    webs = [pod("web", "web-0", {"CUDA_VISIBLE_DEVICES": ""})] if config.web.port else []
    return [
        ServicePlan("dataprep-0", (pod("dataprep", "dataprep-0", {"CUDA_VISIBLE_DEVICES": ""}),)),
        ServicePlan(TRAINER, tuple(trainers), collective=True, stop_s=TRAINER_STOP_S),
        *(ServicePlan(pod.name, (pod,), stop_s=config.generator.drain_s + STOP_S) for pod in generators),
        *(ServicePlan(each.name, (each,), stop_s=config.generator.drain_s + STOP_S) for each in environments),
        *(ServicePlan(tracker.name, (tracker,), essential=False, stop_s=TRACKER_STOP_S) for tracker in trackers),
        *(ServicePlan(web.name, (web,), essential=False, stays=True) for web in webs),
    ]


def max_generators(config: RunConfig, gpus: Sequence[str], cores: int) -> int:
    """Return the largest number of generators that the GPUs allow or, without any, the cores.

    Generators that share GPUs are limited by both: vLLM's engines by its memory, of which each takes a share that is fixed.
    """
    generator, ranks = config.generator, config.trainer.ranks
    if gpus and config.sync.backend not in ("gloo", "filesystem", "store") and not sharing(config, gpus):
        return (len(gpus) - ranks) // generator.tensor_parallel
    most = GENERATORS_PER_CORE * cores
    if gpus and generator.engine == "vllm":
        share = generator.engine_options.get("gpu_memory_utilization", USED_SHARE)
        each = int(USED_SHARE / share) if isinstance(share, int | float) and share > 0 else 1
        most = min(most, (each * len(gpus) - ranks) // generator.tensor_parallel)
    return max(generator.count, most)


def wanted_generators(state: RunState | None, count: int, limit: int) -> tuple[int, str]:
    """Return the number of generators to run, and why it is lower than the desired number (empty: it is not).

    `count`: the number until another is requested. `limit`: the number that the machine allows; the desired number may have been
    set on a larger one.
    """
    wanted = count if state is None or state.scale.wanted is None else state.scale.wanted
    if wanted <= limit:
        return wanted, ""
    return limit, f"{wanted} generators desired, but this machine allows only {limit}"


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


def common_environment(environ: Mapping[str, str], config: RunConfig, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of every service. It omits `GRPO__` overrides, because services read only the file."""
    common = {name: value for name, value in environ.items() if not name.startswith("GRPO__")}
    common.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not gpus:
        common.setdefault("OMP_NUM_THREADS", "1")  # generators, trainer and verifiers share the cores
    if Path(config.model.path).is_dir():
        common.setdefault("HF_HUB_OFFLINE", "1")  # nothing to download, so do not wait for the network
    return common


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
