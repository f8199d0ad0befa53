"""Upgrades keep live Secrets: Helm renders against an API with those of an earlier revision. Missing kinds are rejected."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from services.store.acl import GRANTS
from tests.kubernetes.support import chart
from tests.kubernetes.support.cluster_api import ClusterApi

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

from helm_python import HelmError

KEPT = {"api-token": "the token of before", "api-read-token": "the one to look with", "redis-password": "the password of before"}

USERS = {"generator": "that of the generators", "trainer": "that of the only trainer"}
"""Those of an earlier version, which had no others."""


@pytest.fixture
def server() -> Iterator[ClusterApi]:
    """Yield a namespace with the Secrets of an earlier revision."""
    objects = chart.render()
    own = {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "ml"}
    secrets = [
        {
            **chart.named(objects, "Secret", name),
            "data": {key: base64.b64encode(value.encode()).decode() for key, value in kept.items()},
        }
        for name, kept in (("demo-auth", KEPT), ("demo-redis-users", USERS))
    ]
    made = ClusterApi(objects)
    for found in secrets:
        made.place({**found, "metadata": {**found["metadata"], "annotations": own}})
    yield made
    made.close()


def rendered(server: ClusterApi, values: dict[str, Any]) -> list[chart.Object]:
    """Return the objects that Helm would apply."""
    from helm_python.config import Config

    with Config(kubeconfig_content=server.kubeconfig(), namespace="ml") as helm:
        release = helm.install(str(chart.CHART), "demo", chart.completed(values), namespace="ml", dry_run="server")
    return chart.parse_all(release["manifest"])


def test_existing_secrets_are_kept(server: ClusterApi) -> None:
    objects = rendered(server, {})
    held = chart.named(objects, "Secret", "demo-auth")["data"]
    assert {key: base64.b64decode(value).decode() for key, value in held.items()} == KEPT
    users = chart.named(objects, "Secret", "demo-redis-users")["data"]
    found = {key: base64.b64decode(value).decode() for key, value in users.items()}
    assert found.items() > USERS.items()
    assert found.keys() == GRANTS.keys()
    assert all(len(password) > 20 for password in found.values())


def test_secrets_from_elsewhere_are_not_created(server: ClusterApi) -> None:
    objects = rendered(server, {"auth": {"existingSecret": "mine"}, "redis": {"usersSecret": "theirs"}})
    assert not chart.of_kind(objects, "Secret")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"monitoring": {"podMonitor": True}}, "needs the Prometheus operator, but this cluster has no kind PodMonitor"),
        ({"tls": {"issuer": {"name": "ours"}}}, "needs cert-manager, but this cluster has no kind Certificate"),
        ({"monitoring": {"rules": True}}, "needs the Prometheus operator, but this cluster has no kind PrometheusRule"),
        ({"generator": {"autoscaling": {"kind": "keda"}}}, "needs KEDA, but this cluster has no kind ScaledObject"),
        ({"trainer": {"kind": "LeaderWorkerSet"}}, "but this cluster has no kind LeaderWorkerSet: install it first"),
        ({"kueue": {"queue": "gpus"}}, "needs Kueue, but this cluster has no kind LocalQueue"),
        ({"devices": {"kind": "claim"}}, "needs Kubernetes 1.34, but this cluster has no kind ResourceClaimTemplate"),
        ({"trainer": {"gang": "kubernetes"}}, "needs its scheduler, but this cluster has no kind PodGroup"),
        (
            {
                "web": {"enabled": True, "route": {"enabled": True, "parentRefs": [{"name": "public"}]}},
                "networkPolicy": {"apiFrom": [{"podSelector": {}}]},
            },
            "needs the Gateway API, but this cluster has no kind HTTPRoute",
        ),
    ],
)  # fmt: skip
def test_a_kind_missing_from_the_cluster_is_rejected(server: ClusterApi, values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        rendered(server, values)
    assert message in str(refusal.value)
    assert chart.render(values), "without a cluster no kind is known to be missing"
