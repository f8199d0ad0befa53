"""The rendered chart: the output of `helm template`, as objects."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if PyYAML was built with libyaml

os.environ.setdefault("GOGC", "400")  # before Helm's library, written in Go, is loaded: rendering then takes a fifth less time

WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job")

BASE: Object = {
    "config": {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"sources": [{"kind": "reasoning_gym", "task": "basic_arithmetic"}]},
        "verifiers": [{"kind": "reasoning_gym"}],
    }
}
"""Values that every release must set."""


def parse(text: str) -> Any:
    """Return the single document of a text."""
    return yaml.load(text, LOADER)


def parse_all(text: str) -> list[Any]:
    """Return every non-empty document of a text."""
    return [found for found in yaml.load_all(text, LOADER) if found]


def example(name: str) -> Object:
    """Return the values of an example."""
    return parse((CHART / "examples" / f"{name}.yaml").read_text())


def documented(heading: str) -> Object:
    """Return the values that docs/kubernetes.md shows under a heading."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    section = page.split(f"## {heading}\n", 1)[1].split("\n##", 1)[0]
    return parse(section.split("```yaml\n", 1)[1].split("\n```", 1)[0])


def changed(values: Mapping[str, Any], path: str, value: Any) -> Object:
    """Return the values with the one at path `a.b.c` changed."""
    result = copy.deepcopy(dict(values))
    *sections, key = path.split(".")
    node = result
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value
    return result


def completed(values: Mapping[str, Any] | None = None) -> Object:
    """Return the values, completed with BASE where keys are missing."""
    result = copy.deepcopy(dict(values or {}))
    config = result["config"] = {**BASE["config"], **result.get("config", {})}
    config["data"] = {**BASE["config"]["data"], **config["data"]}
    return result


def render(
    values: Mapping[str, Any] | None = None, name: str = "demo", namespace: str = "ml", bare: bool = False
) -> list[Object]:
    """Return every object of a release, which must not be modified. Raises the library's HelmError for rejected values.

    `bare`: render these values alone, without BASE.
    """
    return _render(json.dumps((values or {}) if bare else completed(values), sort_keys=True), name, namespace)


@functools.cache
def _render(values: str, name: str, namespace: str) -> list[Object]:
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        files = chart.render(json.loads(values), name=name, namespace=namespace)
    texts = (text for path, text in files.items() if not path.endswith("NOTES.txt"))
    return [found for text in texts for found in parse_all(text)]


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the notes printed after an install."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        return next(text for path, text in chart.render(completed(values), name="demo").items() if path.endswith("NOTES.txt"))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Return the objects of some kinds."""
    return [found for found in objects if found["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """Return the object of this kind and name."""
    (found,) = [found for found in of_kind(objects, kind) if found["metadata"]["name"] == name]
    return found


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield labels and specs of all pods of the release, by `kind/name` of their owner."""
    for found in objects:
        label = f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] == "LeaderWorkerSet":
            yield label, found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        elif found["kind"] in WORKLOADS:
            yield label, found["spec"]["template"]
        elif found["kind"] == "Pod":
            yield label, found


def containers(template: Object) -> list[Object]:
    """Return the containers of a pod, including init containers."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def as_text(objects: list[Object]) -> str:
    """Return objects as text, for comparisons."""
    return json.dumps(objects, sort_keys=True)
