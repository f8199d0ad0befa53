"""A whole run as operators see it: every service's metrics, a trace per group, JSON logs in one stream, a hanging tracker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.observing import black_hole
from monitoring import declared
from services.console.commands.attach import attach
from services.dataprep.metrics import EvaluationMetrics
from services.protocol.messages import PodStatus
from services.runtime.metrics import Declared, declarations
from tests.support.harness import save_model_folder
from tests.support.servers.collector import Collector, Span, collecting
from tests.support.whole_runs import finish, pids_of, start, summary, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 400.0  # for everything to appear, which takes about twenty seconds on an idle machine
LIFE = ["issue", "claim", "generate", "verify", "submit", "settle", "plan", "train"]

SECTIONS_OF = {"dataprep": ("run", "dataprep"), "generator": ("generator",), "trainer": ("trainer",), "tracker": ("tracker",)}
ONLY_IN_TROUBLE = {
    "grpo_pod_loop_failures_total", "grpo_run_oldest_ticket_seconds", "grpo_run_doubled_tickets", "grpo_run_dead_letters",
    "grpo_run_paused", "grpo_redis_memory_limit_bytes", "grpo_dataprep_stale_groups_total",
    "grpo_dataprep_passed_over_steps_total", "grpo_dataprep_overtaking_steps_total", "grpo_dataprep_short_steps_total",
    "grpo_generator_refused_submits_total", "grpo_generator_lost_leases_total", "grpo_generator_failures_total",
    "grpo_generator_given_up_tickets_total", "grpo_generator_handed_back_total",
    "grpo_generator_handed_back_tokens_total", "grpo_generator_verifier_restarts_total", "grpo_generator_sync_failures_total",
    "grpo_generator_versions_behind", "grpo_trainer_sync_failures_total", "grpo_trainer_failed_checkpoints",
    "grpo_tracker_failures_total", "grpo_tracker_missed_groups", "grpo_trainer_condemned_groups_total",
    "grpo_generator_catch_ups_total",
}  # fmt: skip
"""Metrics that do not change in a run without problems. tests/monitoring/test_movement.py, test_trouble.py and
tests/weights/rounds/test_store_rounds.py change them."""
OF_EVALUATION = {metric.name for metric in declarations(EvaluationMetrics).values()}
"""Metrics of evaluations, which this run does not have. tests/runs/test_evaluation.py changes them."""
OF_A_MOMENT = {
    "grpo_generator_kv_usage_ratio", "grpo_generator_evaluating", "grpo_generator_rollouts", "grpo_generator_requests",
    "grpo_run_ended", "grpo_run_replay_groups",
}  # fmt: skip
"""Metrics that a scrape may miss in such a short run, or that do not occur in it."""
WITHOUT_CAUSE = {
    ("tracker", "grpo_pod_spans_total"),  # it does not handle groups
    ("tracker", "grpo_pod_activity_seconds_total"),  # of pods that hold devices
    ("dataprep", "grpo_pod_activity_seconds_total"),
}
"""Kinds of pods and the metrics that do not change there."""


@dataclass
class Observed:
    """What was observed of the run while it was running."""

    folder: Path
    collector: Collector
    texts: dict[str, str] = field(default_factory=dict)  # kind of pod -> its last scrape
    moved: set[tuple[str, str]] = field(default_factory=set)  # (kind of pod, name of a series that was neither 0, -1 nor NaN)
    backlog: float = 0.0  # steps that W&B has not taken
    written: float = 0.0  # records that TensorBoard has written

    @property
    def whole(self) -> list[list[Span]]:
        """Return the traces that cover the whole life of a group."""
        return [spans for spans in self.collector.by_trace().values() if [span.name for span in spans] == LIFE]

    def logs(self) -> dict[str, list[str]]:
        """Return the lines of each pod's log."""
        return {path.stem: path.read_text().splitlines() for path in (self.folder / "observed" / "logs").glob("*.log")}

    def scrape(self) -> None:
        """Read the metrics of one pod of each kind."""
        for pod in asyncio.run(pods(self.folder / "observed")):
            if not pod.url or pod.name not in ("dataprep-0", "generator-0", "trainer-0", "tracker-0"):
                continue
            try:
                with urllib.request.urlopen(f"{pod.url}/metrics", timeout=30) as answer:
                    text = self.texts[pod.kind] = answer.read().decode()
            except OSError:
                continue  # the pod has just started
            if pod.kind == "tracker":
                self.backlog = value(text, "grpo_tracker_backlog_steps", tracker="wandb")
                self.written = value(text, "grpo_tracker_written_records_total", tracker="tensorboard")
            self.moved |= {(pod.kind, one.name) for one in samples(text) if abs(one.value) > 0 and one.value != -1.0}

    def still(self, kind: str) -> list[str]:
        """Return the declared metrics of a service that have not changed."""
        return [
            metric.name
            for metric in shown_by(kind)
            if (kind, series_of(metric)) not in self.moved
            and metric.name not in ONLY_IN_TROUBLE | OF_A_MOMENT | OF_EVALUATION
            and (kind, metric.name) not in WITHOUT_CAUSE
        ]


