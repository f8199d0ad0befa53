"""References from the chart's objects to each other, to the services and to commands are valid."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import typer

from services.config import digest, load
from services.console.commands.__main__ import app as grpo
from services.console.commands.__main__ import with_waits
from services.http.api import make_app
from services.http.entry import START_ENV
from services.scaler.__main__ import ScalerSettings
from tests.kubernetes.support import chart

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

OTHERS = {
    "HOME": "every library that keeps a cache",
    "TOKENIZERS_PARALLELISM": "tokenizers",
    "HF_HUB_OFFLINE": "huggingface_hub", "HF_HOME": "huggingface_hub", "HF_TOKEN": "huggingface_hub",
    "OMP_NUM_THREADS": "torch",
    "NCCL_SOCKET_IFNAME": "NCCL", "NCCL_IB_HCA": "NCCL", "NCCL_DEBUG": "NCCL", "GLOO_SOCKET_IFNAME": "gloo",
    "WANDB_API_KEY": "W&B", "WANDB_MODE": "W&B",
    "USER": "torch", "VLLM_NO_USAGE_STATS": "vLLM",
}  # fmt: skip
"""Variables read by libraries, with the library."""

GIVEN = {
    "prompts",
    "reward-keys",
    "huggingface",
    "wandb",
    "redis-login",
    "redis-users",
    "redis-ca",
    "bucket-read",
    "bucket-write",
    "demo-api-tls",
    "demo-redis-tls",
}
"""Objects that the examples expect to exist, and those created by cert-manager."""


DOCUMENTED = ("A Python function", "A service", "A model as judge", "Environments", "Sandboxes")
"""Headings of docs/kubernetes.md with values."""
TLS = {"web": {"enabled": True}, "tls": {"issuer": {"name": "ours"}}, "generator": {"autoscaling": {"kind": "keda"}}}
RELEASES = pytest.mark.parametrize(
    "objects", ["default", "tls", *DOCUMENTED, *(path.stem for path in chart.EXAMPLES)], indirect=True
)


@pytest.fixture
def objects(request: pytest.FixtureRequest) -> list[chart.Object]:
    """Return the release of a name in `RELEASES`."""
    match request.param:
        case "default":
            return chart.render()
        case "tls":
            return chart.render(TLS)
        case "Sandboxes":
            return chart.render({**chart.documented("Environments"), **chart.documented("Sandboxes")})
        case heading if heading in DOCUMENTED:
            return chart.render(chart.documented(heading))
        case name:
            return chart.render(chart.example(name), bare=True)


@RELEASES
def test_selectors_match_exactly_their_own_pods(objects: list[chart.Object]) -> None:
    templates = {label: template["metadata"]["labels"] for label, template in chart.pods(objects)}
    for found in chart.of_kind(objects, "Deployment", "StatefulSet", "Service", "PodDisruptionBudget"):
        selector = found["spec"]["selector"]
        labels = selector if found["kind"] == "Service" else selector["matchLabels"]
        assert labels["app.kubernetes.io/instance"] == "demo", found["metadata"]
        chosen = [label for label, has in templates.items() if labels.items() <= has.items()]
        assert len(chosen) == 1, f"{found['kind']}/{found['metadata']['name']} matches {chosen}"
        if found["kind"] in chart.WORKLOADS:
            assert chosen == [f"{found['kind']}/{found['metadata']['name']}"]
    for found in chart.of_kind(objects, "NetworkPolicy"):
        assert found["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"


@pytest.mark.parametrize("name", ["laptop", "four-nodes"])
def test_two_releases_in_one_namespace_share_nothing(name: str) -> None:
    first, second = (chart.render(chart.example(name), name=release) for release in ("one", "two"))
    of_first, of_second = ({(found["kind"], found["metadata"]["name"]) for found in objects} for objects in (first, second))
    assert not of_first & of_second
    assert "one-" not in chart.as_text(second)
    assert '"two"' not in chart.as_text(first)


@RELEASES
def test_every_reference_resolves(objects: list[chart.Object]) -> None:
    there = {(found["kind"], found["metadata"]["name"]): found for found in objects}
    for found in chart.of_kind(objects, "StatefulSet", "Deployment"):
        if found["kind"] == "StatefulSet":
            assert ("Service", found["spec"]["serviceName"]) in there
    for label, template in chart.pods(objects):
        spec = template["spec"]
        if "serviceAccountName" in spec:
            assert ("ServiceAccount", spec["serviceAccountName"]) in there, label
        for kind, name, keys in references(spec):
            if name in GIVEN:
                continue
            assert (kind, name) in there, f"{label} refers to {kind}/{name}"
            assert set(keys) <= set(there[kind, name].get("data", keys)), f"{label}: keys of {kind}/{name}"
        owner = there[tuple(label.split("/", 1))]  # type: ignore[index]
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec.get("volumes", [])} | claims
        for container in chart.containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, label
    for found in chart.of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler"):
        target = found["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in there
    for found in chart.of_kind(objects, "RoleBinding"):
        assert ("Role", found["roleRef"]["name"]) in there
        assert all((subject["kind"], subject["name"]) in there for subject in found["subjects"])


def references(spec: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the ConfigMaps, Secrets and claims that a pod refers to, with the keys that it needs."""
    for volume in spec.get("volumes", []):
        if volume.get("configMap", {}).get("optional"):
            continue
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], []
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], []
        for source in volume.get("projected", {}).get("sources", [volume]):
            if "secret" in source:
                secret = source["secret"]
                yield "Secret", secret.get("name") or secret["secretName"], [item["key"] for item in secret["items"]]
    for container in spec["containers"]:
        for entry in container.get("env", []):
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", reference["name"], [reference["key"]]
        for entry in container.get("envFrom", []):
            yield "Secret", entry["secretRef"]["name"], []


