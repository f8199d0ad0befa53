"""Throughput of a step, on hand-made histories: work done before the process started is not counted."""

from __future__ import annotations

import pytest

from services.trainer.throughput import Throughput

ELAPSED = "time/elapsed_s"
TRAINED, GENERATED = "throughput/trained/tokens_per_s", "throughput/generated/tokens_per_s"


def test_rates_cover_the_time_since_the_last_record() -> None:
    rates = Throughput(100.0)
    assert rates.record(0, 400, 1_000, 110.0) == {TRAINED: 40.0, GENERATED: 100.0, ELAPSED: 10.0}
    assert rates.record(1, 400, 1_600, 112.0) == {TRAINED: 200.0, GENERATED: 300.0, ELAPSED: 2.0}


def test_generation_is_averaged_over_four_steps_as_groups_may_end_together() -> None:
    rates = Throughput(0.0)
    found = [
        rates.record(step, 400, made, step + 1.0)[GENERATED] for step, made in enumerate((800, 800, 1_600, 1_600, 2_400, 2_400))
    ]
    assert found == [800, 0, 400, 800 / 3, 400, 400], "the first step counts for itself alone"


def test_the_first_step_is_timed_from_when_the_trainer_was_ready() -> None:
    rates = Throughput(100.0)
    rates.start(108.0)
    assert rates.record(0, 400, 1_000, 110.0) == {TRAINED: 200.0, GENERATED: 500.0, ELAPSED: 2.0}


def test_plans_from_before_a_restart_have_no_generation_rate() -> None:
    rates = Throughput(500.0)
    rates.resume(prepared_step=8)
    assert GENERATED not in rates.record(7, 400, 850_000, 510.0)
    assert GENERATED not in rates.record(8, 400, 858_000, 510.5)
    assert rates.record(9, 400, 866_000, 520.5)[GENERATED] == 800.0


def test_the_first_step_after_a_restart_has_no_generation_rate() -> None:
    """The counter's value at the previous step is unknown."""
    rates = Throughput(500.0)
    rates.resume(prepared_step=8)
    assert GENERATED not in rates.record(9, 400, 866_000, 520.0)
    assert rates.record(10, 400, 874_000, 530.0)[GENERATED] == 800.0


def test_a_counter_that_drops_restarted_at_zero() -> None:
    rates = Throughput(0.0)
    rates.record(0, 400, 90_000, 10.0)
    assert rates.record(1, 400, 4_000, 15.0)[GENERATED] == 800.0


def test_utilization_covers_training_time_and_wall_time() -> None:
    record = {TRAINED: 800.0, ELAPSED: 10.0, "flops/train/sum": 8e15, "time/train/total_s": 4.0}
    assert Throughput(0.0, 2, 2000.0).utilization(record) == pytest.approx(
        {
            "throughput/trained/tokens_per_s_per_device": 400.0, "throughput/trained/tflops_per_device": 1000.0,
            "mfu/train/compute": 0.5, "mfu/train/wall": 0.2,
        }
    )  # fmt: skip


def test_unknown_flops_or_peak_give_no_utilization() -> None:
    assert not [
        key for key in Throughput(0.0, 1, 10.0).utilization({TRAINED: 1.0, ELAPSED: 1.0}) if "mfu" in key or "flops" in key
    ]
    record = {TRAINED: 1.0, ELAPSED: 1.0, "flops/train/sum": 1e12, "time/train/total_s": 1.0}
    assert not [key for key in Throughput(0.0).utilization(record) if "mfu" in key]
