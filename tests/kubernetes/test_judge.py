"""The judge in a release: the scaler may set its replicas, and Prometheus reads its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from services.scaler.__main__ import ScalerSettings
from tests.kubernetes.support import chart

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

JUDGE = {"judge": {"enabled": True, "model": "a/b", "replicas": 3}}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


@pytest.mark.parametrize(
    ("values", "deployments", "settings"),
    [
        ({}, ["demo-generator", "demo-judge"],
         ScalerSettings("demo-generator", 1, "demo-trainer", judge="demo-judge", judge_replicas=3, notes="demo-scaler")),
        ({"generator": {"autoscaling": {"kind": "keda"}}}, ["demo-judge"],
         ScalerSettings("", 1, "demo-trainer", judge="demo-judge", judge_replicas=3, notes="demo-scaler")),
    ],
)  # fmt: skip
def test_the_scaler_may_set_its_replicas(values: dict[str, Any], deployments: list[str], settings: ScalerSettings) -> None:
    objects = chart.render({**JUDGE, **values})
    rule = chart.named(objects, "Role", "demo-scaler")["rules"][0]
    assert rule == {
        "apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": deployments, "verbs": ["get", "patch"],
    }  # fmt: skip
    (container,) = chart.named(objects, "Deployment", "demo-scaler")["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert ScalerSettings.from_environment(environ) == settings


def scraped(objects: list[chart.Object]) -> dict[str, set[str]]:
    """Return the pods that Prometheus scrapes, with the names of the ports."""
    spec = chart.named(objects, "PodMonitor", "demo-services")["spec"]
    ports = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    pods = {
        label: ports & {port["name"] for container in chart.containers(pod) for port in container.get("ports", [])}
        for label, pod in chart.pods(objects)
        if spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    }
    return {label: named for label, named in pods.items() if named}


def test_its_metrics_are_scraped_on_its_own_port_without_tls() -> None:
    monitored = {"monitoring": {"podMonitor": True}, "tls": {"apiSecret": "api"}, "networkPolicy": {"apiFrom": [PROMETHEUS]}}
    objects = chart.render({**JUDGE, **monitored})
    found = scraped(objects)
    assert found.pop("Deployment/demo-judge") == {"http"}
    assert set(map(tuple, found.values())) == {("api",)}
    by_port = {each["port"]: each for each in chart.named(objects, "PodMonitor", "demo-services")["spec"]["podMetricsEndpoints"]}
    assert (by_port["api"]["scheme"], by_port["http"].get("scheme")) == ("https", None)
    (ingress,) = chart.named(objects, "NetworkPolicy", "demo-judge")["spec"]["ingress"]
    assert PROMETHEUS in ingress["from"]
    without = chart.render(monitored)
    assert {port for ports in scraped(without).values() for port in ports} == {"api"}
    unread = chart.render({**JUDGE, "networkPolicy": {"apiFrom": [PROMETHEUS]}})
    (ingress,) = chart.named(unread, "NetworkPolicy", "demo-judge")["spec"]["ingress"]
    assert PROMETHEUS not in ingress["from"], "clients that read no metrics have no access"
