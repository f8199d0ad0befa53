"""The stages, in order of value, each in a separate process, so that one that fails or hangs does not affect the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage is a function of a `Bench` that returns figures."""

    name: str
    function: str  # module:function
    limit_s: float  # time limit of its process on a GPU


STAGES = (
    Stage("device", "tests.gpu.numerics:device", 60),
    Stage("losses", "tests.gpu.numerics:all_losses", 60),
    Stage("attention", "tests.gpu.numerics:packed_attention", 90),
    Stage("logprobs", "tests.gpu.numerics:chunked_logprobs", 60),
    Stage("step_16k", "tests.gpu.training:step_16k", 150),
    Stage("step_8k", "tests.gpu.training:step_8k", 120),
    Stage("step_32k", "tests.gpu.training:step_32k", 150),
    Stage("determinism", "tests.gpu.training:determinism", 90),
    Stage("checkpoint", "tests.gpu.training:checkpoint", 120),
    Stage("step_17b_16k", "tests.gpu.training:step_17b_16k", 180),
    Stage("deltas", "tests.gpu.transfer:deltas", 90),
    Stage("patches", "tests.gpu.transfer:patches", 60),
    Stage("collective", "tests.gpu.transfer:collective", 90),
    Stage("shared_memory", "tests.gpu.transfer:shared_memory", 60),
    Stage("flex_attention", "tests.gpu.numerics:flex_attention", 120),
    Stage("whole_run", "tests.gpu.whole_run:whole_run", 180),
)
