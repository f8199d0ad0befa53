"""Plans the processes of a run on this machine, and the GPUs that each may use. Pure.

Guarantees: trainer ranks get the first GPUs and generators the next ones. Generators share GPUs only if there are too few and
weights travel by gloo, because two NCCL members cannot use the same GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.config import RunConfig
from services.console.gpus import USED_SHARE, sharing
from services.runtime.child_processes import STOP_S, ProcessPlan, ServicePlan, rank_environment
from services.store.records import RunState

TRAINER = "trainer"  # name of the ranks together
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

    def lone(kind: str) -> tuple[ProcessPlan]:
        return (pod(kind, f"{kind}-0", {"CUDA_VISIBLE_DEVICES": ""}),)

    places = [rank_environment(rank, rank, ranks, "127.0.0.1") for rank in range(ranks)]
    trainers = tuple(pod("trainer", f"trainer-{rank}", {**place, **visible(0, ranks)}) for rank, place in enumerate(places))
    drain_s = config.generator.drain_s + STOP_S
    units = [ServicePlan("dataprep-0", lone("dataprep")), ServicePlan(TRAINER, trainers, collective=True, stop_s=TRAINER_STOP_S)]
    for i in range(config.generator.count):
        generator = pod("generator", f"generator-{i}", visible(ranks + i * tensor_parallel, tensor_parallel))
        units.append(ServicePlan(generator.name, (generator,), stop_s=drain_s))
    if config.environments:
        units.append(ServicePlan("environment-0", lone("environment"), stop_s=drain_s))
    if config.tracking.trackers or config.samples.keep:
        units.append(ServicePlan("tracker-0", lone("tracker"), essential=False, stop_s=TRACKER_STOP_S))
    if config.web.port:
        units.append(ServicePlan("web-0", lone("web"), essential=False, stays=True))
    return units


def max_generators(config: RunConfig, gpus: Sequence[str], cores: int) -> int:
    """Return the largest number of generators that the GPUs allow or, without any, the cores.

    Generators that share GPUs are limited by both: vLLM's engines by its memory, of which each takes a share that is fixed.
    """
    generator, ranks = config.generator, config.trainer.ranks
    if gpus and config.sync.backend not in ("gloo", "store") and not sharing(config, gpus):
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


def common_environment(environ: Mapping[str, str], config: RunConfig, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of every service. It omits `GRPO__` overrides, because services read only the file."""
    common = {name: value for name, value in environ.items() if not name.startswith("GRPO__")}
    common.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not gpus:
        common.setdefault("OMP_NUM_THREADS", "1")  # generators, trainer and verifiers share the cores
    if Path(config.model.path).is_dir():
        common.setdefault("HF_HUB_OFFLINE", "1")  # nothing to download, so do not wait for the network
    return common