def shown_by(kind: str) -> list[Declared]:
    return [metric for section in (*SECTIONS_OF[kind], "pod") for metric in declared.of(section)]


def series_of(metric: Declared) -> str:
    return f"{metric.name}_count" if metric.kind == "histogram" else metric.name


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def pods(folder: Path) -> list[PodStatus]:
    async with attach(str(folder), "") as attached:
        return await attached.store.fleet.members(attached.ttl_s)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Observe a run with tracing and both trackers, of which W&B hangs, and stop it once everything has been seen."""
    folder = tmp_path_factory.mktemp("observed")
    save_model_folder(folder / "model")
    with collecting() as collector, black_hole() as (hole, _), pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_MODE", "online")
        environment.setenv("WANDB_BASE_URL", hole)
        environment.setenv("WANDB_API_KEY", "0" * 40)
        path = write_run(
            folder, "observed", "run.steps=1000", "filters.exclude_pass_rate=0", "fleet.ttl_s=5", "samples.keep=100000",
            f"tracing.endpoint={collector.url}", "tracking.tensorboard=true", "tracking.wandb=project", "sync.backend=store",
            "trainer.deterministic=false",
        )  # fmt: skip
        observed = Observed(folder, collector)
        process = start(path)
        try:
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline:
                assert process.poll() is None, process.communicate()[0]
                if (folder / "observed" / "metrics.jsonl").exists():
                    observed.scrape()
                    tracked = min(observed.backlog, observed.written) >= 3
                    if tracked and len(observed.whole) >= 16 and not any(map(observed.still, SECTIONS_OF)):
                        break
                time.sleep(0.5)
            for pid in pids_of(folder, "observed", "tracker-0"):  # `grpo run` would wait for the hanging tracker
                with contextlib.suppress(ProcessLookupError):  # it exited with its parent
                    os.kill(pid, signal.SIGKILL)
            subprocess.run([sys.executable, "-m", "services.console.commands", "stop", str(folder / "observed")], check=True)
            finish(process)
        finally:
            process.kill()
            process.communicate()
        yield observed


def value(text: str, name: str, **labels: str) -> float:
    return next(one.value for one in samples(text) if one.name == name and labels.items() <= one.labels.items())


def test_an_observed_run_loses_nothing(observed: Observed) -> None:
    facts = summary(observed.folder, "observed")
    assert (facts["lost"], facts["doubled"]) == (0, 0)


@pytest.mark.parametrize("kind", sorted(SECTIONS_OF))
def test_every_declared_metric_exists_and_changes(observed: Observed, kind: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(observed.texts[kind])}
    for metric in shown_by(kind):
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert all(sample.labels["run"] == "observed" for sample in family.samples)
        if metric.values:
            assert {sample.labels[metric.label] for sample in family.samples} == set(metric.values)
    undeclared = {name for name in families if name.startswith("grpo_")} - {
        metric.name.removesuffix("_total") for metric in shown_by(kind)
    }
    assert not undeclared
    assert observed.still(kind) == []


@pytest.mark.parametrize("kind", sorted(SECTIONS_OF))
def test_metric_names_pass_promtool(observed: Observed, kind: str, promtool: str) -> None:
    ours = [line for line in observed.texts[kind].splitlines() if "grpo_" in line]
    done = subprocess.run(
        [promtool, "check", "metrics"], input="\n".join(ours) + "\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_spans_of_a_group_form_one_trace(observed: Observed) -> None:
    assert len(observed.whole) >= 16
    for spans in observed.whole:
        root, *others = spans
        assert root.parent == ""
        assert {span.parent for span in others} == {root.id}
        assert [span.service for span in spans] == [
            "grpo-dataprep", *["grpo-generator"] * 4, "grpo-dataprep", "grpo-dataprep", "grpo-trainer"
        ]  # fmt: skip
        assert spans[1].attributes["grpo.generator"] == spans[1].pod
        assert spans[6].attributes["grpo.step"] == spans[7].attributes["grpo.step"]
        assert all(span.started <= span.ended for span in spans)


def test_a_hanging_tracker_blocks_nothing(observed: Observed) -> None:
    """Its cost per step is measured by benchmarks/observing.py."""
    assert value(observed.texts["tracker"], "grpo_tracker_written_records_total", tracker="wandb") == 0
    assert min(observed.written, observed.backlog) >= 3


def test_logs_are_one_stream_of_json(observed: Observed) -> None:
    lines = observed.logs()
    assert sorted(lines) == ["dataprep-0", "generator-0", "generator-1", "tracker-0", "trainer-0"]
    for pod, of_pod in lines.items():
        for line in of_pod:
            event = json.loads(line)
            assert (event["run"], event["pod"]) == ("observed", pod), line
            assert {"event", "level", "timestamp", "logger"} <= event.keys()
    assert any(json.loads(line)["logger"].startswith("uvicorn") for line in lines["trainer-0"])
    saved = [json.loads(line) for line in lines["trainer-0"] if '"snapshot written"' in line]
    assert [event["step"] for event in saved[:2]] == [1, 3], "a log line within a step carries its number"
