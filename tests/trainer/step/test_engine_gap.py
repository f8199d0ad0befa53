"""An engine that computes another model stops the run before its first step is committed."""

from __future__ import annotations

import pytest

from services.runtime.loops import Fatal
from services.trainer.step.engine_gap import check_gap


def _metrics(mean: float) -> dict[str, float]:
    return {"logprob_gap/train/mean": mean, "logprob_gap/train/max": 3.3}


def test_a_gap_on_the_first_step_stops_the_run() -> None:
    with pytest.raises(
        Fatal, match=r"differ from the trainer's by 0\.86 nats on average \(at most 3\.3\).*correction_max_gap = 0\.1"
    ):
        check_gap(0, _metrics(0.86), 0.1)


@pytest.mark.parametrize(("step", "gap", "limit"), [(0, 0.1, 0.1), (0, 0.86, 0.0), (1, 0.86, 0.1)])
def test_what_rounding_off_policy_groups_or_no_limit_leave_alone(step: int, gap: float, limit: float) -> None:
    check_gap(step, _metrics(gap), limit)  # raises otherwise
