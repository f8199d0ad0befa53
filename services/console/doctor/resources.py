"""Checks of the resources that a run needs on this machine: its folder, disk, memory and ports. They import nothing heavy and
take no time."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.config import RunConfig
from services.config.training import Lora
from services.console.doctor import Finding, fault, note, ok, told
from services.console.doctor.model import Weights, folder_of, weights_of
from services.console.errors import ConsoleError
from services.console.run.plan import sharing, trainer_share

GIBIBYTE = 2**30
STATE_BYTES = 12  # a parameter's float32 master copy and two moments, which checkpoints hold and the optimizer keeps
AVERAGED_BYTES = 4  # a parameter of an averaged reference, in checkpoints
ACCUMULATED_BYTES = 4  # a parameter's gradient, in float32
LEAST_FREE_BYTES = 2 * GIBIBYTE  # for logs, Redis' append-only file and metrics
PROCESS_BYTES = 0.4 * GIBIBYTE  # of a Python process with torch
GENERATOR_BYTES = 0.9 * GIBIBYTE  # of a generator and its vLLM engine on a CPU without weights and KV cache, as measured
GENERATOR_COPIES = 3  # of the weights, on a CPU: as received, the loaded ones before they replace others, and those others
LOGITS_CHUNK = 1024  # tokens whose logits the trainer computes at a time (services/trainer/step/policy.py)
PROJECTIONS = {  # linear layers of a decoder block: which input they read, which share one, and the width of their output
    "q_proj": ("block", "queries"), "k_proj": ("block", "keys"), "v_proj": ("block", "keys"), "o_proj": ("attention", "residual"),
    "gate_proj": ("mlp", "mlp"), "up_proj": ("mlp", "mlp"), "down_proj": ("product", "residual"),
}  # fmt: skip
INPUTS = {"block": "residual", "attention": "queries", "mlp": "residual", "product": "mlp"}  # the widths of these inputs
BLOCK_MATRIX = re.compile(r"\.\d+\..*?(\w+)\.weight$")  # the name of a layer in a numbered block
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")  # in a model's config.json
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
    averaged = AVERAGED_BYTES if config.loss.kl_beta and config.reference.kind == "polyak" else 0
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

    Weights, gradients, optimizer state, processes and the configured KV cache count and, on a CPU, the trainer's
    activations for a row if they are known (`activation_bytes`): with long rows they are most of its memory.
    """
    weights = _weights(config)
    if not weights.parameters:
        return
    given, rank = f"model.path = {config.model.path!r}", _rank_bytes(config, weights.parameters)
    copies, where = weights.parameters * _width(config), "a GPU" if gpus else "this machine"
    activations = 0.0 if gpus else activation_bytes(config)
    if gpus:
        free, needed = _gpu_bytes(), rank if not config.trainer.offload else copies
        with contextlib.suppress(ConsoleError):  # which `fleet` reports
            if free is not None and (left := trainer_share(config, gpus)) < 1:
                free, where = int(left * free), "a GPU, beside its generators,"
        remedy = "use more trainer.ranks with trainer.zero_stage = 3, trainer.offload = true or lora.rank"
    else:
        free, cache = _free_bytes(), config.generator.cpu_kv_cache_mib << 20
        generator = GENERATOR_COPIES * copies + cache + GENERATOR_BYTES
        needed = config.trainer.ranks * (rank + activations + PROCESS_BYTES) + config.generator.count * generator
        remedy = "use a smaller model, lora.rank, fewer trainer.ranks or a lower generator.count"
    if free is None:
        return
    row = f"trainer.row_tokens = {config.trainer.row_tokens}"
    about, counted = "at least", f"and more for activations, which grow with {row}"
    if activations:
        about, counted = "about", f"of which {activations / GIBIBYTE:.2f} GiB for the activations of a row, with {row}"
        remedy += ", trainer.row_tokens, or trainer.gradient_checkpointing = true"
    detail = (
        f"{given} with {weights.parameters:,} parameters needs {about} {needed / GIBIBYTE:.1f} GiB of memory, {counted}; "
        f"{where} has {free / GIBIBYTE:.1f} GiB"
    )
    yield fault("memory", detail, remedy) if needed > free else ok("memory", detail)


