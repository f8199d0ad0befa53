"""The stages, in order of value, each in a separate process, so that one that fails or hangs does not affect the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A function of a `Bench` that returns figures."""

    name: str
    function: str  # module:function
    limit_s: float  # time limit of its process on a GPU; most take a third of it


STAGES = (
    Stage("device", "tests.gpu.numerics:device", 60),
    Stage("losses", "tests.gpu.numerics:all_losses", 60),
    Stage("step_16k_compiled", "tests.gpu.training:step_16k_compiled", 150),
    Stage("ragged_16k", "tests.gpu.training:ragged_16k", 150),
    Stage("profile", "tests.gpu.training:profile", 120),
    Stage("whole_run", "tests.gpu.whole_run:whole_run", 180),
    Stage("collective", "tests.gpu.transfer:collective", 90),
    Stage("compiled_architectures", "tests.gpu.architectures:compiled_architectures", 420),
    Stage("determinism", "tests.gpu.training:determinism", 90),
    Stage("step_17b_16k", "tests.gpu.training:step_17b_16k", 150),
    Stage("step_16k", "tests.gpu.training:step_16k", 120),
    Stage("step_32k", "tests.gpu.training:step_32k", 150),
    Stage("step_8k", "tests.gpu.training:step_8k", 120),
    Stage("attention", "tests.gpu.numerics:packed_attention", 90),
    Stage("attention_rules", "tests.gpu.numerics:attention_rules", 180),
    Stage("logprobs", "tests.gpu.numerics:chunked_logprobs", 60),
    Stage("checkpoint", "tests.gpu.training:checkpoint", 120),
    Stage("shared_memory", "tests.gpu.transfer:shared_memory", 60),
    Stage("deltas", "tests.gpu.transfer:deltas", 60),
)
