"""The life of a release: the real Helm installs, upgrades, rolls back, tests and uninstalls the chart (cluster_api.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.support import chart
from tests.kubernetes.support.cluster_api import ClusterApi

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

from helm_python import HelmError
from helm_python.config import Config

PRELOAD = {
    "preload": {"enabled": True, "repository": "a/b"}, "storage": {"models": {"enabled": True}},
    "config": {"model": {"path": "/srv/grpo/models/b"}},
}  # fmt: skip
LIMIT_S = 60


class Release:
    """The release `demo` in a separate cluster."""

    def __init__(self, api: ClusterApi, helm: Config) -> None:
        self.api, self._helm = api, helm

    def install(self, values: dict[str, Any] | None = None, atomic: bool = False) -> str:
        """Install the release, and return Helm's output."""
        return self._helm.install(
            str(chart.CHART), "demo", chart.completed(values), namespace="ml", timeout=LIMIT_S, rollback_on_failure=atomic
        )["notes"]

    def upgrade(self, values: dict[str, Any] | None = None) -> None:
        self._helm.upgrade(str(chart.CHART), "demo", chart.completed(values), namespace="ml", timeout=LIMIT_S)

    def rollback(self) -> None:
        self._helm.rollback("demo", timeout=LIMIT_S)

    def test(self) -> None:
        self._helm.test("demo", timeout=LIMIT_S)

    def uninstall(self) -> None:
        self._helm.uninstall("demo", timeout=LIMIT_S)

    def tag(self) -> str:
        """Return the tag of the running images."""
        (container,) = self.api.named("Deployment", "demo-generator").tree()["spec"]["template"]["spec"]["containers"]
        return container["image"].rpartition(":")[2]

    def revisions(self) -> dict[str, int]:
        """Return the revision of every object."""
        return {path: held.revision for path, held in self.api.held.items()}


@pytest.fixture
def release() -> Iterator[Release]:
    """Return a cluster without any release, with the kinds that the chart's defaults need."""
    api = ClusterApi(chart.render(PRELOAD))
    with Config(kubeconfig_content=api.kubeconfig(), namespace="ml", storage_driver="memory") as helm:
        yield Release(api, helm)
    api.close()


def test_an_install_creates_the_rendered_objects_without_the_check(release: Release) -> None:
    release.install()
    rendered = {(found["kind"], found["metadata"]["name"]) for found in chart.render()}
    assert rendered - release.api.names() == {("Job", "demo-check"), ("ConfigMap", "demo-check"), ("Pod", "demo-smoke")}
    assert release.api.names() <= rendered


def test_upgrades_and_rollbacks_keep_scaled_replicas(release: Release) -> None:
    release.install({"image": {"tag": "1"}})
    numbers = {("Deployment", "demo-generator"): 6, ("StatefulSet", "demo-trainer"): 0}
    for (kind, name), number in numbers.items():
        release.api.named(kind, name).live.scale("kubectl", number)
    release.upgrade({"image": {"tag": "2"}})
    assert release.tag() == "2-cuda"
    assert {key: release.api.named(*key).live.replicas for key in numbers} == numbers
    release.rollback()
    assert release.tag() == "1-cuda"
    assert {key: release.api.named(*key).live.replicas for key in numbers} == numbers


def test_a_rejected_upgrade_changes_nothing_and_can_be_retried(release: Release) -> None:
    release.install({"image": {"tag": "1"}})
    before = release.revisions()
    release.api.fails = lambda name: name == "demo-check"
    with pytest.raises(HelmError, match="Job/ml/demo-check"):
        release.upgrade({"image": {"tag": "2"}})
    assert release.revisions() == before
    release.api.fails = lambda name: False
    release.upgrade({"image": {"tag": "3"}})
    assert release.tag() == "3-cuda"


@pytest.mark.parametrize("atomic", [False, True])
def test_a_rejected_install_leaves_nothing_and_can_be_retried(release: Release, atomic: bool) -> None:
    release.api.fails = lambda name: name == "demo-check"
    with pytest.raises(HelmError, match="Job/ml/demo-check"):
        release.install(atomic=atomic)
    assert release.api.names() == set()
    release.api.fails = lambda name: False
    if atomic:
        release.install()
    else:
        release.upgrade()  # as `helm upgrade --install` does if the name is taken
    assert ("StatefulSet", "demo-trainer") in release.api.names()


def test_a_changed_preload_replaces_its_job(release: Release) -> None:
    release.install(PRELOAD)
    (before,) = (name for kind, name in release.api.names() if kind == "Job")
    release.upgrade({**PRELOAD, "commonLabels": {"team": "a"}})
    (after,) = (name for kind, name in release.api.names() if kind == "Job")
    assert before != after


def test_immutable_fields_are_rejected_by_the_cluster(release: Release) -> None:
    """The field is the one that the documentation names: the fake cluster is as strict as a real one."""
    release.install()
    with pytest.raises(HelmError, match=r"spec\.volumeClaimTemplates: field is immutable"):
        release.upgrade({"redis": {"size": "1Gi"}})


def test_helm_test_leaves_no_pod(release: Release) -> None:
    release.install()
    before = release.api.names()
    release.test()
    assert release.api.names() == before
    release.api.fails = lambda name: name == "demo-smoke"
    with pytest.raises(HelmError, match="demo-smoke"):
        release.test()
    assert release.api.names() == before


def test_an_uninstall_leaves_only_the_volumes_that_the_notes_name(release: Release) -> None:
    notes = release.install({**PRELOAD, "web": {"enabled": True}})
    named = set(re.findall(r"^  (\S+)$", notes.partition("`helm uninstall` keeps")[2], re.MULTILINE))
    release.uninstall()
    left = {name for kind, name in release.api.names() if kind == "PersistentVolumeClaim"}
    assert release.api.names("PersistentVolumeClaim") == set()
    assert named == left | {"data-demo-redis-0"}, "Redis's volume is created and kept by its StatefulSet"
    release.install(PRELOAD)
