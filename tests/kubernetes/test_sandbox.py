"""Sandboxes as the chart creates them: the values in docs/kubernetes.md, rendered and used by the service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.environment.code_tool.sandboxed import SandboxTool
from services.sandbox.__main__ import SandboxSettings
from services.sandbox.execution import CONTAINER
from tests.kubernetes.support import chart
from tests.kubernetes.test_environments import VALUES, chosen, template
from tests.sandbox import worlds

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

SANDBOXED = {**VALUES, **chart.documented("Sandboxes")}
HERE = chart.changed(SANDBOXED, "sandbox.namespace", "")


def made_from(objects: list[chart.Object]) -> chart.Object:
    return chart.named(objects, "PodTemplate", "demo-sandbox")


def settings(objects: list[chart.Object]) -> SandboxSettings:
    (container,) = template(objects, "sandbox")["spec"]["containers"]
    return SandboxSettings.from_environment({each["name"]: each["value"] for each in container["env"] if "value" in each})


async def test_the_role_allows_exactly_the_calls_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = chart.render(HERE)
    monkeypatch.setattr(worlds, "TEMPLATE", made_from(objects))
    given = settings(objects)
    assert given == SandboxSettings("demo-sandbox", "ml", "demo", 8)
    monkeypatch.setattr(worlds, "SETTINGS", replace(given, namespace=""))
    async with worlds.sandboxes(tmp_path, warm=1) as place:
        await worlds.warmed(place, 1)
        tool: SandboxTool = place.tool()
        assert await tool.call({"code": "1 + 1"}) == "2"
        await tool.close()
        await worlds.swept(place)
        calls = set(place.cluster.calls)
    rules = chart.named(objects, "Role", "demo-sandbox")["rules"]
    assert calls == {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert [rule["resourceNames"] for rule in rules if rule["resources"] == ["podtemplates"]] == [["demo-sandbox"]]


def test_a_sandbox_has_no_rights_and_no_network() -> None:
    objects = chart.render(SANDBOXED)
    found = made_from(objects)["template"]
    spec, labels = found["spec"], found["metadata"]["labels"]
    (container,) = spec["containers"]
    assert container["name"] == CONTAINER
    assert not spec["automountServiceAccountToken"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    given = container["securityContext"]
    assert (given["readOnlyRootFilesystem"], given["allowPrivilegeEscalation"]) == (True, False)
    assert given["capabilities"] == {"drop": ["ALL"]}
    assert (spec["restartPolicy"], spec["runtimeClassName"], spec["activeDeadlineSeconds"]) == ("Never", "gvisor", 14400)
    assert {"memory", "cpu"} <= container["resources"]["limits"].keys()
    homes = [each["value"] for each in container["env"] if each["name"] == "HOME"]
    assert homes == [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "sandbox"]
    assert not any("projected" in volume or "secret" in volume or "configMap" in volume for volume in spec["volumes"])
    assert settings(objects).labels.items() <= labels.items()
    policies = [policy for policy in chart.of_kind(objects, "NetworkPolicy") if chosen(policy, labels)]
    assert [policy["metadata"]["name"] for policy in policies] == ["demo-sandboxes"]
    assert policies[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & policies[0]["spec"].keys()
    open_network = chart.render(chart.changed(SANDBOXED, "networkPolicy.enabled", False))
    assert chart.of_kind(open_network, "NetworkPolicy") == policies, "code written by the policy never has network access"


def test_environments_reach_the_service_and_it_reaches_the_cluster() -> None:
    objects = chart.render(SANDBOXED)
    for name in ("environment", "dataprep"):
        (container,) = template(objects, name)["spec"]["containers"]
        assert {"name": "GRPO_SANDBOX_URL", "value": "http://demo-sandbox.ml.svc.cluster.local:8080"} in container["env"]
    assert "GRPO_SANDBOX_URL" not in chart.as_text([template(objects, "generator")])
    service = chart.named(objects, "Service", "demo-sandbox")["spec"]
    labels = template(objects, "sandbox")["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    environment = chart.named(objects, "NetworkPolicy", "demo-environment")["spec"]["egress"]
    reached = [peer["podSelector"]["matchLabels"] for rule in environment for peer in rule.get("to", [])]
    assert any(each.items() <= labels.items() for each in reached)
    (egress,) = chart.named(objects, "NetworkPolicy", "demo-sandbox")["spec"]["egress"]
    assert {"port": 443} in egress["ports"], "the cluster's API"
    secure = chart.render({**SANDBOXED, "tls": {"issuer": {"name": "ours"}}})
    assert "https://demo-sandbox.ml.svc" in chart.as_text([template(secure, "environment")])


def test_objects_of_sandboxes_are_in_their_namespace() -> None:
    objects = chart.render(SANDBOXED)
    elsewhere = {(found["kind"], found["metadata"]["name"]) for found in objects if found["metadata"]["namespace"] == "sandboxes"}
    own = {(kind, "demo-sandbox") for kind in ("Role", "RoleBinding", "PodTemplate")}
    assert elsewhere == own | {("NetworkPolicy", "demo-sandboxes")}
    assert settings(objects).namespace == "sandboxes"
    (subject,) = chart.named(objects, "RoleBinding", "demo-sandbox")["subjects"]
    assert subject["namespace"] == "ml"
    assert not [found for found in chart.render(VALUES) if found["metadata"]["name"].startswith("demo-sandbox")]
