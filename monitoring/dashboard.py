"""The Grafana dashboard: a hand-written overview, a row per package with a panel for each of its metrics, and a row for vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from monitoring import declared
from services.runtime.metrics import Declared

SCOPE = 'run=~"$run"'
UNITS = {"bytes": "bytes", "ratio": "percentunit", "seconds": "s"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
TITLES = {
    "run": "The run", "dataprep": "Dataprep", "generator": "Generators", "environment": "Environments",
    "trainer": "Trainer", "tracker": "Trackers",
    "pod": "All pods",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A chart: PromQL expressions with the legend of each."""

    title: str
    targets: tuple[tuple[str, str], ...]
    help: str
    unit: str = "short"


def _step(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((f'max by (run) (grpo_trainer_step_metric{{{SCOPE}, name="{name}"}})', name) for name in names)


OVERVIEW = (
    Panel("Steps", (
        (f"max by (run, mark) (grpo_run_done_steps{{{SCOPE}}})", "{{mark}}"),
        (f"max by (run) (grpo_run_steps{{{SCOPE}}})", "length of the run"),
    ), "Progress of the run."),
    Panel("Reward", _step("reward/gen/mean", "reward/train/mean"), "Mean reward of groups generated and of groups trained on."),
    Panel("Tokens", (
        (f"sum by (run) (rate(grpo_generator_sampled_tokens_total{{{SCOPE}}}[$__rate_interval]))", "sampled"),
        (f"sum by (run) (rate(grpo_trainer_tokens_total{{{SCOPE}}}[$__rate_interval]))", "trained"),
    ), "Tokens per second: of completions sampled, and of prompts and completions trained on."),
    Panel("Trainer phases", (
        (f"sum by (run, phase) (rate(grpo_trainer_phase_seconds_total{{{SCOPE}}}[$__rate_interval]))", "{{phase}}"),
    ), "Share of the trainer's time.", "percentunit"),
    Panel("Generator activities", (
        (f"avg by (run, activity) (rate(grpo_pod_activity_seconds_total{{{SCOPE}}}[$__rate_interval]))", "{{activity}}"),
    ), "Share of the generators' time. `idle` is the wait for tickets, usually for the trainer.", "percentunit"),
    Panel("Why no step is prepared", (
        (f"sum by (run, why) (rate(grpo_dataprep_wait_seconds_total{{{SCOPE}}}[$__rate_interval]))", "{{why}}"),
    ), "Share of dataprep's time: `ahead` means that the run waits for the trainer, `groups` that it waits for generators.",
        "percentunit"),
    Panel("Staleness", (
        *_step("staleness/trained/mean", "staleness/trained/max"),
        (f"max by (run) (grpo_dataprep_lag_bound_steps{{{SCOPE}}})", "bound"),
    ), "Lag between the weights that sampled a completion and the step that trains on it, in steps."),
    Panel("Tickets", ((f"max by (run, place) (grpo_run_tickets{{{SCOPE}}})", "{{place}}"),), "Number of tickets in each place."),
    Panel("Slots", (
        (f"max by (run) (grpo_run_used_slots{{{SCOPE}}})", "used"), (f"max by (run) (grpo_run_slots{{{SCOPE}}})", "slots"),
    ), "Slots of the run, and those in use."),
    Panel("Fleet", (
        (f"max by (run, kind) (grpo_run_pods{{{SCOPE}}})", "{{kind}}"),
        (f"max by (run) (grpo_run_wanted_generators{{{SCOPE}}})", "generators desired"),
    ), "Pods with a recent heartbeat."),
    Panel("Redis' memory", (
        (f"max by (run) (grpo_redis_used_memory_bytes{{{SCOPE}}})", "used"),
        (f"max by (run) (grpo_redis_memory_limit_bytes{{{SCOPE}}})", "limit"),
    ), "0: no limit.", "bytes"),
)  # fmt: skip

RATE = f"{{{SCOPE}}}[$__rate_interval]"
VLLM = (
    Panel("KV cache in use", ((f"max by (run, pod) (vllm:kv_cache_usage_perc{{{SCOPE}}})", "{{pod}}"),),
        "Share of the KV cache's blocks in use.", "percentunit"),
    Panel("Prefix cache hits", ((
        f"sum by (run, pod) (rate(vllm:prefix_cache_hits_total{RATE})) / "
        f"sum by (run, pod) (rate(vllm:prefix_cache_queries_total{RATE}))", "{{pod}}",
    ),), "Share of prefilled tokens found in the prefix cache.", "percentunit"),
    Panel("Preemptions", ((f"sum by (run, pod) (rate(vllm:num_preemptions_total{RATE}))", "{{pod}}"),),
        "Completions per second that lost their KV cache to others, and are prefilled again."),
)  # fmt: skip
"""Panels for vLLM's own metrics, which no service declares; tests/generator/test_engine.py checks that vLLM has them."""


def panel_of(metric: Declared) -> Panel:
    """Return the chart of one metric: the rate of a counter, the value of a gauge, two quantiles of a histogram."""
    by, legend = (f"run, pod, {metric.label}", f"{{{{pod}}}} {{{{{metric.label}}}}}") if metric.label else ("run, pod", "{{pod}}")
    unit, name = UNITS.get(metric.unit, "short"), metric.name
    match metric.kind:
        case "counter":
            rate = f"sum by ({by}) (rate({name}{{{SCOPE}}}[$__rate_interval]))"
            return Panel(_title(name), ((rate, legend),), f"{metric.help} Per second.", "percentunit" if unit == "s" else unit)
        case "gauge":
            return Panel(_title(name), ((f"max by ({by}) ({name}{{{SCOPE}}})", legend),), metric.help, unit)
        case _:
            own = f"run, {metric.label}, le" if metric.label else "run, le"
            rate = f"sum by ({own}) (rate({name}_bucket{{{SCOPE}}}[$__rate_interval]))"
            shown = f"{{{{{metric.label}}}}} " if metric.label else ""
            targets = tuple(
                (f"histogram_quantile({q}, {rate})", f"{shown}{text}") for q, text in ((0.5, "median"), (0.99, "p99"))
            )
            return Panel(_title(name), targets, metric.help, unit)


def _title(name: str) -> str:
    words = name.removeprefix("grpo_").removesuffix("_total").split("_")
    return " ".join(words).capitalize()


def panels() -> Iterator[tuple[str, list[Panel]]]:
    """Yield every row with its panels."""
    yield "Overview", list(OVERVIEW)
    for section in declared.SECTIONS:
        yield TITLES[section], [panel_of(metric) for metric in declared.of(section)]
    yield "vLLM", list(VLLM)


def as_json() -> str:
    """Return the dashboard in Grafana's import format."""
    made: list[dict[str, Any]] = []
    top = 0
    for title, row in panels():
        head = {"type": "row", "title": title, "collapsed": title != "Overview", "gridPos": _place(0, top, COLUMNS, 1)}
        charts = [
            _chart(panel, _place(i * WIDTH % COLUMNS, top + 1 + i * WIDTH // COLUMNS * HEIGHT, WIDTH, HEIGHT))
            for i, panel in enumerate(row)
        ]
        made += [head, *charts] if title == "Overview" else [head | {"panels": charts}]
        top += 1 + (-(-len(row) * WIDTH // COLUMNS) * HEIGHT if title == "Overview" else 0)
    flat = [each for panel in made for each in (panel, *panel.get("panels", ()))]
    for number, panel in enumerate(flat, 1):
        panel["id"] = number
    board = {
        "title": "grpo", "uid": "grpo",
        "description": "Generated by `python -m monitoring` from the metrics that the services declare.",
        "tags": ["grpo"], "schemaVersion": 39, "editable": True, "refresh": "30s", "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source(), _runs()]}, "panels": made,
    }  # fmt: skip
    return json.dumps(board, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _chart(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries", "title": panel.title, "description": panel.help, "datasource": source, "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 5, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.targets)
        ],
    }  # fmt: skip


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run", "type": "query", "label": "Run", "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": "label_values(grpo_run_steps, run)", "refId": "runs"}, "refresh": 2, "sort": 1, "multi": True,
        "includeAll": True, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
