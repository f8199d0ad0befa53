"""values.schema.json and the chart's own checks reject invalid values and name the key."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tests.kubernetes.support import chart
from tests.kubernetes.support.chart import changed

helm_python = pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

REFUSED: list[tuple[str, Any, str]] = [
    # wrong keys
    ("generatr", {}, "generatr"),
    ("generator.replica", 2, "replica"),
    ("config.optimizer.lr", 1e-5, "lr"),
    ("config.optimiser", {}, "optimiser"),
    # wrong types and values
    ("generator.startupSeconds", 0, "startupSeconds"),
    ("podDefaults.probes", {"startup": {"period": 3}}, "period"),
    ("web.extraVolumes", {}, "extraVolumes"),
    ("image.digests", {"generator": "latest"}, "digests"),
    ("image.digests", {"generators": "sha256:" + 64 * "0"}, "generators"),
    ("onFinish", "delete", "onFinish"),
    ("generator.replicas", "2", "replicas"),
    ("generator.replicas", -1, "replicas"),
    ("trainer.nodes", 0, "nodes"),
    ("accelerator", "amd", "accelerator"),
    ("image.pullPolicy", "Sometimes", "pullPolicy"),
    ("generator.env", {"A": 1}, "env"),
    ("generator.env", {"not a name": "x"}, "not a name"),
    ("generator.resources", {"limit": {}}, "limit"),
    ("generator.resources", {"limits": {"memory": "64 GB"}}, "memory"),
    ("config.run.steps", 0, "steps"),
    ("config.run.steps", "many", "steps"),
    ("config.model.dtype", "float16", "dtype"),
    ("config.data.sources", [], "sources"),
    ("redis.external.url", "redis://user:secret@host:6379/0", "url"),
    ("rewards.files", {"my reward.py": ""}, "my reward.py"),
    ("rewards.files", {"my_reward.py": ["def"]}, "my_reward.py"),
    ("rewards.secret", "keys", "secret"),
    ("judge.args", "--enforce-eager", "args"),
    ("config.verifiers", [{"kind": "python"}], "verifiers"),
    # keys set by the chart
    ("config.redis.url", "redis://elsewhere:6379", "url"),
    ("config.api", {"port": 1}, "api"),
    ("config.run.dir", "/tmp", "dir"),
    ("config.trainer.ranks", 8, "ranks"),
    ("config.sync.host", "me", "host"),
    ("config.generator.count", 3, "count"),
    ("config.fleet.scaling", "cluster", "scaling"),
]

ENVIRONMENT: dict[str, Any] = {
    "config": {
        "environments": [{"name": "e", "kind": "python", "function": "e:E"}],
        "data": {"sources": [{"kind": "jsonl", "path": "hf://datasets/a/b/x.jsonl", "environment": "e"}]},
    }
}

OUTSIDE = {"enabled": False, "external": {"url": "rediss://redis.example.com:6380/0"}}
JOINED = {"run": {"name": "atlas"}, "sync": {"backend": "store", "folder": "s3://weights/atlas"}}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"redis": {"enabled": False}}, "redis.external.url"),
    ({"redis": {"external": {"url": "redis://host:6379/0"}}}, "redis.external.url"),
    ({"redis": {"external": {"cluster": True}}}, "redis.external.cluster"),
    (ENVIRONMENT, 'environments tokenize with config.model.path = "Qwen/Qwen3-0.6B", which their pods must download'),
    (
        changed(ENVIRONMENT, "config.environments", [{"name": "e", "kind": "python", "function": "e.py:E"}]),
        "put the file into environment.files and write /srv/grpo/environments/e.py:E",
    ),
    (
        changed(
            ENVIRONMENT, "config.environments", [{"name": "e", "kind": "python", "function": "/srv/grpo/environments/e.py:E"}]
        ),
        'environment.files has no "e.py": add it',
    ),
    ({"environment": {"files": {"e.py": ""}}}, "have no effect without config.environments"),
    ({**ENVIRONMENT, "environment": {"files": {"e.py": ""}, "existingConfigMap": "b"}}, "environment.existingConfigMap"),
    ({"config": {"model": {"path": ""}}}, "config.model.path is empty"),
    (
        {"config": {"model": {"path": "/srv/grpo/models/a"}}},
        'config.model.path = "/srv/grpo/models/a" is on no volume of the pods',
    ),
    ({"config": {"model": {"path": "my model"}}}, "neither a name on the hub"),
    (
        {"config": {"data": {"sources": [{"kind": "jsonl", "path": "/srv/grpo/data/a.jsonl"}]}}},
        'config.data.sources.0.path = "/srv/grpo/data/a.jsonl" is on no volume of the pods: put the file on one',
    ),
    (
        {
            "config": {"evaluation": {"sources": [{"kind": "jsonl", "name": "test", "path": "a.jsonl"}]}},
            "storage": {"data": {"existingClaim": "prompts"}},
        },
        'config.evaluation.sources.0.path = "a.jsonl" is on no volume of the pods',
    ),
    ({"generator": {"replicas": 3, "autoscaling": {"kind": "keda"}}}, "generator.replicas = 3 has no effect"),
    ({"generator": {"replicas": 3}, "scaler": {"enabled": False}}, "use kubectl scale after the install"),
    ({"preload": {"enabled": True}, "storage": {"models": {"enabled": True}}}, "needs preload.repository"),
    (
        {"kueue": {"queue": "gpus"}, "trainer": {"nodes": 2}, "storage": {"runs": {"accessMode": "ReadWriteMany"}}},
        'kueue.queue = "gpus" would admit one pod of trainer.nodes = 2',
    ),
    ({"commonLabels": {"app.kubernetes.io/component": "x"}}, 'commonLabels sets app.kubernetes.io/component = "x"'),
    ({"judge": {"podLabels": {"app.kubernetes.io/name": "x"}}}, 'judge.podLabels sets app.kubernetes.io/name = "x"'),
    ({"web": {"ingress": {"enabled": True}}}, "web.enabled = false"),
    ({"web": {"enabled": True, "ingress": {"enabled": True}}}, "networkPolicy.apiFrom"),
    (
        {"web": {"enabled": True, "route": {"enabled": True}}, "networkPolicy": {"apiFrom": [{"podSelector": {}}]}},
        "web.route.parentRefs",
    ),
    ({"redis": {"external": {"caSecret": "ca"}}}, "redis.external.caSecret"),
    (
        {"redis": {"enabled": False, "usersSecret": "a", "external": {"url": "redis://host:6379/0", "existingSecret": "b"}}},
        "redis.usersSecret",
    ),
    ({"tls": {"redisSecret": "a"}, "redis": {"enabled": False, "external": {"url": "redis://host:6379/0"}}}, "tls.redisSecret"),
    (
        {"networkPolicy": {"externalRedisPorts": [{"port": 11000}]}},
        'networkPolicy.externalRedisPorts = [{"port":11000}] has no effect with redis.enabled = true: set redis.enabled = false',
    ),
    ({"networkPolicy": {"externalRedis": [{"podSelector": {}}]}}, "networkPolicy.externalRedis = "),
    (
        {
            "networkPolicy": {"redisFrom": [{"podSelector": {}}]},
            "redis": {"enabled": False, "external": {"url": "redis://host:6379/0"}},
        },
        "has no effect with redis.enabled = false: set redis.enabled = true, or remove it",
    ),
    ({"rewards": {"files": {"a.py": ""}, "existingConfigMap": "b"}}, "rewards.existingConfigMap"),
    ({"rewards": {"files": {"a.py": ""}}}, "have no effect without a verifier of kind python"),
    ({"rewards": {"existingConfigMap": "b"}}, "have no effect without a verifier of kind python"),
    (
        {
            "rewards": {"files": {"a.py": "", "b.py": ""}},
            "config": {"verifiers": [{"kind": "python", "function": "/srv/grpo/rewards/a.py:score"}]},
        },
        'rewards.files has "b.py", which has no effect, since no function of config.verifiers names it',
    ),
    (
        {**ENVIRONMENT, "environment": {"files": {"f.py": ""}}},
        'environment.files has "f.py", which has no effect, since no function of config.environments names it',
    ),
    ({"rewards": {"image": "a"}, "generator": {"image": "b"}}, "rewards.image"),
    (
        {"config": {"verifiers": [{"kind": "python", "function": "a.py:score"}]}},
        'config.verifiers.0.function = "a.py:score": put the file into rewards.files and write /srv/grpo/rewards/a.py:score',
    ),
    (
        {"config": {"verifiers": [{"kind": "python", "function": "/srv/grpo/rewards/a.py:score"}]}},
        'config.verifiers.0.function = "/srv/grpo/rewards/a.py:score": rewards.files has no "a.py": add it',
    ),
    ({"judge": {"enabled": True}}, "judge.model"),
    ({"judge": {"enabled": True, "model": "/srv/grpo/models/a"}}, "storage.models.enabled"),
    (
        {
            "judge": {"enabled": True, "model": "a/b"},
            "networkPolicy": {"internet": False},
            "config": {"model": {"path": "/srv/grpo/models/a"}},
            "storage": {"models": {"enabled": True}},
        },
        'judge.model = "a/b" must be downloaded',
    ),
    (
        {
            "networkPolicy": {"internet": False},
            "storage": {"models": {"enabled": True}},
            "config": {
                "model": {"path": "/srv/grpo/models/a"},
                "data": {"sources": [{"kind": "jsonl", "path": "hf://datasets/owner/name/train.jsonl"}]},
            },
        },
        "names a dataset on the hub (hf://), but networkPolicy.internet = false",
    ),
    ({"trainer": {"nodes": 2}}, "storage.runs.accessMode"),
    ({"preload": {"enabled": True, "repository": "a/b"}}, "storage.models.enabled"),
    ({"preload": {"enabled": True, "repository": "a/b"}, "storage": {"models": {"enabled": True}}}, "config.model.path"),
    ({"networkPolicy": {"internet": False}}, "networkPolicy.internet"),
    ({"interconnect": {"hostNetwork": True}}, "networkPolicy.nodeCIDRs"),
    ({"generator": {"autoscaling": {"kind": "hpa"}}}, "generator.autoscaling.metrics"),
    ({"generator": {"autoscaling": {"minReplicas": 9}}}, "generator.autoscaling.minReplicas"),
    (
        ENVIRONMENT | {"generator": {"autoscaling": {"kind": "keda", "minReplicas": 0}}},
        "generator.autoscaling.minReplicas = 0 would never start a generator",
    ),
    ({"accelerator": "none", "config": {"sync": {"backend": "nccl"}}}, "config.sync.backend"),
    ({"config": {"sync": {"backend": "store"}}}, "storage.runs.accessMode"),
    ({"trainer": {"ranksPerNode": 3}, "config": {"trainer": {"sequence_parallel": 2}}}, "sequence_parallel"),
    ({"config": {"tracking": {"wandb": "p"}}, "tracker": {"env": {"WANDB_MODE": "online"}}}, "tracker.wandbSecret"),
    ({"trainer": {"gang": "volcano"}}, "name it in trainer.schedulerName"),
    ({"trainer": {"gang": "kubernetes"}, "kueue": {"queue": "research"}}, "remove one"),
    ({"kueue": {"priorityClass": "high"}}, "has no effect without kueue.queue"),
    ({"trainer": {"kind": "LeaderWorkerSet", "strategy": {"type": "OnDelete"}}}, "replaces all pods at once"),
    ({"devices": {"kind": "claim"}, "accelerator": "none"}, "set nvidia, or plugin"),
    ({"devices": {"nicClass": "rdma"}}, "set claim, or remove them"),
    (
        {"devices": {"kind": "claim", "nicClass": "rdma"}, "interconnect": {"rdma": {"resource": "rdma/hca"}}},
        "ask for the same NICs",
    ),
    ({"role": "generators"}, "set redis.enabled = false"),
    ({"role": "generators", "redis": OUTSIDE}, "needs config.run.name"),
    ({"role": "generators", "redis": OUTSIDE, "config": {"run": {"name": "atlas"}}}, "set config.sync.backend = store"),
    (
        {
            "role": "generators",
            "redis": OUTSIDE,
            "config": JOINED | {"sync": {"backend": "store"}},
            "storage": {"runs": {"accessMode": "ReadWriteMany"}},
        },
        "which belongs to another release",
    ),
    ({"role": "generators", "redis": OUTSIDE, "config": JOINED, "generator": {"replicas": 3}}, "use kubectl scale"),
    ({"role": "generators", "redis": OUTSIDE, "config": JOINED, "web": {"enabled": True}}, "enable it in the run's own release"),
]


@pytest.mark.timeout(600)
def test_the_schema_rejects_wrong_keys_types_and_values() -> None:
    assert accepted((f"{path} = {value!r}", chart.changed({}, path, value), named) for path, value, named in REFUSED) == {}


@pytest.mark.timeout(600)
def test_impossible_combinations_are_rejected_with_a_remedy() -> None:
    assert accepted((named, values, named) for values, named in IMPOSSIBLE) == {}


def accepted(cases: Iterable[tuple[str, dict[str, Any], str]]) -> dict[str, str]:
    """Return the cases whose values are rendered, or rejected without naming what they should."""
    wrong = dict[str, str]()
    for case, values, named in cases:
        try:
            chart.render(values)
            wrong[case] = "is rendered"
        except helm_python.HelmError as error:
            if named not in str(error):
                wrong[case] = str(error)
    return wrong


def test_required_keys_have_no_defaults() -> None:
    with pytest.raises(helm_python.HelmError, match="missing properties 'model', 'data'"):
        chart.render(bare=True)
    own = {"config": {"model": {"path": "a/b"}, "data": {"sources": [{"kind": "jsonl", "path": "hf://datasets/a/b/x.jsonl"}]}}}
    config = chart.named(chart.render(own, bare=True), "ConfigMap", "demo-config")["data"]["config.toml"]
    assert "reasoning_gym" not in config
    assert "verifiers" not in config


@pytest.mark.parametrize("value", [None, 10001])
def test_the_user_is_set_or_left_to_the_cluster(value: int | None) -> None:
    for label, template in chart.pods(chart.render({"security": {"user": value}})):
        given = template["spec"]["securityContext"]
        assert (given.get("runAsUser"), given.get("fsGroup")) == (value, value), label
        assert given["runAsNonRoot"]


def test_a_release_name_too_long_for_its_pods_is_rejected() -> None:
    chart.render(name="r" * 40)
    with pytest.raises(helm_python.HelmError, match="at most 40"):
        chart.render(name="r" * 41)


def test_the_schema_matches_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(chart.CHART))
    import make_schema

    sys.modules.pop("make_schema")
    held = (chart.CHART / "values.schema.json").read_text()
    assert held == make_schema.make(), "run make generate"


def test_the_readme_matches_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(chart.CHART))
    import make_readme

    sys.modules.pop("make_readme")
    sys.modules.pop("make_schema", None)
    assert make_readme.FILE.read_text() == make_readme.make(), "run make generate"


@pytest.mark.parametrize(("minimum", "others"), [(1, []), (0, [{"kind": "reasoning_gym", "task": "basic_arithmetic"}])])
def test_keda_may_start_from_0_if_it_sees_tickets(minimum: int, others: list[dict[str, Any]]) -> None:
    sources = [*ENVIRONMENT["config"]["data"]["sources"], *others]
    values = changed(ENVIRONMENT, "config.data.sources", sources) | {
        "generator": {"autoscaling": {"kind": "keda", "minReplicas": minimum}},
        "environment": {"internet": True},
    }
    assert chart.named(chart.render(values), "ScaledObject", "demo-generator")["spec"]["minReplicaCount"] == minimum
