"""Checks of the resources that a run needs on this machine: its folder, disk, memory and ports. They import nothing heavy and
take no time."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.config import RunConfig
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.model import Weights, folder_of, weights_of
from services.console.errors import ConsoleError
from services.console.gpus import sharing, trainer_share

GIBIBYTE = 2**30
STATE_BYTES = 12  # a parameter's float32 master copy and two moments, which checkpoints hold and the optimizer keeps
AVERAGED_BYTES = 4  # a parameter of an averaged reference, in checkpoints
ACCUMULATED_BYTES = 4  # a parameter's gradient, in float32
LEAST_FREE_BYTES = 2 * GIBIBYTE  # for logs, Redis' append-only file and metrics
PROCESS_BYTES = 0.4 * GIBIBYTE  # of a Python process with torch
GENERATOR_BYTES = 0.9 * GIBIBYTE  # of a generator and its vLLM engine on a CPU without weights and KV cache, as measured
GENERATOR_COPIES = 3  # of the weights, on a CPU: as received, the loaded ones before they replace others, and those others
BLOCK_MATRIX = re.compile(r"\.\d+\..*?(\w+)\.weight$")  # the name of a layer in a numbered block
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMORY = Path("/proc/meminfo")


def disk(config: RunConfig) -> Iterator[Finding]:
    """Check that the run's folder is writable and has space for its checkpoints, besides those that it has."""
    given = f"run.dir = {config.run.dir!r}"
    folder = Path(config.run.dir).resolve()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        why = "it is not a folder" if not there.is_dir() else error.strerror
        yield fault("disk", f"{given}: {there} cannot be written to: {why}", "make it writable, or set another run.dir")
        return
    weights, kept = _weights(config), config.checkpoint.keep + 1
    averaged = AVERAGED_BYTES if config.loss.kl_beta and config.reference.alpha else 0
    checkpoint = (STATE_BYTES + averaged) * _trained(config, weights)
    written = _written_bytes(folder / config.run.name / "checkpoints")
    needed = max(LEAST_FREE_BYTES, kept * checkpoint + weights.parameters * _width(config) - written)
    free = shutil.disk_usage(there).free
    detail = (
        f"{free / GIBIBYTE:.1f} GiB free at {there}; checkpoint.keep = {config.checkpoint.keep}, the final model and logs "
        f"need up to {needed / GIBIBYTE:.1f} GiB"
    )
    if free < needed:
        yield fault("disk", detail, "free space, set run.dir to a larger disk, or lower checkpoint.keep")
    else:
        yield ok("disk", detail)


def memory(config: RunConfig, gpus: Sequence[str]) -> Iterator[Finding]:
    """Check that the model fits into the memory of the machine or, where there are GPUs, of each GPU.

    Weights, gradients, optimizer state, processes and the KV cache count. The trainer's activations, which grow with
    `trainer.row_tokens`, do not.
    """
    weights = _weights(config)
    if not weights.parameters:
        return
    given, rank = f"model.path = {config.model.path!r}", _rank_bytes(config, weights.parameters)
    copies, where = weights.parameters * _width(config), "a GPU" if gpus else "this machine"
    if gpus:
        free, needed = gpu_bytes(), rank if not config.trainer.offload else copies
        with contextlib.suppress(ConsoleError):  # which `fleet` reports
            if free is not None and (left := trainer_share(config, gpus)) < 1:
                free, where = int(left * free), "a GPU, beside its generators,"
        remedy = "use more trainer.ranks with trainer.zero_stage = 3, trainer.offload = true or lora.rank"
    else:
        free, generator = free_bytes(), GENERATOR_COPIES * copies + config.generator.cpu_kv_cache_bytes + GENERATOR_BYTES
        needed = config.trainer.ranks * (rank + PROCESS_BYTES) + config.generator.count * generator
        remedy = "use a smaller model, lora.rank, fewer trainer.ranks or a lower generator.count"
    if free is None:
        return
    detail = (
        f"{given} with {weights.parameters:,} parameters needs at least {needed / GIBIBYTE:.1f} GiB of memory, and more for "
        f"activations, which grow with trainer.row_tokens = {config.trainer.row_tokens}; {where} has {free / GIBIBYTE:.1f} GiB"
    )
    yield fault("memory", detail, remedy) if needed > free else ok("memory", detail)


