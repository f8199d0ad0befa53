"""An engine whose logprobs differ from the trainer's stops the run before the first such step is committed."""

from __future__ import annotations

import pytest

from services.runtime.loops import Fatal
from services.trainer.step.logprob_gaps import OFF_POLICY, EngineComparison


def _metrics(mean: float, tokens: float = 8.0, excluded: float = 0.0) -> dict[str, float]:
    return {
        "logprob_gap/train/mean": mean, "logprob_gap/train/max": 3.3,
        "tokens/train/sum": tokens, "excluded/train/tokens": excluded,
    }  # fmt: skip


@pytest.mark.parametrize(("step", "stale"), [(0, 0.0), (0, 0.5), (40, 0.0)])
def test_a_gap_on_the_first_on_policy_step_stops_the_run(step: int, stale: float) -> None:
    """This includes a fork, whose engine may have other options; step 0 is always on-policy."""
    with pytest.raises(
        Fatal, match=rf"differ from the trainer's by 0\.86 nats on average \(at most 3\.3\) on step {step}, .*more than 0\.1,"
    ):
        EngineComparison("vllm").check(step, {OFF_POLICY: stale}, _metrics(0.86))


@pytest.mark.parametrize(
    ("step", "stats", "gap", "engine"),
    [(0, {}, 0.1, "vllm"), (0, {}, 0.86, "mine:Engine"), (1, {OFF_POLICY: 0.01}, 0.86, "vllm"), (1, {}, 0.86, "vllm")],
)
def test_small_or_off_policy_gaps_and_custom_engines_are_accepted(
    step: int, stats: dict[str, float], gap: float, engine: str
) -> None:
    EngineComparison(engine).check(step, stats, _metrics(gap))  # raises otherwise


def test_later_steps_are_not_compared_again() -> None:
    comparison = EngineComparison("vllm")
    comparison.check(3, {OFF_POLICY: 0.2}, _metrics(0.86))
    comparison.check(4, {OFF_POLICY: 0.0}, _metrics(0.05))
    comparison.check(5, {OFF_POLICY: 0.0}, _metrics(0.86))


def test_a_step_without_tokens_is_no_comparison() -> None:
    comparison = EngineComparison("vllm")
    comparison.check(0, {}, _metrics(0.0, tokens=0.0))
    with pytest.raises(Fatal, match=r"by 0\.86 nats on average"):
        comparison.check(1, {OFF_POLICY: 0.0}, _metrics(0.86))


def test_an_engine_without_finite_logprobs_stops_the_run() -> None:
    with pytest.raises(Fatal, match="step 0 trains no token, since the engine returned no finite logprob"):
        EngineComparison("vllm").check(0, {}, _metrics(0.0, tokens=0.0, excluded=8.0))
