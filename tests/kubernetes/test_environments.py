"""Environment pods: the values in docs/kubernetes.md, rendered, loaded and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import load, load_resolved
from services.environment.programs.cluster_sandbox import NAMESPACE_ENV, POOL_ENV, SandboxTool
from services.environment.programs.pool import ProgramPool
from tests.environment.support.sandbox_cluster import sandbox_cluster
from tests.kubernetes.support import chart

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

VALUES = chart.changed(chart.documented("Environments"), "config.verifiers", [])  # it needs none
MOUNTED = "/srv/grpo/environments"


def template(objects: list[chart.Object], name: str) -> chart.Object:
    return dict(chart.pods(objects))[f"Deployment/demo-{name}"]


async def test_the_class_in_the_values_starts_from_its_mount(tmp_path: Path) -> None:
    objects = chart.render(VALUES)
    for name in ("environment", "dataprep"):
        (container,) = template(objects, name)["spec"]["containers"]
        assert {"name": "environments", "mountPath": MOUNTED, "readOnly": True} in container["volumeMounts"]
        (volume,) = [volume for volume in template(objects, name)["spec"]["volumes"] if volume["name"] == "environments"]
    for name, text in chart.named(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
        (tmp_path / name).write_text(text)
    config = chart.named(objects, "ConfigMap", "demo-config")["data"]["config.toml"]
    (tmp_path / "config.toml").write_text(config.replace(MOUNTED, str(tmp_path)))
    pool = ProgramPool(load_resolved(tmp_path / "config.toml").environments[0])
    await pool.start()
    await pool.close()


def test_pods_are_rolled_when_a_file_changes() -> None:
    other = chart.changed(VALUES, "environment.files", {"calculator.py": "class Calculator:\n    pass\n"})
    for name in ("environment", "dataprep"):
        before, after = (
            template(chart.render(values), name)["metadata"]["annotations"]["checksum/environments"] for values in (VALUES, other)
        )
        assert before != after
    assert "checksum/environments" not in template(chart.render(VALUES), "generator")["metadata"]["annotations"]


def test_the_pod_has_what_it_needs_and_no_fixed_replicas() -> None:
    values = chart.changed(VALUES, "environment.secretName", "search-key")
    objects = chart.render(chart.changed(values, "rewards.secretName", "reward-key"))
    deployment = chart.named(objects, "Deployment", "demo-environment")
    assert "replicas" not in deployment["spec"], "kubectl scale sets it"
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["python", "-m", "services.environment", "--stay"]
    assert [source["secretRef"]["name"] for source in container["envFrom"]] == ["search-key", "reward-key"]
    (asking,) = template(objects, "dataprep")["spec"]["containers"]
    assert [source["secretRef"]["name"] for source in asking["envFrom"]] == ["search-key"], "for the tools of MCP servers"
    assert not spec["automountServiceAccountToken"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    budget = chart.named(objects, "PodDisruptionBudget", "demo-environment")["spec"]
    assert budget["selector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert "deployment/demo-environment --replicas=2" in chart.notes(VALUES)
    assert not [found for found in chart.render() if found["metadata"]["name"] == "demo-environment"]


@pytest.mark.parametrize(("drain_s", "grace"), [(10.0, 60), (120.5, 141)])
def test_the_pod_has_time_to_drain(drain_s: float, grace: int) -> None:
    objects = chart.render(chart.changed(VALUES, "config.generator.drain_s", drain_s))
    assert template(objects, "environment")["spec"]["terminationGracePeriodSeconds"] == grace


def test_the_pod_reaches_redis_generators_and_listed_egress() -> None:
    own = {"to": [{"podSelector": {"matchLabels": {"app": "sandbox"}}}], "ports": [{"port": 9000}]}
    objects = chart.render(chart.changed(VALUES, "environment.egress", [own]))
    labels = template(objects, "environment")["metadata"]["labels"]
    reached = [rule for found in chart.of_kind(objects, "NetworkPolicy") if chosen(found, labels)
               for rule in found["spec"].get("egress", [])]  # fmt: skip
    dns, generators, redis, sandbox = sorted(reached, key=lambda rule: rule["ports"][0]["port"])[0], *reached[1:]
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    assert generators["ports"] == [{"port": 8080}]
    assert generators["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "generator"
    assert redis["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "redis"
    assert sandbox == own
    asks = chart.named(objects, "NetworkPolicy", "demo-tools")
    assert chosen(asks, template(objects, "dataprep")["metadata"]["labels"]), "dataprep queries MCP servers for their tools"
    assert asks["spec"]["egress"] == [own]
    online = chart.render(chart.changed(VALUES, "environment.internet", True))
    policy = chart.named(online, "NetworkPolicy", "demo-internet")
    assert chosen(policy, labels)
    assert not chosen(chart.named(objects, "NetworkPolicy", "demo-internet"), labels)


async def test_with_sandboxes_the_role_allows_exactly_the_calls_made(tmp_path: Path) -> None:
    objects = chart.render({**VALUES, **chart.documented("Sandboxes")})
    async with sandbox_cluster(tmp_path) as cluster:
        sandboxes = cluster.sandboxes()
        tool = SandboxTool(60.0, sandboxes, 60.0)
        assert await tool.call({"code": "1 + 1"}) == "2"
        await tool.close()
        await sandboxes.close()
    role = chart.named(objects, "Role", "demo-environment")
    allowed = {(verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]}
    assert cluster.calls == allowed
    assert role["metadata"]["namespace"] == "sandboxes"
    binding = chart.named(objects, "RoleBinding", "demo-environment")
    assert binding["metadata"]["namespace"] == "sandboxes"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "demo-environment", "namespace": "ml"}]
    spec = template(objects, "environment")["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("demo-environment", True)
    for name in ("environment", "dataprep"):
        (container,) = template(objects, name)["spec"]["containers"]
        assert {"name": POOL_ENV, "value": "python"} in container["env"]
        assert {"name": NAMESPACE_ENV, "value": "sandboxes"} in container["env"]
    assert not template(objects, "dataprep")["spec"]["automountServiceAccountToken"], "it only names the tool"
    egress = chart.named(objects, "NetworkPolicy", "demo-environment")["spec"]["egress"]
    ports = {port["port"] for rule in egress for port in rule["ports"]}
    assert {443, 8888} <= ports


def test_a_judge_admits_environments_that_score() -> None:
    objects = chart.render({**VALUES, "judge": {"enabled": True, "model": "a/b"}})
    labels = template(objects, "environment")["metadata"]["labels"]
    (ingress,) = chart.named(objects, "NetworkPolicy", "demo-judge")["spec"]["ingress"]
    assert matches(ingress["from"][0]["podSelector"], labels)
    assert chosen(chart.named(objects, "NetworkPolicy", "demo-rewards"), labels)


@pytest.mark.parametrize(
    ("verifiers", "image"),
    [([], "grpo-dataprep:"), ([{"kind": "math"}], "grpo-generator:"), ([{"kind": "python", "function": "m:score"}], "mine:1")],
)
def test_the_image_has_what_the_verifiers_need(verifiers: list[object], image: str) -> None:
    values = chart.changed(chart.changed(VALUES, "config.verifiers", verifiers), "rewards.image", "mine:1")
    (container,) = template(chart.render(values), "environment")["spec"]["containers"]
    assert image in container["image"]


def test_the_configuration_is_valid_for_the_services(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(chart.named(chart.render(VALUES), "ConfigMap", "demo-config")["data"]["config.toml"])
    assert load(tmp_path / "config.toml", environ={}).environments[0].name == "calculator"


def chosen(policy: chart.Object, labels: dict[str, str]) -> bool:
    return matches(policy["spec"]["podSelector"], labels)


def matches(selector: chart.Object, labels: dict[str, str]) -> bool:
    """Return whether a selector matches a pod; `In` is the only expression that the chart uses."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", [])
    )


def test_dataprep_uses_the_image_of_environments() -> None:
    objects = chart.render(chart.changed(VALUES, "environment.image", "mine:2"))
    for name, image in (("environment", "mine:2"), ("dataprep", "mine:2"), ("scaler", "grpo-dataprep:0.2.0")):
        (container,) = template(objects, name)["spec"]["containers"]
        assert container["image"].endswith(image)
