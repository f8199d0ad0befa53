"""The chart renders with its defaults, with every example and with each value changed, to objects that Kubernetes accepts."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.config import load, load_resolved
from services.store.acl import GRANTS
from tests.kubernetes.support import chart

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")
import kubernetes_validate

VERSIONS = ("1.32", "1.37")
NEWER = {"resource.k8s.io/v1", "scheduling.k8s.io/v1beta1"}
"""APIs missing from the older version, named by the values that need them."""
OPERATORS = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): jsonschema.Draft202012Validator(schema)
    for schema in (json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "support" / "crds").glob("*.json")))
}
"""Kinds of third-party operators, with the schemas of their custom resource definitions."""

VARIES = re.compile(
    r'"(checksum/config|api-token|api-read-token|redis-password|config.toml|' + "|".join(GRANTS) + r')": "(?:[^"\\]|\\.)*"'
)
"""Text that differs from one rendering to the next."""

SCORED = {"config": {"verifiers": [{"kind": "python", "function": "my_reward:score"}]}}
"""A verifier whose function is in an image and may use files."""
CHANGES: list[tuple[str, Any]] = [
    ("accelerator", "none"),
    ("apiPort", 9000),
    ("auth.existingSecret", "mine"),
    ("check.enabled", False),
    ("config.run.name", "another"),
    ("config.tracking.tensorboard", True),
    ("config.generator.drain_s", 2.5),
    ("dataprep.replicas", 1),
    ("generator.replicas", 0),
    ("generator.autoscaling.kind", "keda"),
    ("generator.autoscaling", {"kind": "hpa", "metrics": [{"type": "Resource", "resource": {
        "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}]}),
    ("generator.env", {"VLLM_LOGGING_LEVEL": "DEBUG"}),
    ("generator.affinity", {"nodeAffinity": {}}),
    ("generator.runtimeClassName", "nvidia"),
    ("hub.tokenSecret", "hub"),
    ("image.pullSecrets", [{"name": "login"}]),
    ("interconnect.interface", "eth1"),
    ("interconnect.rdma.resource", "rdma/hca"),
    ("judge", {"enabled": True, "model": "Qwen/Qwen3-8B", "gpus": 2, "args": ["--max-model-len", "8192"]}),
    ("monitoring.podMonitor", True),
    ("monitoring.rules", True),
    ("monitoring.dashboard", True),
    ("networkPolicy.enabled", False),
    ("redis.maxMemoryMiB", 100),
    ("redis.usersSecret", "mine"),
    ("rewards.files", {"my_reward.py": "def score(completion):\n    return len(completion)\n", "words.txt": "ja: \"nein\"\n"}),
    ("rewards.existingConfigMap", "ours"),
    ("rewards.image", "registry.example.com/generator@sha256:0123"),
    ("rewards.secretName", "keys"),
    ("rewards.egress", [{"to": [{"podSelector": {"matchLabels": {"app": "rewards"}}}], "ports": [{"port": 8080}]}]),
    ("scaler.enabled", False),
    ("storage.runs.existingClaim", "runs"),
    ("storage.models.enabled", True),
    ("tls.issuer.name", "ours"),
    ("tls", {"apiSecret": "of-the-pods", "redisSecret": "of-redis"}),
    ("trainer.ranksPerNode", 8),
    ("web.enabled", True),
    ("onFinish", "keep"),
    ("security.user", None),
    ("commonLabels", {"team": "math"}),
    ("serviceAccount.annotations", {"iam.gke.io/gcp-service-account": "a@b"}),
    ("image.digests", {"generator": "sha256:" + 64 * "0"}),
    ("podDefaults", {
        "extraEnv": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "extraEnvFrom": [{"configMapRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "initContainers": [{"name": "first", "image": "busybox", "command": ["true"]}],
        "schedulerName": "volcano", "tmpSize": "2Gi",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "probes": {"readiness": {"failureThreshold": 5}}, "revisionHistoryLimit": 2, "progressDeadlineSeconds": 900,
    }),
    ("devices", {"kind": "claim", "nicClass": "rdma.nvidia.com", "gpuSelectors": ["device.driver == 'gpu.nvidia.com'"]}),
    ("kueue", {"queue": "research", "priorityClass": "high"}),
    ("trainer", {"kind": "LeaderWorkerSet", "ranksPerNode": 8}),
    ("trainer", {"gang": "kubernetes", "priorityClassName": "high"}),
    ("trainer", {"gang": "coscheduling", "schedulerName": "scheduler-plugins", "priorityClassName": "high"}),
    ("trainer", {"gang": "volcano", "schedulerName": "volcano", "priorityClassName": "high"}),
    ("generator.strategy", {"type": "Recreate"}),
    ("trainer.strategy", {"type": "OnDelete"}),
]  # fmt: skip


def values_of(path: Path) -> dict[str, Any]:
    return chart.parse(path.read_text())


@functools.cache
def accepted(text: str, version: str) -> None:
    """Check that Kubernetes of this version accepts the object; an unknown kind is an error, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", schema_contents)
        kubernetes_validate.validate(json.loads(text), version, strict=True)


schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
"""Megabytes of JSON that the library would otherwise read again for every object."""


def check(objects: list[chart.Object], folder: Path) -> None:
    """Check that Kubernetes accepts the objects, and the services their configuration."""
    for found in objects:
        if operator := OPERATORS.get((found["apiVersion"], found["kind"])):
            operator.validate(found)
            if found["kind"] != "LeaderWorkerSet":
                continue
            template = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            found = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "worker"}, "template": template}
        new = found["apiVersion"] in NEWER or "schedulingGroup" in json.dumps(found)
        for version in VERSIONS[-1:] if new else VERSIONS:
            accepted(re.sub(VARIES, r'"\1": "eA=="', json.dumps(found, sort_keys=True)), version)
    for name in ("config", "check"):
        maps = [found for found in chart.of_kind(objects, "ConfigMap") if found["metadata"]["name"] == f"demo-{name}"]
        for found in maps:
            (folder / "config.toml").write_text(found["data"]["config.toml"])
            load(folder / "config.toml", environ={})


@pytest.mark.parametrize("path", chart.EXAMPLES, ids=lambda path: path.stem)
def test_examples_pass_strict_lint_and_render_valid_objects(path: Path, tmp_path: Path) -> None:
    from helm_python.chart import lint

    for version in VERSIONS:
        found = lint(chart.CHART, values_of(path), strict=True, kube_version=f"v{version}.0")
        assert found["errors"] == []
        assert [message for message in found["messages"] if message["severity"] > 1] == []
    check(chart.render(values_of(path), bare=True), tmp_path)


def test_the_chart_renders_with_its_defaults(tmp_path: Path) -> None:
    check(chart.render(), tmp_path)
    assert "kubectl -n default scale deployment/demo-generator" in chart.notes()


@pytest.mark.timeout(900)
def test_each_value_changes_the_rendering_and_keeps_it_valid(tmp_path: Path) -> None:
    wrong = dict[str, str]()
    for path, value in CHANGES:
        base = SCORED if path in ("rewards.files", "rewards.existingConfigMap") else {}  # otherwise it has no effect
        try:
            objects = chart.render(chart.changed(base, path, value))
            check(objects, tmp_path)
        except Exception as error:  # of Helm, of a schema, or of the configuration: the list is to have all
            wrong[path] = f"{type(error).__name__}: {error}"
            continue
        if chart.as_text(objects) == chart.as_text(chart.render(base)):
            wrong[path] = "changes nothing"
    assert wrong == {}


def test_integers_stay_integers_and_text_stays_text(tmp_path: Path) -> None:
    odd = 'a "b" \\n #{ü} \n####\\s*(.+)'
    values = chart.changed(
        {}, "config.generator.engine_options", {"max_num_batched_tokens": 4096, "rope": {"factor": 1.5, "on": True}}
    )
    values = chart.changed(values, "config.data.system_prompt", odd)
    values = chart.changed(values, "config.optimizer", {"learning_rate": 1e-6, "betas": [0.9, 0.95]})
    config = chart.named(chart.render(values), "ConfigMap", "demo-config")["data"]["config.toml"]
    (tmp_path / "config.toml").write_text(config)
    loaded = load_resolved(tmp_path / "config.toml")
    options = loaded.generator.engine_options
    assert options == {"max_num_batched_tokens": 4096, "rope": {"factor": 1.5, "on": True}}
    assert isinstance(options["max_num_batched_tokens"], int)
    assert loaded.data.system_prompt == odd
    assert loaded.optimizer.learning_rate == 1e-6


