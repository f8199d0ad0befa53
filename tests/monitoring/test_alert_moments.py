"""Alerts fire at the right moment: on what happens to a run while pods come, go and begin to count."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.monitoring.test_alerts import RULES, Trouble, expected

LEADS, ENDED = 'grpo_dataprep_leads{run="a",pod="dataprep-%d"}', 'grpo_run_ended{run="a",pod="dataprep-%d"}'
FAILED, LETTERS = (
    'grpo_run_outcome_tickets{run="a",pod="dataprep-%d",outcome="failed"}', 'grpo_run_dead_letters{run="a",pod="dataprep-%d"}'
)  # fmt: skip
PAUSED = 'grpo_run_paused{run="a",pod="dataprep-%d",role="trainer"}'
GENERATOR = {'grpo_pod_ready{run="a",pod="generator-0"}': "1x400"}


@dataclass(frozen=True)
class Story:
    """What happens, as series with one value per minute, and the minutes at which the alert fires or does not."""

    alert: str
    title: str
    series: dict[str, str]
    fires: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)


STORIES = (
    Story(
        "GrpoNoDataprep", "the only pod exits, and no other starts for hours",
        GENERATOR | {LEADS % 0: "1x10 stale", ENDED % 0: "0x10 stale"}, fires=(17, 60, 300), silent=(10, 15),
    ),
    Story(
        "GrpoNoDataprep", "a pod replaces the leader within minutes",
        GENERATOR | {LEADS % 0: "1x10 stale", LEADS % 1: "_x14 1x60"}, silent=(12, 15, 17, 60),
    ),
    Story("GrpoNoDataprep", "another cluster's release has only generators", GENERATOR, silent=(10, 60)),
    Story("GrpoNoDataprep", "the release is uninstalled", {LEADS % 0: "1x10 stale"}, silent=(17, 60)),
    Story(
        "GrpoNoDataprep", "the run has finished", GENERATOR | {LEADS % 0: "1x9 0 stale", ENDED % 0: "0x9 1 stale"},
        silent=(17, 60),
    ),
    Story(
        "GrpoNoDataprep", "the run is paused and resumed while it has no dataprep",
        GENERATOR | {LEADS % 0: "1x10 stale", PAUSED % 0: "1x10 stale"}, fires=(17, 60),
    ),
    Story(
        "GrpoPodNotReady", "a run is resumed after another pod replaced the one that was paused",
        {
            'grpo_pod_ready{run="a",pod="generator-0"}': "0x75",
            PAUSED % 0: "1x10 stale", PAUSED % 1: "_x11 1x20 0x44",
        },
        fires=(50, 70), silent=(30, 40), labels={"pod": "generator-0"},
    ),
    Story(
        "GrpoNoStep", "a trainer waits for its first step",
        {'grpo_trainer_steps_total{run="a",pod="trainer-0"}': "_x10 0x65"}, fires=(45, 60), silent=(26, 39),
    ),
    Story(
        "GrpoNoStep", "a step takes 40 minutes, the next one never ends",
        {'grpo_trainer_steps_total{run="a",pod="trainer-0"}': "1+1x10 11x39 12x70"}, fires=(100, 110), silent=(20, 49, 60, 90),
    ),
    Story(
        "GrpoDeadLetters", "they are requeued, and fail again one by one",
        {key % 0: "9x40 0 0 0 1+1x7 8x40" for key in (FAILED, LETTERS)}, fires=(44, 50, 75), silent=(40, 41, 43, 85),
    ),
    Story(
        "GrpoDeadLetters", "a standby shows a requeue later than the leader",
        {FAILED % 0: "9x40 0x35", FAILED % 1: "9x42 0x33"}, silent=(41, 42, 43),
    ),
    Story(
        "GrpoDeadLetters", "a new pod has not counted the old ones yet",
        {key % i: values for key in (FAILED, LETTERS) for i, values in enumerate(("7x10 stale", "_x12 NaN NaN 7x60"))},
        silent=(13, 14, 15, 30, 60),
    ),
    Story(
        "GrpoDeadLetters", "a ticket fails while no pod counts",
        {FAILED % 0: "7x10 stale", FAILED % 1: "_x12 NaN 8x60"}, fires=(14, 35), silent=(10, 50),
    ),
    Story(
        "GrpoDeadLetters", "the stream is full",
        {FAILED % 0: "10000x20 10001x55", LETTERS % 0: "10000x75"}, fires=(21, 49), silent=(20, 55),
    ),
    Story(
        "GrpoDeadLetters", "a header of a ticket that was never issued arrives",
        {FAILED % 0: "2x75", LETTERS % 0: "2x20 3x55"}, fires=(21, 49), silent=(20, 55),
    ),
    Story(
        "GrpoRolloutsFail", "rollouts in environments fail",
        {'grpo_environment_failures_total{run="a",pod="environment-0",reason="generation"}': "0x20 1+1x10 11x40"},
        fires=(30,), silent=(20, 60), labels={"reason": "generation"},
    ),
    Story(
        "GrpoLeasesLost", "an environment pod stalls",
        {'grpo_environment_lost_leases_total{run="a",pod="environment-0"}': "0x20 1+1x10 11x40"},
        fires=(30,), silent=(20, 60), labels={"pod": "environment-0"},
    ),
)  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: f"{story.alert}: {story.title}")
def test_an_alert_fires_at_the_right_moment(story: Story, promtool: str, tmp_path: Path) -> None:
    found = expected(story.alert, Trouble({}, story.labels))
    moments = dict.fromkeys(story.fires, found) | {minute: [] for minute in story.silent}
    tests = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in story.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": story.alert, "exp_alerts": alerts} for minute, alerts in moments.items()
        ],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [tests]}, width=1000))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
