"""Declarations of Prometheus metrics: every metric of a service, with its unit, its help and every value of its label.

Guarantees: a metric has at most one label of its own. Its values are listed in the declaration, or bounded by a set named
there, and every listed value is exposed from the start. Alert rules, the dashboard and docs/operating.md are generated from the
same declarations (monitoring/). In addition to its own label, every metric carries `run` and `pod`, which are added on
scraping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Buckets of durations, from a Redis call to a long completion."""

Unit = Literal["", "bytes", "groups", "ratio", "seconds", "spans", "steps", "tickets", "tokens"]

disable_created_metrics()  # a second series for each metric, which nothing reads


@dataclass(frozen=True)
class Declared:
    """One metric. `name` is as Prometheus shows it, so a counter's ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: Unit
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """All values of the label. Empty for a label whose values are bounded by `bound`."""
    bound: str = ""
    buckets: tuple[float, ...] = ()

    def make(self, registry: CollectorRegistry) -> Any:
        """Return the metric; with listed values, a mapping from value to metric."""
        labels = (self.label,) if self.label else ()
        match self.kind:
            case "counter":
                made = Counter(self.name.removesuffix("_total"), self.help, labels, registry=registry)
            case "gauge":
                made = Gauge(self.name, self.help, labels, registry=registry)
            case "histogram":
                made = Histogram(self.name, self.help, labels, buckets=self.buckets, registry=registry)
        return {value: made.labels(value) for value in self.values} if self.values else made


def counter(name: str, unit: Unit, help: str, label: str = "", values: Sequence[str] = (), bound: str = "") -> Any:
    """Declare a `Counter`, or one for every value of `label`. With `bound`, which says what bounds the values, `labels(value)`
    creates one. Like dataclasses' `field`, these functions return a placeholder for the attribute.
    """
    return Declared(name, "counter", unit, help, label, tuple(values), bound)


def gauge(name: str, unit: Unit, help: str, label: str = "", values: Sequence[str] = (), bound: str = "") -> Any:
    """Declare a `Gauge`, likewise."""
    return Declared(name, "gauge", unit, help, label, tuple(values), bound)


def histogram(
    name: str, unit: Unit, help: str, label: str = "", values: Sequence[str] = (), buckets: Sequence[float] = SECONDS
) -> Any:
    """Declare a `Histogram`, or one for every value of `label`."""
    return Declared(name, "histogram", unit, help, label, tuple(values), buckets=tuple(buckets))


def declarations(metrics: type[Metrics]) -> dict[str, Declared]:
    """Return the metrics of a class by attribute, in order of declaration."""
    return {name: value for name, value in vars(metrics).items() if isinstance(value, Declared)}


class Metrics:
    """Metrics of a part of a process. A subclass declares them as class attributes; an instance creates them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        for name, declared in declarations(type(self)).items():
            setattr(self, name, declared.make(registry))


class PhaseClock:
    """Records how long each of a sequence of phases lasted.

    `notes` maps a phase to the function that takes its seconds. Phases that it does not name, such as "", are not recorded.
    """

    def __init__(self, notes: Mapping[str, Callable[[float], object]]) -> None:
        self._notes, self._phase, self._since = notes, "", time.monotonic()

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Enter a phase, which ends the previous one unless it is the same."""
        now = time.monotonic()
        if note := self._notes.get(self._phase):
            note(now - self._since)
        self._phase, self._since = phase, now


class _Labelled:
    """A registry whose samples carry additional labels."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples]
            yield metric


def exposition(registry: CollectorRegistry, **labels: str) -> bytes:
    """Return all metrics in Prometheus' text format, with `labels` on every sample."""
    return generate_latest(_Labelled(registry, labels))  # pyright: ignore[reportArgumentType]: it collects, which is all that is asked