def test_the_chart_sets_the_keys_it_controls(tmp_path: Path) -> None:
    objects = chart.render(chart.example("four-nodes"), name="reason", namespace="team")
    (tmp_path / "config.toml").write_text(chart.named(objects, "ConfigMap", "reason-config")["data"]["config.toml"])
    config = load_resolved(tmp_path / "config.toml")
    assert (config.run.name, config.trainer.ranks, config.generator.count) == ("reason", 16, 1)
    assert config.redis.url == "redis://reason-redis.team.svc.cluster.local:6379/0"
    assert config.sync.host == "reason-trainer-0.reason-trainer.team.svc.cluster.local"
    assert (config.api.host, config.api.port) == ("0.0.0.0", 8080)


def test_a_store_of_versions_mounts_the_volume_of_runs(tmp_path: Path) -> None:
    values = chart.changed({"storage": {"runs": {"accessMode": "ReadWriteMany"}}}, "config.sync.backend", "store")
    objects = chart.render(values)
    check(objects, tmp_path)
    (generator,) = chart.named(objects, "Deployment", "demo-generator")["spec"]["template"]["spec"]["containers"]
    assert {"mountPath": "/srv/grpo/runs", "name": "runs"} in generator["volumeMounts"]


def test_alerts_and_dashboard_match_the_generated_files() -> None:
    objects = chart.render({"monitoring": {"rules": True, "dashboard": True, "labels": {"release": "prometheus"}}})
    rule = chart.named(objects, "PrometheusRule", "demo-alerts")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == chart.parse((chart.CHART / "files" / "alerts.yaml").read_text())
    dashboard = chart.named(objects, "ConfigMap", "demo-dashboard")["data"]["grpo.json"]
    assert json.loads(dashboard) == json.loads((chart.CHART / "files" / "dashboard.json").read_text())


