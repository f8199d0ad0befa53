"""Who sets replicas: no manifest sets a number that something else owns, so no upgrade or rollback changes it or fails.

The manifests are the chart's; how a cluster applies them is in field_managers.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes.support import chart
from tests.kubernetes.support.field_managers import FieldConflict, LiveObject

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

ENVIRONMENT = {
    "environment": {"internet": True},
    "storage": {"data": {"existingClaim": "prompts"}},
    "config": {
        "environments": [{"name": "e", "kind": "python", "function": "e:E"}],
        "data": {"sources": [{"kind": "jsonl", "path": "/srv/grpo/data/x.jsonl", "environment": "e"}]},
    },
}
JUDGE = {"judge": {"enabled": True, "model": "a/b", "replicas": 3}}
NODES = {"storage": {"runs": {"accessMode": "ReadWriteMany"}}, "trainer": {"nodes": 2}}
GROUP = {**NODES, "trainer": {"nodes": 2, "kind": "LeaderWorkerSet"}}
ALONE = {"scaler": {"enabled": False}}
OWNERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "scaler": ({}, "Deployment", "demo-generator"),
    "kubectl": (ALONE, "Deployment", "demo-generator"),
    "hpa": (
        {"generator": {"autoscaling": {"kind": "hpa", "metrics": [{"type": "Resource"}]}}}, "Deployment", "demo-generator",
    ),
    "keda": ({"generator": {"autoscaling": {"kind": "keda"}}}, "Deployment", "demo-generator"),
    "scaler, of the trainer": ({"trainer": {"ranksPerNode": 2}}, "StatefulSet", "demo-trainer"),
    "scaler, of a trainer on several nodes": (NODES, "StatefulSet", "demo-trainer"),
    "scaler, of a LeaderWorkerSet": (GROUP, "LeaderWorkerSet", "demo-trainer"),
    "scaler, of the judge": (JUDGE, "Deployment", "demo-judge"),
    "kubectl, of the trainer": (ALONE, "StatefulSet", "demo-trainer"),
    "kubectl, of a LeaderWorkerSet": ({**GROUP, **ALONE}, "LeaderWorkerSet", "demo-trainer"),
    "kubectl, of environments": (ENVIRONMENT, "Deployment", "demo-environment"),
}  # fmt: skip
"""Who scales what: the values and the object."""

LIVE = 6
Manifest = dict[str, Any]


def manifests(owner: str) -> tuple[Manifest, Manifest]:
    """Return the object as rendered by two revisions of a release."""
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


@pytest.mark.timeout(600)
def test_replicas_set_by_others_are_kept() -> None:
    wrong = list[tuple[str, str, int]]()
    for owner in OWNERS:
        before, after = manifests(owner)
        for change, apply in CHANGES.items():
            live = LiveObject()
            live.apply("argocd-controller" if change == "GitOps" else "helm", before)
            assert live.replicas == 1
            live.scale(owner, LIVE)
            apply(live, before, after)
            if live.replicas != LIVE:
                wrong.append((owner, change, live.replicas))
    assert wrong == []


def test_a_manifest_with_replicas_would_break_the_rules() -> None:
    """This happened on a cluster with an earlier chart: the rollback failed, and GitOps reset the replicas."""
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


def test_a_manifest_that_stops_setting_replicas_resets_them() -> None:
    """It happens only on the upgrade from a chart that set them, if nobody had scaled: the scaler then sets them again."""
    before, after = (copy.deepcopy(manifest) for manifest in manifests("scaler"))
    before["spec"]["replicas"] = 4
    live = LiveObject()
    live.apply("helm", before)
    live.apply("helm", after)
    assert live.replicas == 1


def test_only_replacing_the_object_loses_replicas() -> None:
    before, after = manifests("scaler")
    live = LiveObject()
    live.apply("helm", before)
    live.scale("scaler", LIVE)
    live.replace(after)
    assert live.replicas == 1


OF_THE_VALUES: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "dataprep": ({}, "Deployment", "demo-dataprep", 2),
    "web": ({"web": {"enabled": True}}, "Deployment", "demo-web", 1),
    "judge without the scaler": ({**JUDGE, **ALONE}, "Deployment", "demo-judge", 3),
    "trainer of several nodes without the scaler": ({**NODES, **ALONE}, "StatefulSet", "demo-trainer", 2),
}
"""Replicas that manifests set because only the values set them: values, object and number."""


@pytest.mark.parametrize("of", OF_THE_VALUES)
def test_replicas_from_the_values_conflict_with_manual_scaling(of: str) -> None:
    """docs/kubernetes.md describes it."""
    values, kind, name, number = OF_THE_VALUES[of]
    before, after = (chart.named(chart.render({**values, "image": {"tag": tag}}), kind, name) for tag in ("1", "2"))
    live = LiveObject()
    live.apply("helm", before)
    assert live.replicas == number
    live.scale("kubectl", 0)
    with pytest.raises(FieldConflict, match=r"spec\.replicas"):
        live.apply("helm", after)
    forced, patched = copy.deepcopy(live), copy.deepcopy(live)
    forced.apply("helm", after, force=True)
    patched.patch(before, after)
    assert (forced.replicas, patched.replicas) == (number, number)
    live.scale("kubectl", number)
    live.apply("helm", after)
    live.apply("helm", before)
    assert live.replicas == number


@pytest.mark.parametrize(("before", "after", "number"), [(1, 2, 2), (2, 1, 1)])
def test_a_trainer_without_the_scaler_gets_nodes_from_the_values(before: int, after: int, number: int) -> None:
    live = LiveObject()
    for nodes in (before, after):
        values = {**ALONE, **NODES, "trainer": {"nodes": nodes}}
        live.apply("helm", chart.named(chart.render(values), "StatefulSet", "demo-trainer"))
    assert live.replicas == number


def test_only_replicas_without_another_owner_are_set() -> None:
    objects = chart.render(ENVIRONMENT | JUDGE | {"web": {"enabled": True}, "trainer": {"nodes": 1}})
    named = {
        found["metadata"]["name"]: found["spec"].get("replicas") for found in chart.of_kind(objects, "Deployment", "StatefulSet")
    }
    unset = {name for name, replicas in named.items() if replicas is None}
    assert unset == {"demo-generator", "demo-trainer", "demo-environment", "demo-judge"}
