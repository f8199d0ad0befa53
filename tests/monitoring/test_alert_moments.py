"""Alerts fire at the right moment: on what happens to a run while pods come, go and begin to count."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from monitoring.alerts import ALERTS
from tests.monitoring.test_alerts import RULES

LEADS, ENDED = 'grpo_dataprep_leads{run="a",pod="dataprep-%d"}', 'grpo_run_ended{run="a",pod="dataprep-%d"}'
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
        fires=(50, 70), silent=(30, 40),
    ),
)  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: f"{story.alert}: {story.title}")
def test_an_alert_fires_at_the_right_moment(story: Story, promtool: str, tmp_path: Path) -> None:
    (rule,) = [alert.rule() for alert in ALERTS if alert.name == story.alert]
    pods = {"pod": "generator-0"} if "$labels.pod" in rule["annotations"]["summary"] else {}
    labels = {"run": "a", **pods, **rule["labels"]}
    text = {key: each.replace("{{ $labels.run }}", "a") for key, each in rule["annotations"].items()}
    text = {key: each.replace("{{ $labels.pod }}", "generator-0") for key, each in text.items()}
    expected = {minute: [{"exp_labels": labels, "exp_annotations": text}] for minute in story.fires}
    expected |= {minute: [] for minute in story.silent}
    tests = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in story.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": story.alert, "exp_alerts": alerts} for minute, alerts in expected.items()
        ],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [tests]}, width=1000))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