def test_grace_periods_are_long_enough(tmp_path: Path) -> None:
    from services.config.generation import Generator
    from services.generator.drain import BEYOND_S
    from services.trainer.node import LAST_WORDS_S

    objects = chart.render()
    generator = chart.named(objects, "Deployment", "demo-generator")["spec"]["template"]["spec"]
    assert generator["terminationGracePeriodSeconds"] >= Generator().drain_s + BEYOND_S + 5
    trainer = chart.named(objects, "StatefulSet", "demo-trainer")["spec"]["template"]["spec"]
    (container,) = trainer["containers"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    stop = next(float(entry["value"]) for entry in container["env"] if entry["name"] == "GRPO_STOP_S")
    assert hook[0] == "timeout"
    assert float(hook[1]) + stop + LAST_WORDS_S < trainer["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("minimum", "remedy"), [(2, ": run `helm uninstall` to free their GPUs."), (0, ".")])
def test_the_notes_say_that_an_autoscaler_keeps_generators(minimum: int, remedy: str) -> None:
    notes = chart.notes({"generator": {"autoscaling": {"kind": "keda", "minReplicas": minimum}}})
    assert "the pods of the trainer are scaled to 0" in notes
    assert f"the generators to its minimum, {minimum}{remedy}\n" in notes
    assert "trainer and generators are scaled to 0" in chart.notes()


def test_an_autoscaler_is_the_only_owner_of_replicas() -> None:
    objects = chart.render(chart.example("four-nodes"), name="demo")
    assert "replicas" not in chart.named(objects, "Deployment", "demo-generator")["spec"]
    scaled = chart.named(objects, "ScaledObject", "demo-generator")["spec"]
    assert scaled["triggers"][0]["metadata"]["stream"] == "grpo:{demo}:tickets"
    assert '"scaling" = "cluster"' in chart.named(objects, "ConfigMap", "demo-config")["data"]["config.toml"]


def test_the_page_is_served_through_an_ingress_or_a_gateway(tmp_path: Path) -> None:
    gateway = [{"name": "public", "namespace": "gateways"}]
    objects = chart.render({
        "web": {
            "enabled": True,
            "ingress": {"enabled": True, "host": "grpo.example.com", "className": "nginx", "tlsSecret": "page"},
            "route": {"enabled": True, "parentRefs": gateway, "hostnames": ["grpo.example.com"]},
        },
        "networkPolicy": {"apiFrom": [{"podSelector": {"matchLabels": {"app": "nginx"}}}]},
    })  # fmt: skip
    check(objects, tmp_path)
    (port,) = chart.named(objects, "Service", "demo-web")["spec"]["ports"]
    (rule,) = chart.named(objects, "Ingress", "demo-web")["spec"]["rules"]
    assert rule["host"] == "grpo.example.com"
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "demo-web", "port": {"name": port["name"]}}
    route = chart.named(objects, "HTTPRoute", "demo-web")["spec"]
    assert route["parentRefs"] == gateway
    assert route["rules"] == [{"backendRefs": [{"name": "demo-web", "port": port["port"]}]}]


def test_pod_defaults_apply_to_all_pods_unless_overridden() -> None:
    values = {
        "podDefaults": {
            "tolerations": [{"key": "gpu"}], "env": {"A": "1", "B": "1"}, "probes": {"readiness": {"failureThreshold": 5}},
            "extraEnv": [{"name": "C", "value": "1"}], "extraEnvFrom": [{"secretRef": {"name": "keys"}}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
            "initContainers": [{"name": "first", "image": "busybox"}],
            "podLabels": {"team": "a"}, "podAnnotations": {"note": "b"},
        },
        "generator": {"env": {"B": "2"}, "probes": {"readiness": {"periodSeconds": 2}}},
        "web": {"enabled": True}, "judge": {"enabled": True, "model": "a/b"},
        "preload": {"enabled": True, "repository": "a/b"}, "storage": {"models": {"enabled": True}},
        "config": {
            "model": {"path": "/srv/grpo/models/b"}, "samples": {"keep": 10},
            "environments": [{"name": "e", "kind": "python", "function": "e:E"}],
        },
        "sandbox": {"warmPool": "python"},
    }  # fmt: skip
    found = list(chart.pods(chart.render(values)))
    assert len(found) == 12
    for label, template in found:
        pod, meta = template["spec"], template["metadata"]
        assert {"key": "gpu"} in pod["tolerations"], label
        (container,) = pod["containers"]
        environ = {entry["name"]: entry.get("value") for entry in container["env"]}
        generator = label == "Deployment/demo-generator"
        assert (environ["A"], environ["B"], environ["C"]) == ("1", "2" if generator else "1", "1"), label
        assert {"secretRef": {"name": "keys"}} in container["envFrom"], label
        assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"], label
        assert {"name": "ca", "mountPath": "/etc/ca"} in container["volumeMounts"], label
        assert "first" in [each["name"] for each in pod["initContainers"]], label
        assert (meta["labels"]["team"], meta["annotations"]["note"]) == ("a", "b"), label
        if probe := container.get("readinessProbe"):
            assert (probe["failureThreshold"], probe["periodSeconds"]) == (5, 2 if generator else 5), label


PRELOAD: chart.Object = {
    "preload": {"enabled": True, "repository": "a/b"}, "storage": {"models": {"enabled": True}},
    "config": {"model": {"path": "/srv/grpo/models/b"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("preload.revision", "main"), ("preload.resources", {"limits": {"memory": "8Gi"}}), ("preload.env", {"A": "1"}),
        ("hub.tokenSecret", "hub"), ("security.user", None), ("commonLabels", {"team": "a"}), ("image.tag", "next"),
        ("podDefaults.tolerations", [{"key": "gpu"}]), ("storage.models.existingClaim", "mine"),
    ],
)  # fmt: skip
def test_a_changed_preload_pod_gets_a_new_job(path: str, value: Any) -> None:
    before, after = (preload(chart.render(values)) for values in (PRELOAD, chart.changed(PRELOAD, path, value)))
    assert before["metadata"]["name"] != after["metadata"]["name"]
    assert before["spec"]["template"] != after["spec"]["template"]


def test_a_new_version_of_the_chart_does_not_repeat_the_preload() -> None:
    labels = preload(chart.render(PRELOAD))["spec"]["template"]["metadata"]["labels"]
    assert set(labels) == {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}


def preload(objects: list[chart.Object]) -> chart.Object:
    """Return the Job that downloads the model."""
    (job,) = (found for found in chart.of_kind(objects, "Job") if "preload" in found["metadata"]["name"])
    return job


def test_pods_that_show_text_mount_the_tokenizer_without_waiting() -> None:
    objects = chart.render({**PRELOAD, "config": {**PRELOAD["config"], "samples": {"keep": 10}}, "web": {"enabled": True}})
    found = dict(chart.pods(objects))
    waiting = {label for label, template in found.items() if "initContainers" in template["spec"]}
    assert waiting == {"Deployment/demo-dataprep", "Deployment/demo-generator", "StatefulSet/demo-trainer"}
    for label in (*waiting, "Deployment/demo-tracker", "Deployment/demo-web"):
        (container,) = found[label]["spec"]["containers"]
        assert {"name": "models", "mountPath": "/srv/grpo/models", "readOnly": True} in container["volumeMounts"], label


def test_only_pods_that_read_prompts_have_access_to_the_hub() -> None:
    source = {"kind": "parquet", "path": "hf://datasets/owner/name/train.parquet"}
    config = {**PRELOAD["config"], "evaluation": {"sources": [source]}}
    objects = chart.render({**PRELOAD, "config": config, "hub": {"tokenSecret": "hub"}})
    pods = dict(chart.pods(objects))
    for label, online in (("Deployment/demo-dataprep", True), ("Pod/demo-smoke", True), ("Deployment/demo-generator", False)):
        environ = {each["name"]: each.get("value") for each in pods[label]["spec"]["containers"][0]["env"]}
        assert environ.get("HF_HUB_OFFLINE") == (None if online else "1"), label
        assert environ.get("HF_HOME") == ("/tmp/huggingface" if online else None), label
        assert ("HF_TOKEN" in environ) == online, label
    policy = chart.named(objects, "NetworkPolicy", "demo-internet")["spec"]
    (rule,) = policy["podSelector"]["matchExpressions"]
    assert {"dataprep", "smoke"} <= {*rule["values"]}


def test_prometheus_keeps_the_labels_of_a_run() -> None:
    (endpoint,) = chart.named(chart.render({"monitoring": {"podMonitor": True}}), "PodMonitor", "demo-services")["spec"][
        "podMetricsEndpoints"
    ]
    assert endpoint["honorLabels"] is True


def test_pods_that_load_environment_code_use_its_image() -> None:
    objects = chart.render({
        "config": {"environments": [{"name": "e", "kind": "python", "function": "/opt/env/e.py:E"}]},
        "environment": {"image": "mine", "internet": True},
    })  # fmt: skip
    images = {label: template["spec"]["containers"][0]["image"] for label, template in chart.pods(objects)}
    mine = ("Deployment/demo-dataprep", "Deployment/demo-environment", "Job/demo-check", "Pod/demo-smoke")
    assert {label for label, image in images.items() if image == "mine"} == set(mine)


def test_progress_deadlines_exceed_startup_probes() -> None:
    values = {"web": {"enabled": True, "probes": {"startup": {"failureThreshold": 2000}}}}
    for found in chart.of_kind(chart.render(values), "Deployment"):
        (container,) = found["spec"]["template"]["spec"]["containers"]
        probe = container["startupProbe"]
        assert found["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"], found["metadata"]


def test_an_external_cluster_is_reachable_at_all_its_nodes() -> None:
    objects = chart.render({
        "redis": {"enabled": False, "external": {"url": "redis://cluster.example.com:6379/0", "cluster": True}},
        "networkPolicy": {"externalRedisPorts": [{"port": 11000, "endPort": 13047}]},
        "generator": {"autoscaling": {"kind": "keda"}},
    })  # fmt: skip
    (trigger,) = chart.named(objects, "ScaledObject", "demo-generator")["spec"]["triggers"]
    assert (trigger["type"], trigger["metadata"]["addresses"]) == ("redis-cluster-streams", "cluster.example.com:6379")
    outwards = [
        rule.get("ports") for found in chart.of_kind(objects, "NetworkPolicy") for rule in found["spec"].get("egress", [])
    ]
    assert [{"port": 6379}, {"port": 11000, "endPort": 13047}] in outwards


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.monitoring:4318/v1/traces", 4318), ("https://traces.example.com/v1/traces", 443),
        ("http://[fd00::7]:4317/v1/traces", 4317), ("http://collector/v1/traces", 80),
    ],
)  # fmt: skip
def test_traces_reach_the_collector_at_its_port(endpoint: str, port: int) -> None:
    objects = chart.render({"config": {"tracing": {"endpoint": endpoint}}})
    policy = chart.named(objects, "NetworkPolicy", "demo-tracing")["spec"]
    assert policy["egress"] == [{"ports": [{"port": port}]}]
    (rule,) = policy["podSelector"]["matchExpressions"]
    assert {*rule["values"]} == {"dataprep", "environment", "generator", "trainer"}
    without = {each["metadata"]["name"] for each in chart.of_kind(chart.render({}), "NetworkPolicy")}
    assert "demo-tracing" not in without
