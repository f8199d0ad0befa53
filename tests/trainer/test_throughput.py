"""Rates of a step, on hand-made histories: nothing made before a process began counts in what it reports."""

from __future__ import annotations

from services.trainer.throughput import Throughput

TRAINED, GENERATED = "throughput/trained/tokens_per_s", "throughput/generated/tokens_per_s"


def test_rates_are_of_the_time_since_the_last_record() -> None:
    rates = Throughput(100.0)
    assert rates.record(0, 400, 1_000, 110.0) == {TRAINED: 40.0, GENERATED: 100.0}
    assert rates.record(1, 400, 1_600, 112.0) == {TRAINED: 200.0, GENERATED: 300.0}


def test_plans_made_before_a_restart_have_no_rate_of_generation() -> None:
    rates = Throughput(500.0)
    rates.resume(prepared_step=8)
    assert GENERATED not in rates.record(7, 400, 850_000, 510.0)
    assert GENERATED not in rates.record(8, 400, 858_000, 510.5)
    assert rates.record(9, 400, 866_000, 520.5)[GENERATED] == 800.0


def test_a_counter_that_falls_began_again_at_zero() -> None:
    rates = Throughput(0.0)
    rates.record(0, 400, 90_000, 10.0)
    assert rates.record(1, 400, 4_000, 15.0)[GENERATED] == 800.0