@RELEASES
def test_ports_are_served_and_probe_paths_are_routes(objects: list[chart.Object]) -> None:
    service: Any = MagicMock(kind="generator")
    routes = {route.path for route in make_app(service, "token").routes}  # type: ignore[attr-defined]
    templates = dict(chart.pods(objects))
    config = next(found for found in objects if found["metadata"]["name"] == "demo-config")["data"]["config.toml"]
    for template in templates.values():
        for container in chart.containers(template):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            if "api" in ports:
                assert f'"port" = {ports["api"]}' in config
            for probe in (container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container):
                if "httpGet" in probe:
                    assert probe["httpGet"]["port"] in ports
                    if "api" not in ports:  # vLLM's own server
                        continue
                    assert (probe["httpGet"].get("scheme") == "HTTPS") == ("certificate_file" in config)
                    assert probe["httpGet"]["path"] in routes
    for found in chart.of_kind(objects, "Service"):
        chosen = [each for each in templates.values() if found["spec"]["selector"].items() <= each["metadata"]["labels"].items()]
        for port in found["spec"]["ports"]:
            for template in chosen:
                assert port["targetPort"] in {each["name"] for each in template["spec"]["containers"][0]["ports"]}


@RELEASES
def test_every_variable_is_read_by_some_code(objects: list[chart.Object]) -> None:
    code = "\n".join(path.read_text() for path in (chart.ROOT / "services").rglob("*.py"))
    read = set(re.findall(r'"((?:AGENT|GRPO|MASTER)_[A-Z_]+)"', code))
    for label, template in chart.pods(objects):
        for container in chart.containers(template):
            names = [entry["name"] for entry in container.get("env", [])]
            assert len(names) == len(set(names)), f"{label} sets a variable twice"
            assert set(names) <= read | OTHERS.keys(), label


@RELEASES
def test_every_command_exists(objects: list[chart.Object]) -> None:
    verbs = typer.main.get_command(grpo).commands  # type: ignore[attr-defined]
    for template in dict(chart.pods(objects)).values():
        for container in chart.containers(template):
            lines = [container["command"], hook(container)]
            if container["command"][:2] == ["sh", "-c"] and "grpo" in container["command"][2]:
                lines += [line.removeprefix("exec ").split() for line in container["command"][2].split(" && ")]
            for command in lines:
                words = command[2:] if command[:1] == ["timeout"] else command
                if words[:2] == ["python", "-m"]:
                    assert runs_as_module(words[2]), words
                elif words[:1] == ["grpo"]:
                    context = verbs[words[1]].make_context(words[1], with_waits(words[2:]))  # raises for unknown options
                    assert context is not None
                elif words:
                    assert words[0] == "sh"


def runs_as_module(name: str) -> bool:
    """Return whether `python -m name` finds a module, without importing it: importing vLLM takes many seconds."""
    package, *below = name.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    place = Path(next(iter(found.submodule_search_locations))).joinpath(*below)
    return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


