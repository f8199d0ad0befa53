"""The common names of a step's metrics."""

from __future__ import annotations

from services.operations.figures import DERIVED, SAME, aliases
from tests.support.documented import undocumented


def test_a_step_has_common_names_next_to_ours() -> None:
    step = {
        "reward/train/mean": 0.5, "reward/train/zero_std_share": 0.25, "length/train/mean": 90.0, "length/train/stop_share": 0.75,
        "clip_low/train/fraction": 0.01, "clip_high/train/fraction": 0.02, "gradient/train/norm": 1.5,
    }  # fmt: skip
    assert aliases(step) == {
        "reward/mean": 0.5, "frac_reward_zero_std": 0.25, "completions/mean_length": 90.0, "completions/clipped_ratio": 0.25,
        "clip_ratio": 0.03, "grad_norm": 1.5,
    }  # fmt: skip


def test_a_missing_metric_has_no_alias() -> None:
    assert aliases({"step": 3.0}) == {}


def test_every_alias_refers_to_an_existing_metric() -> None:
    assert undocumented(SAME.values()) == set()
    assert len(DERIVED) == 2