def activation_bytes(config: RunConfig) -> float:
    """Return the memory of a trainer rank for the forward and backward pass of a row, beyond weights and gradients.

    0: unknown, since the model is not a plain decoder with gated MLPs, is compiled, or is trained by a team of ranks, or adapters
    are of other layers. Derived for Qwen3 from what autograd keeps in each layer (`_kept`, `_kept_with_adapters`), and in
    addition 6 h for the row, and the logits of a chunk three times with the gradient of the output matrix, if it is trained, or,
    if that is more, one layer that is recomputed. Measured with 6 to 12 layers of width 256 and 512 and rows of 2,048 and 4,096
    tokens in float32: peaks of resident memory within 0.08 of it; in bfloat16 up to 0.10 above, with checkpointing 0.24.
    """
    trainer, lora = config.trainer, config.lora
    folder = folder_of(config.model.path)
    if folder is None or trainer.compile or trainer.sequence_parallel > 1 or not set(lora.targets) <= PROJECTIONS.keys():
        return 0.0
    try:
        described = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        h, i, layers, vocabulary = (int(described[key]) for key in SIZES)
        heads = int(described["num_attention_heads"])
        width = int(described.get("head_dim") or h // heads)
        keys = int(described.get("num_key_value_heads") or heads) * width
    except (OSError, TypeError, ValueError, KeyError, RecursionError, ZeroDivisionError):
        return 0.0
    if described.get("hidden_act", "silu") != "silu" or any("expert" in key for key in described):
        return 0.0
    widths, size = {"residual": h, "mlp": i, "queries": heads * width, "keys": keys}, _width(config)
    kept_by = _kept_with_adapters(widths, size, lora) if lora.rank else _kept(widths, size)
    kept = kept_by[trainer.gradient_checkpointing]
    logits = 4 * vocabulary * (3 * min(LOGITS_CHUNK, trainer.row_tokens) + h * (not lora.rank))
    again = (kept_by[False] - kept) * trainer.row_tokens
    return (layers * kept + size * 6 * h) * trainer.row_tokens + max(logits, again)


def _kept(widths: Mapping[str, int], size: int) -> dict[bool | str, int]:
    """Return the bytes that autograd keeps for a token in a layer, by `trainer.gradient_checkpointing`.

    `size`: of a weight. For h, i, q and k, the widths of the residual stream, of the MLP, of all queries and of all keys.
    """
    h, i, q, k = (widths[name] for name in ("residual", "mlp", "queries", "keys"))
    return {
        False: size * (6 * h + 4 * i + 5 * q + 5 * k),
        True: size * h,
        "selective": size * (3 * h + 2 * i + 2 * q + 2 * k),
    }


def _kept_with_adapters(widths: Mapping[str, int], size: int, lora: Lora) -> dict[bool | str, int]:
    """Return the same if only adapters are trained.

    Frozen layers keep no input, frozen norms only theirs, in float32. Adapters keep their input and the first of their two
    products in float32; each keeps an input of its own unless weights are float32, too. "selective" also keeps both products.
    """
    h, i, q, k = (widths[name] for name in ("residual", "mlp", "queries", "keys"))
    adapted = [PROJECTIONS[name] for name in lora.targets or PROJECTIONS]
    read = [place for place, _ in adapted]
    inputs = sum(widths[INPUTS[place]] for place in (set(read) if size == 4 else read))
    first, second = lora.rank * len(adapted), sum(widths[name] for _, name in adapted)
    return {
        False: size * (3 * i + 2 * q + 3 * k) + 4 * (2 * h + q + k + inputs + first),
        True: size * h,
        "selective": size * (3 * h + 2 * i + 2 * q + 2 * k) + 4 * (first + second),
    }


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
        family = socket.AF_INET6 if ":" in config.web.host else socket.AF_INET
        with socket.create_server((config.web.host, config.web.port), family=family):
            pass
    except OSError as error:
        given = f"web.port = {config.web.port}, web.host = {config.web.host!r}"
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
            "compiled training", "trainer.compile = false: a dense model takes about twice as long to train on a GPU",
            "set trainer.compile = true, unless the model's code cannot be compiled",
        )  # fmt: skip


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
        return weights + reference * (config.reference.kind != "frozen")
    sharded = trainer.ranks // trainer.sequence_parallel * trainer.sequence_parallel
    state = parameters * (STATE_BYTES - 4 * (config.model.dtype == "float32")) / (sharded if trainer.zero_stage else 1)
    gradients = parameters * ACCUMULATED_BYTES / (sharded if trainer.zero_stage >= 2 else 1)
    whole = sharded if trainer.zero_stage == 3 else 1
    return (weights + reference) / whole + state + gradients


def _free_bytes() -> int | None:
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


def _gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU, as its driver reports it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
