"""Compares trainer and engine on the first step of a run, where both have the same weights.

Guarantees: a run whose engine computes another model than its trainer stops before its first step is committed.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.runtime.loops import Fatal


def check_gap(step: int, metrics: Mapping[str, float], limit: float) -> None:
    """Raise `Fatal` if the mean gap of logprobs of step 0 exceeds `limit` nats; 0 is no limit. Later steps may be off-policy."""
    if step or not limit or (gap := metrics["logprob_gap/train/mean"]) <= limit:
        return
    raise Fatal(
        f"the engine's logprobs differ from the trainer's by {gap:.2g} nats on average (at most "
        f"{metrics['logprob_gap/train/max']:.2g}) on the first step, above loss.correction_max_gap = {limit}, although both have "
        "the same weights, so they compute different models: compare generator.engine_options with the model's config.json "
        "(docs/models.md), or raise the limit if the engine's precision explains it"
    )