def ports(config: RunConfig, own: bool) -> Iterator[Finding]:
    """Check that the configured ports are free here. `own`: the run's services all are on this machine."""
    if config.api.port:
        detail = f"api.port = {config.api.port}: every service of a run on one machine listens on a port of its own"
        remedy = "set api.port = 0, which gives each a free one, or remove it"
        if own:
            yield fault("ports", detail, remedy)
        else:  # which may be started in another way, each on its own machine
            yield note("ports", f"{detail}, so grpo run refuses it", remedy)
    if not config.web.port:
        return
    try:
        family = socket.AF_INET6 if ":" in config.api.host else socket.AF_INET
        with socket.create_server((config.api.host, config.web.port), family=family):
            pass
    except OSError as error:
        given = f"web.port = {config.web.port}, api.host = {config.api.host!r}"
        yield fault("ports", f"{given}: cannot listen there ({error.strerror})", "set another port or host, or 0 for a free port")
    else:
        yield ok("ports", f"web.port = {config.web.port} is free")


def fleet(config: RunConfig, gpus: Sequence[str]) -> Iterator[Finding]:
    """Check that the run fits on the GPUs of this machine."""
    try:
        shared = sharing(config, gpus)
    except ConsoleError as error:
        yield told("GPUs for this run", error)
        return
    yield note("GPUs for this run", "too few: generators share GPUs, using gloo") if shared else ok("GPUs for this run", "enough")
    if gpus and not config.trainer.compile and not config.trainer.against_compile and not config.lora.rank:
        yield note(
            "compiled training",
            "trainer.compile = false: a dense model takes about twice as long to train on a GPU",
            "set trainer.compile = true, unless the model's code cannot be compiled",
        )


def _weights(config: RunConfig) -> Weights:
    folder = folder_of(config.model.path)
    found = weights_of(folder) if folder else ""
    return Weights({}, 0) if isinstance(found, str) else found


def _trained(config: RunConfig, weights: Weights) -> int:
    """Return the number of trained parameters: with adapters, those of two thin matrices for each target in a block."""
    if not config.lora.rank:
        return weights.parameters
    return sum(
        config.lora.rank * sum(shape)
        for name, shape in weights.shapes.items()
        if (found := BLOCK_MATRIX.search(name)) and len(shape) == 2 and found[1] in (config.lora.targets or [found[1]])
    )


def _written_bytes(checkpoints: Path) -> int:
    return sum(file.stat().st_size for file in checkpoints.glob("step-*/**/*") if file.is_file())


def _width(config: RunConfig) -> int:
    """Return the bytes of a weight."""
    return 4 if config.model.dtype == "float32" else 2


def _rank_bytes(config: RunConfig, parameters: int) -> float:
    """Return the least memory of a trainer rank."""
    trainer, weights = config.trainer, parameters * _width(config)
    reference = weights if config.loss.kl_beta else 0
    if config.lora.rank:
        return weights + reference * bool(config.reference.alpha)
    sharded = trainer.ranks // trainer.sequence_parallel * trainer.sequence_parallel
    state = parameters * (STATE_BYTES - 4 * (config.model.dtype == "float32")) / (sharded if trainer.zero_stage else 1)
    gradients = parameters * ACCUMULATED_BYTES / (sharded if trainer.zero_stage >= 2 else 1)
    whole = sharded if trainer.zero_stage == 3 else 1
    return (weights + reference) / whole + state + gradients


def free_bytes() -> int | None:
    """Return the memory that is still available on this machine, or in the container."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    for limit in MEMORY_LIMITS:
        try:
            free = min(free, int(limit.read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return free


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU, as its driver reports it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
