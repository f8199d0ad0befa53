"""The stages, in order of value, each in a separate process, so that one that fails or hangs does not affect the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """A function of a `Bench` that returns figures."""

    name: str
    function: str  # module:function
    limit_s: float  # time limit of its process on a GPU; most take a third of it
    environ: Mapping[str, str] = field(default_factory=dict[str, str])


FLASH = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
"""Makes FlashAttention PyTorch's first choice on Hopper, too, instead of cuDNN, which plans again for every shape of a batch."""

VARIABLE = {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}
"""Makes cuDNN use one plan for sequences of any length."""

STAGES = (
    Stage("device", "tests.gpu.numerics:device", 120),
    Stage("losses", "tests.gpu.numerics:all_losses", 120),
    Stage("step_16k", "tests.gpu.training:step_16k", 180),
    Stage("collective", "tests.gpu.transfer:collective", 120),
    Stage("step_16k_compiled", "tests.gpu.training:step_16k_compiled", 270),
    Stage("profile", "tests.gpu.training:profile", 240),
    Stage("whole_run", "tests.gpu.whole_run:whole_run", 200),
    Stage("attention", "tests.gpu.numerics:packed_attention", 90),
    Stage("logprobs", "tests.gpu.numerics:chunked_logprobs", 90),
    Stage("step_16k_flex", "tests.gpu.training:step_16k_flex", 300),
    Stage("determinism", "tests.gpu.training:determinism", 150),
    Stage("checkpoint", "tests.gpu.training:checkpoint", 180),
    Stage("ragged_16k", "tests.gpu.training:ragged_16k", 150),
    Stage("ragged_16k_flash", "tests.gpu.training:ragged_16k", 150, FLASH),
    Stage("ragged_16k_variable", "tests.gpu.training:ragged_16k", 150, VARIABLE),
    Stage("flex_attention", "tests.gpu.numerics:flex_attention", 120),
    Stage("shared_memory", "tests.gpu.transfer:shared_memory", 90),
    Stage("patches", "tests.gpu.transfer:patches", 60),
    Stage("deltas", "tests.gpu.transfer:deltas", 90),
    Stage("step_17b_16k", "tests.gpu.training:step_17b_16k", 180),
    Stage("step_8k", "tests.gpu.training:step_8k", 120),
    Stage("step_32k", "tests.gpu.training:step_32k", 150),
)
