"""Converts a run's configuration to vLLM's: environment, engine arguments, stop tokens.

Guarantees: the environment is set before vLLM is imported; `generator.engine_options` override everything here; a
combination that would kill the engine later raises a `ConfigError` now. Imports vLLM inside functions only.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from pathlib import Path
from typing import Any

from services.config import ConfigError, RunConfig
from services.weights.transport import OWNER, backend_of

VLLM_LOGGING = Path(__file__).with_name("vllm_logging.json")
"""Logging configuration of the processes that vLLM starts. It refers to services/runtime/logs.py, which they import."""

_GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that vLLM takes, unless `engine_options` has another. The rest is for the buckets of weights."""

_CPU_PREFILL_TOKENS = 4096
"""Prompt tokens per iteration of a CPU engine, unless one sequence needs more. Limits activation memory."""


def has_gpu() -> bool:
    """Return whether vLLM will run on CUDA."""
    import torch

    return torch.cuda.is_available()


def set_environment(config: RunConfig, gpu: bool) -> None:
    """Set the variables that vLLM reads on import and that its processes inherit. Keep those the user has set."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_CONFIG_PATH": str(VLLM_LOGGING)}
    if Path(config.model.path).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if gpu:
        # vLLM forks by default unless CUDA is in use here. `has_gpu` does not count as use, but after it CUDA fails in a fork.
        defaults["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the machine; binding would put all on the same cores
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # saves 2-15 s at the first request with logprobs
        }
        if config.generator.tensor_parallel == 1:
            # On a CPU this runs the worker inside the engine core, which saves one process and its 0.6 GiB.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # for this process; the file is for the others


def engine_arguments(config: RunConfig, gpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`."""
    generator = config.generator
    backend = backend_of(config, gpu)
    if backend == "nccl" and not gpu:
        raise ConfigError('sync.backend = "nccl" needs GPUs, but this machine has none: use "gloo" or "auto"')
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_tokens,
        "max_num_seqs": generator.max_num_seqs,
        "tensor_parallel_size": generator.tensor_parallel,
        "seed": config.run.seed,
        "logprobs_mode": "processed_logprobs",  # after temperature, top-p and top-k: the distribution that was sampled from
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "skip_tokenizer_init": not config.sampling.stop,
        "disable_log_stats": False,  # its metrics are served with ours (services/generator/metrics.py)
        "enable_prefix_caching": True,  # the completions of a group share their prompt
        "weight_transfer_config": {"backend": f"grpo_{backend}"},
        "worker_extension_cls": "services.weights.vllm_worker.WorkerExtension",
    }
    if gpu:
        arguments["gpu_memory_utilization"] = _GPU_MEMORY_UTILIZATION
    else:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": generator.cpu_kv_cache_bytes,
            # A CPU generator's random offset cannot be rewound: a seeded request must not be prefilled in chunks.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.model.max_tokens, generator.max_num_seqs, _CPU_PREFILL_TOKENS),
        }
    options = _checked_options(config)
    if config.model.fp32_head:
        overrides = options.get("hf_overrides", {})
        if "head_dtype" in overrides:
            raise ConfigError(
                f"generator.engine_options.hf_overrides.head_dtype = {overrides['head_dtype']!r} contradicts "
                "model.fp32_head = true: remove one of the two"
            )
        options = options | {"hf_overrides": overrides | {"head_dtype": "float32"}}
    return arguments | options


def check_cpu_arguments(arguments: dict[str, Any]) -> None:
    """Reject options with which vLLM's CPU engine would die at the first prompt that is prefilled in chunks."""
    if not arguments["enable_chunked_prefill"]:
        return
    # A continued or paused completion is prefilled with its tokens, so the longest prefill is a whole sequence.
    need = arguments["max_num_seqs"] * arguments["max_model_len"]
    if arguments["max_num_batched_tokens"] < need:
        raise ConfigError(
            f"generator.engine_options.max_num_batched_tokens = {arguments['max_num_batched_tokens']} is below max_num_seqs x "
            f"max_model_len = {need}: on a CPU a seeded request cannot be prefilled in chunks; raise it, or remove "
            "enable_chunked_prefill"
        )


def stop_tokens(path: str) -> list[int]:
    """Return the token ids that end a completion: end-of-sequence ids of the tokenizer and the generation configuration."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    ids: set[int] = set()
    tokenizer_eos = AutoTokenizer.from_pretrained(path).eos_token_id
    try:
        generation_eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # no generation_config.json: use the model's own configuration
        generation_eos = getattr(AutoConfig.from_pretrained(path).get_text_config(), "eos_token_id", None)
    for eos in (tokenizer_eos, generation_eos):
        ids |= set(eos) if isinstance(eos, list | tuple) else {eos} if eos is not None else set()
    if not ids:
        raise ConfigError(
            f"model.path = {path!r}: tokenizer and generation config have no end-of-sequence token: add eos_token_id"
        )
    return sorted(ids)


def _checked_options(config: RunConfig) -> dict[str, Any]:
    from vllm import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in config.generator.engine_options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"generator.engine_options.{name} is not an engine argument of vLLM{hint}")
    return config.generator.engine_options
