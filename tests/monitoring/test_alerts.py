"""Every alert fires on its problem and is silent on a healthy run, according to promtool on made-up series."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from monitoring.__main__ import ROOT
from monitoring.alerts import ALERTS, GROUP

RULES = ROOT / "charts" / "files" / "alerts.yaml"
MINUTES = 75  # the length of every series
WELL = {
    'grpo_pod_ready{run="a",pod="generator-0"}': "1x75",
    'grpo_pod_loop_silent_seconds{run="a",pod="trainer-0",loop="train"}': "1x75",
    'grpo_pod_loop_limit_seconds{run="a",pod="trainer-0",loop="train"}': "600x75",
    'grpo_pod_loop_failures_total{run="a",pod="trainer-0",loop="train"}': "1x75",
    'grpo_pod_spans_total{run="a",pod="trainer-0",outcome="sent"}': "0+10x75",
    'grpo_pod_spans_total{run="a",pod="trainer-0",outcome="failed"}': "0x75",
    'grpo_run_ended{run="a",pod="dataprep-0"}': "0x75",
    'grpo_run_paused{run="a",pod="dataprep-0",role="trainer"}': "0x75",
    'grpo_run_pods{run="a",pod="dataprep-0",kind="trainer"}': "1x75",
    'grpo_run_pods{run="a",pod="dataprep-0",kind="generator"}': "4x75",
    'grpo_run_wanted_generators{run="a",pod="dataprep-0"}': "4x75",
    'grpo_run_doubled_tickets{run="a",pod="dataprep-0"}': "0x75",
    'grpo_run_oldest_ticket_seconds{run="a",pod="dataprep-0"}': "60x75",
    'grpo_run_outcome_tickets{run="a",pod="dataprep-0",outcome="failed"}': "2x75",
    'grpo_run_dead_letters{run="a",pod="dataprep-0"}': "2x75",
    'grpo_redis_used_memory_bytes{run="a",pod="dataprep-0"}': "500x75",
    'grpo_redis_memory_limit_bytes{run="a",pod="dataprep-0"}': "1000x75",
    'grpo_redis_persists{run="a",pod="dataprep-0"}': "1x75",
    'grpo_redis_answer_seconds_bucket{run="a",pod="dataprep-0",le="0.01"}': "0+30x75",
    'grpo_redis_answer_seconds_bucket{run="a",pod="dataprep-0",le="1"}': "0+30x75",
    'grpo_redis_answer_seconds_bucket{run="a",pod="dataprep-0",le="+Inf"}': "0+30x75",
    'grpo_dataprep_leads{run="a",pod="dataprep-0"}': "1x75",
    'grpo_dataprep_leads{run="a",pod="dataprep-1"}': "0x75",
    'grpo_dataprep_lag_bound_steps{run="a",pod="dataprep-0"}': "1x75",
    'grpo_dataprep_stale_groups_total{run="a",pod="dataprep-0"}': "0x75",
    'grpo_dataprep_settled_groups_total{run="a",pod="dataprep-0",action="stale"}': "0x75",
    'grpo_generator_versions_behind{run="a",pod="generator-0"}': "1x75",
    'grpo_generator_evaluating{run="a",pod="generator-0"}': "0x75",
    'grpo_generator_kv_usage_ratio{run="a",pod="generator-0"}': "0.7x75",
    'grpo_generator_failures_total{run="a",pod="generator-0",reason="verifier"}': "0x75",
    'grpo_generator_lost_leases_total{run="a",pod="generator-0"}': "0x75",
    'grpo_environment_failures_total{run="a",pod="environment-0",reason="generation"}': "0x75",
    'grpo_environment_lost_leases_total{run="a",pod="environment-0"}': "0x75",
    'grpo_trainer_steps_total{run="a",pod="trainer-0"}': "0+1x75",
    'grpo_trainer_phase_seconds_total{run="a",pod="trainer-0",phase="training"}': "0+50x75",
    'grpo_trainer_phase_seconds_total{run="a",pod="trainer-0",phase="waiting for data"}': "0+5x75",
    'grpo_trainer_phase_seconds_total{run="a",pod="trainer-0",phase="syncing"}': "0+5x75",
    'grpo_trainer_sync_failures_total{run="a",pod="trainer-0"}': "0x75",
    'grpo_trainer_failed_checkpoints{run="a",pod="trainer-0"}': "0x75",
    'grpo_trainer_step_metric{run="a",pod="trainer-0",name="staleness/trained/max"}': "1x75",
    'grpo_trainer_step_metric{run="a",pod="trainer-0",name="reward/train/zero_std_share"}': "0.3x75",
    'grpo_trainer_step_metric{run="a",pod="trainer-0",name="logprob_gap/train/mean"}': "0.01x75",
    'grpo_trainer_step_metric{run="a",pod="trainer-0",name="length/drift"}': "1x75",
    'grpo_tracker_backlog_steps{run="a",pod="tracker-0",tracker="wandb"}': "2x75",
}
"""Series of a healthy run, one value per minute."""
GONE = {name: values.replace("x75", "x10 stale") for name, values in WELL.items() if 'pod="dataprep-' in name}
"""Series of a run whose dataprep pods have exited."""


@dataclass(frozen=True)
class Trouble:
    """A problem: the series that differ from `WELL`, and the labels of the alert that fires."""

    series: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)


def of(metric: str, values: str, pod: str = "", **labels: str) -> Trouble:
    """Return a problem with one series of `WELL`; the alert names the pod if one is given."""
    (name,) = [
        name for name in WELL
        if name.startswith(metric + "{") and all(f'{key}="{value}"' in name for key, value in labels.items())
    ]  # fmt: skip
    return Trouble({name: values}, {"pod": pod} if pod else {})


def gauge(name: str, values: str) -> Trouble:
    return of("grpo_trainer_step_metric", values, name=name)


CASES = {
    "GrpoLoopStuck": of("grpo_pod_loop_silent_seconds", "601x75", "trainer-0"),
    "GrpoLoopFails": of("grpo_pod_loop_failures_total", "0+1x75", "trainer-0"),
    "GrpoNoLeader": Trouble({'grpo_dataprep_leads{run="a",pod="dataprep-0"}': "0x75"}),
    "GrpoNoDataprep": Trouble(GONE),
    "GrpoNoTrainer": of("grpo_run_pods", "0x75", kind="trainer"),
    "GrpoTooFewGenerators": of("grpo_run_pods", "3x75", kind="generator"),
    "GrpoPodNotReady": of("grpo_pod_ready", "0x75", "generator-0"),
    "GrpoNoStep": of("grpo_trainer_steps_total", "7x75"),
    "GrpoTrainerStarves": of("grpo_trainer_phase_seconds_total", "0+40x75", phase="waiting for data"),
    "GrpoGeneratorBehind": of("grpo_generator_versions_behind", "2x75", "generator-0"),
    "GrpoSyncFails": of("grpo_trainer_sync_failures_total", "0+1x75"),
    "GrpoSyncSlow": of("grpo_trainer_phase_seconds_total", "0+30x75", phase="syncing"),
    "GrpoTicketsDoubled": of("grpo_run_doubled_tickets", "1x75"),
    "GrpoLagBeyondBound": gauge("staleness/trained/max", "2x75"),
    "GrpoStaleGroups": of("grpo_dataprep_settled_groups_total", "0+1x75", action="stale"),
    "GrpoTicketStuck": of("grpo_run_oldest_ticket_seconds", "3000+60x75"),
    "GrpoDeadLetters": of("grpo_run_outcome_tickets", "2+1x75"),
    "GrpoRolloutsFail": Trouble(
        {'grpo_generator_failures_total{run="a",pod="generator-0",reason="verifier"}': "0+1x75"}, {"reason": "verifier"}
    ),
    "GrpoLeasesLost": of("grpo_generator_lost_leases_total", "0+1x75", "generator-0"),
    "GrpoKvCacheFull": of("grpo_generator_kv_usage_ratio", "0.99x75", "generator-0"),
    "GrpoRedisFull": of("grpo_redis_used_memory_bytes", "900x75"),
    "GrpoRedisSlow": of("grpo_redis_answer_seconds_bucket", "0x75", le="0.01"),
    "GrpoRedisNotPersisting": of("grpo_redis_persists", "0x75"),
    "GrpoCheckpointFails": of("grpo_trainer_failed_checkpoints", "1x75"),
    "GrpoNothingToLearn": gauge("reward/train/zero_std_share", "0.95x75"),
    "GrpoPolicyGap": gauge("logprob_gap/train/mean", "0.5x75"),
    "GrpoLengthDrift": gauge("length/drift", "0.6x75"),
    "GrpoTrackerBehind": Trouble(
        {'grpo_tracker_backlog_steps{run="a",pod="tracker-0",tracker="wandb"}': "0+1x75"}, {"tracker": "wandb"}
    ),
    "GrpoSpansLost": of("grpo_pod_spans_total", "0+10x75", outcome="failed"),
}
QUIETED = {"ended": {'grpo_run_ended{run="a",pod="dataprep-0"}': "1x75"}, "paused": {
    'grpo_run_paused{run="a",pod="dataprep-0",role="trainer"}': "1x75"
}}  # fmt: skip
"""Series of a finished or paused run, in which these are not problems."""
QUIET = (
    "GrpoNoLeader", "GrpoNoTrainer", "GrpoTooFewGenerators", "GrpoPodNotReady", "GrpoNoStep", "GrpoTrainerStarves",
    "GrpoGeneratorBehind", "GrpoSyncSlow", "GrpoTicketStuck", "GrpoNothingToLearn", "GrpoPolicyGap", "GrpoLengthDrift",
)  # fmt: skip


def expected(name: str, trouble: Trouble) -> list[dict[str, Any]]:
    (alert,) = [alert for alert in ALERTS if alert.name == name]
    labels = {"run": "a", **trouble.labels}
    rule = alert.rule()
    text = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], value)
        for key, value in rule["annotations"].items()
    }
    return [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": text}]


def case(title: str, series: dict[str, str], alerts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "name": title,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in (WELL | series).items()],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES - 5}m", "alertname": name, "exp_alerts": found} for name, found in alerts.items()
        ],
    }


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == [alert.name for alert in ALERTS]


def test_rules_are_well_formed(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_alerts_fire_on_their_problem_only(promtool: str, tmp_path: Path) -> None:
    silent = {name: [] for name in CASES}
    tests = [case("a healthy run", {}, silent)]
    tests += [case(name, trouble.series, {name: expected(name, trouble)}) for name, trouble in CASES.items()]
    troubles = {name: values for quiet in QUIET for name, values in CASES[quiet].series.items()}
    for how, series in QUIETED.items():
        last = {name: values.replace("x75", "x10 stale") for name, values in series.items()}
        tests.append(case(f"no problems in a run that is {how}", troubles | series, {name: [] for name in QUIET}))
        tests.append(case(f"nor without dataprep, if it was {how}", troubles | GONE | last, {name: [] for name in QUIET}))
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}, width=1000))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_never_fires_would_be_detected(promtool: str, tmp_path: Path) -> None:
    path = tmp_path / "tests.yaml"
    missing = case("well", {}, {"GrpoNoStep": expected("GrpoNoStep", CASES["GrpoNoStep"])})
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": [missing]}))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert GROUP in RULES.read_text()