def hook(container: dict[str, Any]) -> list[str]:
    return container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])


@RELEASES
def test_pods_have_minimal_rights(objects: list[chart.Object]) -> None:
    for label, template in chart.pods(objects):
        spec = template["spec"]
        sandboxed = "AGENT_SANDBOX_POOL" in str(spec) and label == "Deployment/demo-environment"
        calls_the_api = label == "Deployment/demo-scaler" or sandboxed
        assert spec["automountServiceAccountToken"] == calls_the_api, label
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in chart.containers(template):
            given = container["securityContext"]
            assert given["readOnlyRootFilesystem"]
            assert not given["allowPrivilegeEscalation"]
            assert given["capabilities"]["drop"] == ["ALL"]
            assert set(given["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert "memory" in container["resources"]["limits"], label
            if container["name"] not in ("model", "check", "redis"):
                assert {"mountPath": "/tmp", "name": "tmp"} in container["volumeMounts"]


@RELEASES
def test_services_do_not_run_as_pid_1(objects: list[chart.Object]) -> None:
    """PID 1 ignores a SIGTERM that comes before its handler."""
    services = [
        (label, template)
        for label, template in chart.pods(objects)
        if any(
            container["command"][:2] == ["python", "-m"] and "readinessProbe" in container
            for container in chart.containers(template)
        )
    ]
    assert services
    for label, template in services:
        assert template["spec"]["shareProcessNamespace"], label


def test_the_role_allows_exactly_the_calls_made() -> None:
    """The calls are those in tests/kubernetes/test_scaler.py and test_pods.py."""
    deployment, stateful_set, leader_worker_set = (
        {"apiGroups": [group], "resources": [f"{kind}/scale"], "resourceNames": [name], "verbs": ["get", "patch"]}
        for group, kind, name in (
            ("apps", "deployments", "demo-generator"), ("apps", "statefulsets", "demo-trainer"),
            ("leaderworkerset.x-k8s.io", "leaderworkersets", "demo-trainer"),
        )
    )  # fmt: skip
    notes = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["demo-scaler"], "verbs": ["get", "patch"]}
    for values, rules, settings in (
        ({"generator": {"replicas": 3}}, [deployment, stateful_set, notes], ScalerSettings("demo-generator", 3, "demo-trainer")),
        (
            {"generator": {"autoscaling": {"kind": "keda"}}, "onFinish": "keep"},
            [stateful_set, notes], ScalerSettings("", 1, "demo-trainer", keep=True),
        ),
        (
            {"trainer": {"kind": "LeaderWorkerSet", "nodes": 4}, "storage": {"runs": {"accessMode": "ReadWriteMany"}}},
            [deployment, leader_worker_set, notes], ScalerSettings("demo-generator", 1, "demo-trainer", "LeaderWorkerSet"),
        ),
        (
            {"trainer": {"nodes": 4}, "storage": {"runs": {"accessMode": "ReadWriteMany"}}},
            [deployment, stateful_set, notes],
            ScalerSettings("demo-generator", 1, "demo-trainer", trainer_replicas=4),
        ),
    ):  # fmt: skip
        objects = chart.render(values)
        (role,) = chart.of_kind(objects, "Role")
        assert role["rules"] == rules
        (egress,) = chart.named(objects, "NetworkPolicy", "demo-scaler")["spec"]["egress"]
        assert {"port": 443} in egress["ports"], "the cluster's API"
        (container,) = chart.named(objects, "Deployment", "demo-scaler")["spec"]["template"]["spec"]["containers"]
        environ = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        assert ScalerSettings.from_environment(environ) == msgspec.structs.replace(settings, notes="demo-scaler")
        assert "data" not in chart.named(objects, "ConfigMap", "demo-scaler"), "an upgrade keeps the notes"
    assert not chart.of_kind(chart.render({"scaler": {"enabled": False}}), "Role")


def test_pods_stop_waiting_for_redis_before_the_startup_probe() -> None:
    objects = chart.render({"web": {"enabled": True}, "generator": {"startupSeconds": 100}})
    patience: dict[str, float] = {}
    for label, template in chart.pods(objects):
        for container in template["spec"]["containers"]:
            limit = [float(entry["value"]) for entry in container.get("env", []) if entry["name"] == START_ENV]
            if "api" in {port["name"] for port in container.get("ports", [])}:
                probe = container["startupProbe"]
                patience[label] = limit[0]
                assert 60 < limit[0] < probe["periodSeconds"] * probe["failureThreshold"], label
    assert patience["Deployment/demo-generator"] == 85


def test_the_control_api_has_a_service_with_or_without_the_page() -> None:
    for values in ({}, {"web": {"enabled": True}}):
        objects = chart.render(values)
        service = chart.named(objects, "Service", "demo-api")["spec"]
        chosen = [label for label, pod in chart.pods(objects) if service["selector"].items() <= pod["metadata"]["labels"].items()]
        assert chosen == ["Deployment/demo-dataprep"]
        assert "service/demo-api" in chart.notes(values)


def test_gpus_and_network_of_several_nodes() -> None:
    objects = chart.render(chart.example("four-nodes"))
    (generator,) = chart.named(objects, "Deployment", "demo-generator")["spec"]["template"]["spec"]["containers"]
    trainer = chart.named(objects, "StatefulSet", "demo-trainer")
    (rank,) = trainer["spec"]["template"]["spec"]["containers"]
    assert generator["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert rank["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert trainer["spec"]["podManagementPolicy"] == "Parallel"
    environ = {entry["name"]: entry.get("value") for entry in rank["env"]}
    assert environ["GRPO_NODES"] == "2"
    assert environ["MASTER_ADDR"] == "demo-trainer-0.demo-trainer.ml.svc.cluster.local"
    assert environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert chart.named(objects, "Service", "demo-trainer")["spec"]["publishNotReadyAddresses"]


def test_all_images_are_built() -> None:
    built = {path.name.removesuffix(".Dockerfile") for path in (chart.ROOT / "docker").glob("*.Dockerfile")}
    used: set[str] = set()
    for path in [None, *chart.EXAMPLES]:
        for _, template in chart.pods(chart.render(chart.parse(Path(path).read_text()) if path else {})):
            for container in chart.containers(template):
                if found := re.search(r"/grpo-([a-z]+):", container["image"]):
                    used.add(found[1])
    assert used == built


def test_a_run_can_span_two_clusters(tmp_path: Path) -> None:
    """The second cluster has only generators, with the run's configuration, and reaches nothing in the first one except Redis."""
    digests = set[str]()
    for name in ("two-clusters-run", "two-clusters-generators"):
        objects = chart.render(chart.example(name), name=name, bare=True)
        (tmp_path / "config.toml").write_text(chart.named(objects, "ConfigMap", f"{name}-config")["data"]["config.toml"])
        config = load(tmp_path / "config.toml", environ={})
        digests.add(digest(config))
        assert (config.run.name, config.redis.url) == ("atlas", "rediss://redis.example.com:6380/0")
    assert len(digests) == 1
    assert [label for label, _ in chart.pods(objects)] == [
        "Job/two-clusters-generators-check",
        "Deployment/two-clusters-generators-generator",
    ]
    assert not chart.of_kind(objects, "PersistentVolumeClaim", "Role", "Service", "StatefulSet")
    assert "kubectl -n default scale deployment/demo-generator" in chart.notes(chart.example("two-clusters-generators"))


def test_leader_worker_set_pods_know_their_rank_and_devices() -> None:
    objects = chart.render(chart.example("eight-and-sixteen"), bare=True)
    trainer = chart.named(objects, "LeaderWorkerSet", "demo-trainer")
    assert trainer["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    template = trainer["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"], "Kueue adds it"
    (rank,) = [container for container in template["spec"]["containers"] if container["name"] == "trainer"]
    environ = {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in rank["env"]}
    place = environ["GRPO_NODE"]["fieldRef"]["fieldPath"]
    assert place == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert environ["MASTER_ADDR"] == "demo-trainer-0.demo-trainer.ml.svc.cluster.local", "the leader, in the shared subdomain"
    assert rank["resources"]["claims"] == [{"name": "devices"}]
    assert "nvidia.com/gpu" not in rank["resources"]["limits"]
    (claim,) = template["spec"]["resourceClaims"]
    devices = chart.named(objects, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])["spec"]["spec"]["devices"]
    assert [request["name"] for request in devices["requests"]] == [f"{kind}-{i}" for i in range(8) for kind in ("gpu", "nic")]
    assert [constraint["requests"] for constraint in devices["constraints"]] == [[f"gpu-{i}", f"nic-{i}"] for i in range(8)]
