"""Who sets the numbers of pods: no manifest names one that something else owns, so no upgrade or rollback changes it, or fails.

The manifests are the chart's; how a cluster applies them is in field_managers.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes import chart
from tests.kubernetes.field_managers import FieldConflict, LiveObject

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

ENVIRONMENT = {
    "environment": {"internet": True},
    "config": {
        "environments": [{"name": "e", "kind": "python", "function": "e:E"}],
        "data": {"sources": [{"kind": "jsonl", "path": "/srv/grpo/data/x.jsonl", "environment": "e"}]},
    },
}
OWNERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "scaler": ({}, "Deployment", "demo-generator"),
    "kubectl": ({"scaler": {"enabled": False}}, "Deployment", "demo-generator"),
    "hpa": (
        {"generator": {"autoscaling": {"kind": "hpa", "metrics": [{"type": "Resource"}]}}}, "Deployment", "demo-generator",
    ),
    "keda": ({"generator": {"autoscaling": {"kind": "keda"}}}, "Deployment", "demo-generator"),
    "scaler, of the trainer": ({"trainer": {"ranksPerNode": 2}}, "StatefulSet", "demo-trainer"),
    "kubectl, of environments": (ENVIRONMENT, "Deployment", "demo-environment"),
}  # fmt: skip
"""Who scales what: values, and the object."""

LIVE = 6
Manifest = dict[str, Any]


def manifests(owner: str) -> tuple[Manifest, Manifest]:
    """The object as two revisions of a release render it."""
    values, kind, name = OWNERS[owner]
    first, second = (
        chart.named(chart.render({**values, "image": {"tag": tag}}), kind, name) for tag in ("1", "2")
    )  # fmt: skip
    assert first != second
    return first, second


def upgrade(live: LiveObject, before: Manifest, after: Manifest) -> None:
    live.apply("helm", after)


def rollback(live: LiveObject, before: Manifest, after: Manifest) -> None:
    live.apply("helm", after)
    live.apply("helm", before)


def sync(live: LiveObject, before: Manifest, after: Manifest) -> None:
    live.apply("argocd-controller", after, force=True)
    live.apply("argocd-controller", before, force=True)


def helm_3(live: LiveObject, before: Manifest, after: Manifest) -> None:
    live.patch(before, after)
    live.patch(after, before)


CHANGES: dict[str, Callable[[LiveObject, Manifest, Manifest], None]] = {
    "upgrade": upgrade, "rollback, also of --rollback-on-failure": rollback, "GitOps": sync, "Helm 3": helm_3,
}  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_number_that_was_set_stays(owner: str, change: str) -> None:
    before, after = manifests(owner)
    live = LiveObject()
    live.apply("argocd-controller" if change == "GitOps" else "helm", before)
    assert live.replicas == 1
    live.scale(owner, LIVE)
    CHANGES[change](live, before, after)
    assert live.replicas == LIVE


def test_the_rules_are_those_that_a_manifest_with_a_number_breaks() -> None:
    """What a cluster said of the chart as it was: the rollback failed, and GitOps set the number back."""
    before, after = (copy.deepcopy(manifest) for manifest in manifests("scaler"))
    before["spec"]["replicas"] = 2
    live = LiveObject()
    live.apply("helm", before)
    live.scale("kubectl", LIVE)
    live.apply("helm", {**after, "spec": {**after["spec"], "replicas": LIVE}})
    with pytest.raises(FieldConflict, match=r"spec\.replicas"):
        live.apply("helm", before)
    live.apply("argocd-controller", before, force=True)
    assert live.replicas == 2


def test_a_manifest_that_stops_naming_the_number_begins_anew() -> None:
    """The one upgrade from a chart that named it, if nobody had scaled: the scaler then sets the number again."""
    before, after = (copy.deepcopy(manifest) for manifest in manifests("scaler"))
    before["spec"]["replicas"] = 4
    live = LiveObject()
    live.apply("helm", before)
    live.apply("helm", after)
    assert live.replicas == 1


def test_only_a_replacement_loses_the_number() -> None:
    before, after = manifests("scaler")
    live = LiveObject()
    live.apply("helm", before)
    live.scale("scaler", LIVE)
    live.replace(after)
    assert live.replicas == 1


def test_numbers_that_nobody_else_sets_are_named() -> None:
    objects = chart.render(ENVIRONMENT | {"web": {"enabled": True}, "trainer": {"nodes": 1}})
    named = {
        found["metadata"]["name"]: found["spec"].get("replicas") for found in chart.of_kind(objects, "Deployment", "StatefulSet")
    }
    unset = {name for name, replicas in named.items() if replicas is None}
    assert unset == {"demo-generator", "demo-trainer", "demo-environment"}
    values = {"scaler": {"enabled": False}, "trainer": {"nodes": 2}, "storage": {"runs": {"accessMode": "ReadWriteMany"}}}
    assert chart.named(chart.render(values), "StatefulSet", "demo-trainer")["spec"]["replicas"] == 2
