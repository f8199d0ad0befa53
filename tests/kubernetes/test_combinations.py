"""Values that are legal one by one, and together once rendered objects that a cluster refuses or that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.support import chart
from tests.kubernetes.support.chart import changed, named, render

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

TOOLS = {
    "config": {
        "data": {"sources": [{"kind": "reasoning_gym", "task": "basic_arithmetic", "environment": "shop"}]},
        "environments": [{"name": "shop", "kind": "mcp", "server": "http://tools:8000/mcp", "token": "env:TOKEN"}],
    },
    "environment": {"egress": [{"ports": [{"port": 8000}]}], "secretName": "keys", "internet": True},
}
EXTERNAL: dict[str, Any] = {"redis": {"enabled": False}, "generator": {"autoscaling": {"kind": "keda"}}}


def egress_ports(objects: list[chart.Object], component: str) -> set[int]:
    """Return the ports to which the policies let a component connect."""
    ports = set[int]()
    for policy in chart.of_kind(objects, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        labels = selector.get("matchLabels", {}).get("app.kubernetes.io/component")
        listed = [found["values"] for found in selector.get("matchExpressions", []) if "component" in found["key"]]
        if labels == component or any(component in values for values in listed):
            ports |= {port["port"] for rule in policy["spec"].get("egress", []) for port in rule.get("ports", [])}
    return ports


def test_a_judge_can_claim_its_devices() -> None:
    values = {"judge": {"enabled": True, "model": "a/b", "gpus": 2}, "accelerator": "nvidia", "devices": {"kind": "claim"}}
    objects = render(values)
    spec = named(objects, "Deployment", "demo-judge")["spec"]["template"]["spec"]
    (claim,) = spec["resourceClaims"]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
    template = named(objects, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    assert len(template["spec"]["spec"]["devices"]["requests"]) == 2


def test_a_variable_of_the_values_replaces_the_charts_own() -> None:
    given = {"HF_HOME": "/cache", "OMP_NUM_THREADS": "7", "HOME": "/home"}
    values: dict[str, Any] = {
        "podDefaults": {"env": given, "extraEnv": [{"name": "HOME", "value": "/last"}]},
        "accelerator": "none",
        "config": {"model": {"path": "/srv/grpo/models/a"}},
        "interconnect": {"interface": "eth1", "env": {"NCCL_SOCKET_IFNAME": "eth0"}},
        "judge": {"enabled": True, "model": "a/b"},
        "preload": {"enabled": True, "repository": "a/b"},
        "storage": {"models": {"enabled": True}},
    }
    seen = set[str]()
    for label, pod in chart.pods(render(values)):
        for container in pod["spec"]["containers"]:
            environ = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
            assert len(environ) == len(container.get("env", [])), label
            if "HF_HOME" in environ:
                seen.add(label)
                assert environ.items() >= (given | {"HOME": "/last"}).items(), label
            assert environ.get("NCCL_SOCKET_IFNAME", "eth1") == "eth1"
    assert {"Deployment/demo-generator", "StatefulSet/demo-trainer", "Deployment/demo-judge", "Pod/demo-smoke"} <= seen


@pytest.mark.parametrize(
    ("url", "cluster", "address", "index"),
    [
        ("redis://h/3", False, "h:6379", "3"),
        ("redis://h:7000", False, "h:7000", None),
        ("rediss://h:7000/12", False, "h:7000", "12"),
        ("redis://h", True, "h:6379", None),
        ("redis://h/0", True, "h:6379", None),
    ],
)
def test_keda_watches_the_database_of_the_run(url: str, cluster: bool, address: str, index: str | None) -> None:
    objects = render(changed(EXTERNAL, "redis.external", {"url": url, "cluster": cluster}))
    (trigger,) = named(objects, "ScaledObject", "demo-generator")["spec"]["triggers"]
    metadata = trigger["metadata"]
    assert (metadata["addresses" if cluster else "address"], metadata.get("databaseIndex")) == (address, index)


def test_the_smoke_test_reaches_the_tools_of_environments() -> None:
    objects = render(TOOLS)
    assert 8000 in egress_ports(objects, "smoke")
    (container,) = named(objects, "Pod", "demo-smoke")["spec"]["containers"]
    assert {"secretRef": {"name": "keys"}} in container["envFrom"]


def test_further_ports_can_be_allowed() -> None:
    policy = {"apiServerPorts": [8443], "egress": [{"ports": [{"port": 9000}]}]}
    objects = render({"networkPolicy": policy, **TOOLS, "sandbox": {"warmPool": "python"}})
    for component in ("trainer", "generator", "dataprep"):
        assert 9000 in egress_ports(objects, component)
    assert 9000 not in egress_ports(objects, "environment"), "it runs third-party code"
    assert {8443} <= egress_ports(objects, "scaler")
    assert {8443, 8888} <= egress_ports(objects, "environment")
    assert 6443 not in egress_ports(objects, "scaler")
    assert {443, 6443} <= egress_ports(render(), "scaler")


def test_a_large_redis_is_configured_in_plain_digits() -> None:
    text = named(render({"redis": {"maxMemoryMiB": 1048576}}), "ConfigMap", "demo-redis")["data"]["redis.conf"]
    assert "maxmemory 1048576mb" in text


def test_names_of_digits_are_texts() -> None:
    values = {
        "auth": {"existingSecret": "123"},
        "hub": {"tokenSecret": "1e3"},
        "redis": {"usersSecret": "456"},
        "storage": {"models": {"enabled": True, "existingClaim": "7"}, "runs": {"existingClaim": "20240101"}},
        "tls": {"apiSecret": "12", "redisSecret": "789"},
    }
    objects = render(values)

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("name", "secretName", "claimName", "key"):
                    assert isinstance(value, str), node
                walk(value)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    for _, pod in chart.pods(objects):
        walk(pod["spec"])
    assert '"20240101"' in chart.as_text(objects)


@pytest.mark.parametrize("name", ["1math", "a.b"])
def test_a_release_name_that_services_cannot_have_is_refused(name: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=f'the release name "{name}" is not a DNS label'):
        render(name=name)


def test_a_volume_for_one_pod_is_refused_if_several_share_it() -> None:
    import helm_python

    values: dict[str, Any] = {"storage": {"runs": {"accessMode": "ReadWriteOncePod"}}, "config": {"samples": {"keep": 0}}}
    assert render(values)
    for shared in ({"web": {"enabled": True, "runs": True}}, {"config": {"tracking": {"tensorboard": True}}}):
        with pytest.raises(helm_python.HelmError, match="ReadWriteOncePod lets one pod mount the volume of the runs"):
            render({**values, **shared})


def test_generators_alone_need_no_ranks() -> None:
    values = chart.example("two-clusters-generators")
    parallel = {**values["config"].get("trainer", {}), "sequence_parallel": 2}
    assert render(changed(values, "config.trainer", parallel))
