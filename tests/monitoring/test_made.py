"""Files generated from the declarations are up to date, use only declared metrics and cover all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitoring import declared, page
from monitoring.__main__ import ROOT, made
from monitoring.alerts import ALERTS
from monitoring.dashboard import panels
from services.runtime.metrics import declarations

UNITS = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio", "steps": "_step", "tokens": "_tokens"}


@pytest.mark.parametrize("path", list(made()), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == made()[path], "run make generate"


def test_expressions_use_only_declared_metrics() -> None:
    board = json.loads((ROOT / "charts" / "files" / "dashboard.json").read_text())
    charts = [chart for panel in board["panels"] for chart in panel.get("panels", [panel]) if chart["type"] != "row"]
    expressions = [target["expr"] for chart in charts for target in chart["targets"]] + [alert.expression for alert in ALERTS]
    assert len(expressions) > 100
    assert [fault for expression in expressions for fault in declared.faults(expression)] == []


def test_invalid_expressions_are_detected() -> None:
    assert list(declared.faults('rate(grpo_generator_token_total{run="a"}[1m])')) == [
        "no service exposes grpo_generator_token_total"
    ]
    assert list(declared.faults("grpo_trainer_step_seconds")) == ["no service exposes grpo_trainer_step_seconds"]
    assert list(declared.faults('grpo_run_pods{color="red"}')) == ["grpo_run_pods has no label color"]
    assert list(declared.faults('grpo_run_pods{kind=~"trainer|cook"}')) == ["grpo_run_pods has no kind 'cook'"]


def test_every_metric_is_on_the_dashboard_and_the_page() -> None:
    shown = " ".join(target for _, row in panels() for panel in row for target, _ in panel.targets)
    text = (ROOT / "docs" / "operating.md").read_text()
    for name in declared.everything():
        assert name in shown
        assert f"`{name}`" in text


def test_declarations_are_complete() -> None:
    names = [metric.name for section in declared.SECTIONS for metric in declared.of(section)]
    assert len(names) == len(set(names)) > 80
    for metric in declared.everything().values():
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.label) == bool(metric.values or metric.bound)
        assert UNITS.get(metric.unit, "") in metric.name
    assert all(declarations(metrics) for classes in declared.SECTIONS.values() for metrics in classes)


def test_a_page_without_its_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        page.fill("# Operating a run")
