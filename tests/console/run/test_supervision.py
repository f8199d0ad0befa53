"""When a dead service is restarted and when the run ends instead, on hand-made histories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console import errors
from services.console.run.supervision import (
    ALIKE,
    DEATHS_IN_A_ROW,
    LONGEST_PAUSE_S,
    Ended,
    GiveUp,
    Record,
    Start,
    account,
    decide,
)
from services.http import entry

SHORT: dict[str, Any] = {"lived_s": 1.0, "committed_step": 3, "over": False, "redis_served": False}
STUCK = Record(deaths=0, committed_step=3)


def test_exit_codes_match_those_of_the_services() -> None:
    for name in ("EXIT_OK", "EXIT_FAILED", "EXIT_CONFIG", "EXIT_REDIS"):
        assert getattr(errors, name) == getattr(entry, name)


def test_restart_delays_double_until_the_run_ends() -> None:
    record, pauses = STUCK, []
    for _ in range(DEATHS_IN_A_ROW):
        decision, record = decide("generator-0", record, [-9], **SHORT)
        assert isinstance(decision, Start)
        pauses.append(decision.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]
    decision, record = decide("generator-0", record, [-9], **SHORT)
    assert decision == GiveUp("generator-0 died 6 times in a row without completing a step", 1)


def test_a_committed_step_or_a_long_life_resets_the_crash_count() -> None:
    tired = Record(deaths=DEATHS_IN_A_ROW, committed_step=3)
    assert decide("trainer", tired, [1], **{**SHORT, "committed_step": 4}) == (Start(0.5), Record(1, 4))
    assert decide("trainer", tired, [1], **{**SHORT, "lived_s": 61.0}) == (Start(0.5), Record(1, 3))


@pytest.mark.parametrize("code", [2, 3])
def test_fatal_exit_codes_end_the_run_at_once(code: int) -> None:
    assert decide("dataprep-0", STUCK, [code], **SHORT) == (GiveUp("dataprep-0 cannot run", code), STUCK)
    assert decide("trainer", STUCK, [None, code], **SHORT)[0] == GiveUp("trainer cannot run", code)


def test_losing_a_redis_that_worked_is_not_fatal() -> None:
    """A starting pod gives up on a server that is silent for 4 s, which must not end the run."""
    served = {**SHORT, "redis_served": True}
    assert isinstance(decide("trainer", STUCK, [3], **served)[0], Start)
    assert isinstance(decide("trainer", STUCK, [2], **served)[0], GiveUp)


def test_a_repeated_error_ends_the_run() -> None:
    """The numbers in its message may differ. A step in between, a kill or an unreachable Redis resets the count."""
    dead = {**SHORT, "worked": False}
    _, record = decide("generator-0", STUCK, [1], **dead, cause="out of memory: 2 GiB, 17 MiB free")
    assert decide("generator-0", record, [1], **dead, cause="out of memory: 2 GiB, 19 MiB free")[0] == GiveUp(
        "generator-0 died of the same error 2 times in a row", 1
    )
    assert isinstance(decide("generator-0", record, [1], **dead, cause="another error")[0], Start)
    _, killed = decide("generator-0", record, [-9], **dead, cause="")
    for again in (killed, decide("generator-0", record, [3], **{**dead, "redis_served": True}, cause="no Redis")[1]):
        assert isinstance(decide("generator-0", again, [1], **dead, cause="out of memory: 2 GiB, 3 MiB free")[0], Start)
    progress = {**dead, "committed_step": 4}
    assert isinstance(decide("generator-0", record, [1], **progress, cause="out of memory: 2 GiB, 3 MiB free")[0], Start)


def test_a_service_that_worked_may_repeat_an_error_once_more() -> None:
    record, long = STUCK, {**SHORT, "lived_s": 900.0}
    for _ in range(ALIKE - 1):
        decision, record = decide("trainer", record, [1], **long, cause="nan in the loss")
        assert isinstance(decision, Start)
    decision, _ = decide("trainer", record, [1], **long, cause="nan in the loss")
    assert decision == GiveUp(f"trainer died of the same error {ALIKE} times in a row", 1)


def test_drains_are_no_deaths() -> None:
    _, record = decide("generator-0", Record(), [1], lived_s=1.0, committed_step=3, over=False, redis_served=True)
    for _ in range(20):
        decision, record = decide(
            "generator-0", record, [0], lived_s=1.0, committed_step=3, over=False, redis_served=True, drained=True
        )
        assert decision == Start(0.5)
    assert record.deaths == 1


def test_no_service_is_restarted_after_the_end() -> None:
    for code in (0, 1, 2, -9):
        assert decide("generator-0", STUCK, [code], **{**SHORT, "over": True}) == (Ended(), STUCK)


def test_a_service_that_exits_early_is_restarted() -> None:
    assert isinstance(decide("generator-0", STUCK, [0], **SHORT)[0], Start)


@given(st.lists(st.tuples(st.sampled_from([0, 1, -9, -15]), st.floats(0, 100), st.integers(0, 2)), max_size=60))
def test_any_history_ends_or_progresses(history: list[tuple[int, float, int]]) -> None:
    record, committed, row = Record(), -1, 0
    for code, lived_s, steps in history:
        committed += steps
        row = 1 if steps or lived_s > 60 else row + 1
        decision, record = decide("x", record, [code], lived_s=lived_s, committed_step=committed, over=False, redis_served=False)
        assert isinstance(decision, GiveUp) == (row > DEATHS_IN_A_ROW)
        if isinstance(decision, GiveUp):
            return
        assert isinstance(decision, Start)
        assert 0 < decision.pause_s <= LONGEST_PAUSE_S


def test_crashes_are_described_in_words() -> None:
    assert account([None, -9]) == "was killed by signal 9"
    assert account([1]) == "failed with exit code 1"
    assert account([0]) == "exited before the run finished"
    assert account([0], drained=True) == "drained and exited"
    assert account([1], drained=True) == "failed with exit code 1"
