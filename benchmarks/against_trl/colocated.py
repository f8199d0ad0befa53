"""What `GRPOTrainer(use_vllm=True, vllm_mode="colocate")` needs on a CPU, for benchmarks/against_trl/run.py.

TRL 1.16 names vLLM 0.22 to 0.31; it warns about 0.32, this project's version, and runs with it. Two things of it do not fit
a CPU, and are given here what they need: vLLM is started in the model's dtype, without compilation and with a KV cache of a
stated size, none of which `GRPOConfig` can say; and weights are loaded by `reload_weights`, as `load_weights`, which TRL calls,
fails in vLLM's float32 layers on CPUs ("'Parameter' object has no attribute 'weight_loader'"). All else is as released.
"""

from __future__ import annotations

import functools
from typing import Any

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
"""As our own generators have them on a CPU."""


def engine_arguments(example: Any) -> dict[str, Any]:
    """What our own generator gives vLLM on a CPU."""
    return {"dtype": example.config.model.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 160 << 20}


def prepare(example: Any) -> dict[str, Any]:
    """Fit TRL's module to a CPU; what its `GRPOConfig` gets."""
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
