"""Every metric that a service exposes, and the ones that a PromQL expression names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.dataprep.metrics import DataprepMetrics, EvaluationMetrics, RunMetrics
from services.environment.metrics import EnvironmentMetrics
from services.generator.metrics import GeneratorMetrics
from services.runtime.metrics import Declared, Metrics, declarations
from services.runtime.pod_metrics import PodMetrics
from services.tracker.metrics import TrackerMetrics
from services.trainer.metrics import TrainerMetrics

SECTIONS: dict[str, tuple[type[Metrics], ...]] = {
    "run": (RunMetrics,),
    "dataprep": (DataprepMetrics, EvaluationMetrics),
    "generator": (GeneratorMetrics,),
    "environment": (EnvironmentMetrics,),
    "trainer": (TrainerMetrics,),
    "tracker": (TrackerMetrics,),
    "pod": (PodMetrics,),
}
"""The metrics under each heading: those of the run come from dataprep, `pod` from every service."""
COMMON = ("run", "pod", "instance", "job", "le")
_NAME = re.compile(r"\b(grpo_\w+)(?:\{([^}]*)\})?")
_MATCH = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")


def of(section: str) -> list[Declared]:
    """Return the metrics under a heading."""
    return [declared for metrics in SECTIONS[section] for declared in declarations(metrics).values()]


def everything() -> dict[str, Declared]:
    """Return all metrics by name."""
    return {declared.name: declared for section in SECTIONS for declared in of(section)}


def series() -> dict[str, Declared]:
    """Return all series names: a histogram has three."""
    found: dict[str, Declared] = {}
    for declared in everything().values():
        parts = ("_bucket", "_sum", "_count") if declared.kind == "histogram" else ("",)
        found |= {declared.name + part: declared for part in parts}
    return found


def faults(expression: str) -> Iterator[str]:
    """Yield what an expression names that no service exposes: metrics, labels, values of labels."""
    known = series()
    for name, matchers in _NAME.findall(expression):
        declared = known.get(name)
        if declared is None:
            yield f"no service exposes {name}"
            continue
        for label, how, value in _MATCH.findall(matchers or ""):
            if label not in (*COMMON, declared.label):
                yield f"{name} has no label {label}"
            elif label == declared.label and declared.values:
                wanted = value.split("|") if how.endswith("~") else [value]
                yield from (f"{name} has no {label} {each!r}" for each in wanted if each not in declared.values)
