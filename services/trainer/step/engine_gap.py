"""Compares trainer and engine once, on a step whose groups were sampled with the weights that it begins with.

Guarantees: a run whose engine computes another model than its trainer stops before the first such step is committed, even if it
was forked or resumed with other engine options.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.runtime.loops import Fatal

OFF_POLICY = "staleness/trained/off_policy_share"

MAX_GAP = 0.1
"""Largest mean difference, in nats, of logprobs that precision explains: bfloat16 kernels differ by 0.001 to 0.03."""


class EngineComparison:
    """Checks the first suitable step of each trainer process."""

    def __init__(self, engine: str) -> None:
        """`engine`: `generator.engine`. A custom one may sample from whatever it likes, and is not compared."""
        self._done = engine != "vllm"

    def check(self, step: int, stats: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Raise `Fatal` if the gap exceeds `MAX_GAP`. `stats`: the plan's, which say how much of the step is off-policy."""
        if self._done or (step and stats.get(OFF_POLICY, 1.0) > 0):
            return
        if not metrics["tokens/train/sum"]:
            _check_excluded(step, metrics)
            return
        self._done = True
        _check(step, metrics)


def _check_excluded(step: int, metrics: Mapping[str, float]) -> None:
    if metrics["excluded/train/tokens"]:
        raise Fatal(
            f"step {step} trains no token, since the engine returned no finite logprob for any of them: compare "
            "generator.engine and generator.engine_options with the model's config.json (docs/models.md)"
        )


def _check(step: int, metrics: Mapping[str, float]) -> None:
    if (gap := metrics["logprob_gap/train/mean"]) <= MAX_GAP:
        return
    raise Fatal(
        f"the engine's logprobs differ from the trainer's by {gap:.2g} nats on average (at most "
        f"{metrics['logprob_gap/train/max']:.2g}) on step {step}, more than {MAX_GAP}, although both have the same weights, so "
        "they compute different models: compare generator.engine_options with the model's config.json (docs/models.md)"
    )
