"""Prepare `GRPOTrainer(use_vllm=True, vllm_mode="colocate")` for a CPU, for benchmarks/against_trl/run.py.

TRL 1.16 supports vLLM 0.22 to 0.31. With 0.32, this project's version, it prints a warning but runs. Two things are changed for
CPUs; all else is as released:

- vLLM starts in the model's dtype, without compilation and with a fixed KV cache size, which `GRPOConfig` has no options for;
- weights are loaded with `reload_weights`, because `load_weights`, which TRL calls, fails in vLLM's float32 layers on CPUs
  ("'Parameter' object has no attribute 'weight_loader'").
"""

from __future__ import annotations

import functools
from typing import Any

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
"""The environment of our own generators on a CPU."""


def engine_arguments(example: Any) -> dict[str, Any]:
    """Return the arguments that our own generator passes to vLLM on a CPU."""
    return {"dtype": example.config.model.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 160 << 20}


def prepare(example: Any) -> dict[str, Any]:
    """Patch TRL's vLLM module for a CPU; return further arguments for `GRPOConfig`."""
    import trl.generation.vllm_generation as vllm_generation  # pyright: ignore[reportMissingImports]

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine_arguments(example), disable_log_stats=True)

    def sync_weights(self: Any) -> None:
        weights = [(name, weight.clone()) for name, weight in self._iter_named_params()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    return {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": example.config.model.max_tokens,
        "vllm_importance_sampling_correction": False,  # like `generate`: one engine in float32, so the ratio is 1 to 1e-5
    }  # fmt: skip
