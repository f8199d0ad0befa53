"""The reported condition of a run and what it waits for, on hand-made states."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from services.operations.condition import Condition, awaited, condition, moment
from services.protocol.messages import PodStatus
from services.store import RunState

STATE = RunState(4, 16, 3, 40, -1, -1, -1, -1, "dataprep-0", {}, "", "", "data", "config")
NOW = time.time()
LUNCH = {"paused": {"trainer": "ada: lunch"}, "paused_since": {"trainer": NOW}}
FAILING = {"paused": {"dataprep": "grpo: prompts keep failing: 16 in a row"}}
REMEDY = "; after fixing the cause: grpo replay requeue --all, then grpo resume"
RESTORING = "restoring the checkpoint of step"
ALL = dict.fromkeys(("generator", "dataprep", "trainer"), "ada: lunch")


@pytest.mark.parametrize(
    ("changes", "live", "left", "word", "detail"),
    [
        ({}, True, None, "running", ""),
        (LUNCH, True, None, "paused", f"trainer by ada: lunch, since {moment(NOW)}"),
        ({"paused": ALL}, True, None, "paused", "all services by ada: lunch"),
        (FAILING, True, None, "paused", f"dataprep by grpo: prompts keep failing: 16 in a row{REMEDY}"),
        ({"stopping": "ada: enough"}, True, None, "running", "ending after this step: ada: enough"),
        ({"restore": 20, **LUNCH}, True, None, "running", f"{RESTORING} 20"),
        ({"restore": 2, "restore_why": "ada: x"}, True, None, "running", f"{RESTORING} 2, requested by ada: x"),
        ({"restoring": 0}, True, None, "running", f"{RESTORING} 0"),
        ({"finished": "trained 4 of 4 steps"}, False, None, "finished", "trained 4 of 4 steps"),
        ({}, False, None, "stopped", ""),
        (LUNCH, False, Condition("stopped"), "stopped", f"it starts paused: trainer by ada: lunch, since {moment(NOW)}"),
        ({}, False, Condition("stopped", "grpo run was killed"), "stopped", "grpo run was killed"),
        (
            {"restore": 0, "restore_why": "ada"}, False, Condition("finished", "trained 4 of 4 steps"), "stopped",
            "trained 4 of 4 steps; it resumes from the checkpoint of step 0, requested by ada",
        ),
        ({}, False, Condition("failed", "trainer cannot run"), "failed", "trainer cannot run"),
        ({}, True, Condition("failed", "trainer cannot run"), "running", ""),
    ],
)  # fmt: skip
def test_a_run_is_in_one_of_five_conditions(changes, live, left, word, detail) -> None:
    assert condition(replace(STATE, **changes), live=live, left=left) == Condition(word, detail)


def test_a_condition_is_one_word_and_perhaps_a_detail() -> None:
    assert [str(Condition("running")), str(Condition("failed", "no disk"))] == ["running", "failed: no disk"]


def pod(kind: str, phase: str, number: int = 0) -> PodStatus:
    return PodStatus(kind, f"{kind}-{number}", "b", "here", 1, "", phase, -1, 1, {})


LEADING, TRAINER, READY = pod("dataprep", "leading"), pod("trainer", "waiting for data"), pod("generator", "ready")


@pytest.mark.parametrize(
    ("state", "pods", "what"),
    [
        (None, [], "dataprep to read the prompts"),
        (None, [LEADING], "dataprep to create the run"),
        (STATE, [], "dataprep to start"),
        (STATE, [LEADING], "the trainer to start"),
        (STATE, [LEADING, pod("trainer", "loading")], "the trainer to load the model"),
        (STATE, [LEADING, pod("trainer", "restoring")], "the trainer to load the checkpoint"),
        (STATE, [LEADING, TRAINER], "the generators to start"),
        (STATE, [LEADING, TRAINER, *(pod("generator", "loading", i) for i in (0, 1))], "2 generators to load the model"),
        (STATE, [LEADING, TRAINER, pod("generator", "unsynced")], "the first weights to reach a generator"),
        (STATE, [LEADING, TRAINER, READY], "the first groups of completions (3 of 16 slots in use)"),
        (replace(STATE, prepared_step=0), [LEADING, TRAINER, READY], "the first step to be trained"),
        (replace(STATE, committed_step=0), [LEADING, TRAINER, READY, pod("generator", "loading", 1)], ""),
        (replace(STATE, committed_step=2), [LEADING, TRAINER], "the generators to start"),
        (replace(STATE, paused={"trainer": "ada"}), [], ""),
    ],
)  # fmt: skip
def test_what_a_run_waits_for_is_named(state, pods, what) -> None:
    assert awaited(state, pods, 2) == what


def test_a_run_scaled_to_nothing_waits_for_a_generator() -> None:
    assert awaited(STATE, [LEADING, TRAINER], 0) == "a generator: 0 are desired (grpo scale N)"
