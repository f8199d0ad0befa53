"""Custom rewards in a release: the values in docs/kubernetes.md, rendered, loaded and used to score."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import RunConfig, load, load_resolved
from services.protocol.entries import encode_entry
from services.verifiers.base import Job
from services.verifiers.scoring import Scoring
from tests.kubernetes.support import chart

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")

PYTHON, SERVICE, JUDGE = (chart.documented(heading) for heading in ("A Python function", "A service", "A model as judge"))
REWARDS = "/srv/grpo/rewards"


def template(objects: list[chart.Object], name: str) -> chart.Object:
    return dict(chart.pods(objects))[f"Deployment/demo-{name}"]


def mounted(objects: list[chart.Object], folder: Path) -> RunConfig:
    """Return the configuration of a pod with the release's files in `folder` instead of their mount."""
    generator = template(objects, "generator")
    (volume,) = [volume for volume in generator["spec"]["volumes"] if volume["name"] == "rewards"]
    for name, text in chart.named(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
        (folder / name).write_text(text)
    config = chart.named(objects, "ConfigMap", "demo-config")["data"]["config.toml"]
    (folder / "config.toml").write_text(config.replace(REWARDS, str(folder)))
    return load_resolved(folder / "config.toml")


async def test_the_function_in_the_values_scores(tmp_path: Path) -> None:
    config = mounted(chart.render(PYTHON), tmp_path)
    scoring = Scoring(config, config.data.sources, workers=1)
    answer = encode_entry({"question": "2 + 2?", "answer": "4", "metadata": {}})
    await scoring.start()
    try:
        found = await scoring.score(Job("main", ["2 + 2 = 4", "it is 5"], answer, "", ["stop"] * 2, [[1], [1]]))
    finally:
        await scoring.close()
    assert found.scores == {"python": [1.0, 0.0], "python.numbers": [3.0, 1.0]}


def test_files_are_mounted_and_pods_rolled_when_they_change() -> None:
    objects = chart.render(PYTHON)
    other = chart.render(chart.changed(PYTHON, "rewards.files", {"my_reward.py": "def score(completion):\n    return 0\n"}))
    for name in ("generator", "dataprep"):
        container = template(objects, name)["spec"]["containers"][0]
        assert {"name": "rewards", "mountPath": REWARDS, "readOnly": True} in container["volumeMounts"]
        before, after = (template(found, name)["metadata"]["annotations"]["checksum/rewards"] for found in (objects, other))
        assert before != after
    trainer = dict(chart.pods(objects))["StatefulSet/demo-trainer"]
    assert "rewards" not in {volume["name"] for volume in trainer["spec"]["volumes"]}


def test_an_existing_config_map_is_mounted_and_none_created() -> None:
    objects = chart.render({"config": PYTHON["config"], "rewards": {"existingConfigMap": "ours"}})
    for name in ("generator", "dataprep"):
        assert {"name": "rewards", "configMap": {"name": "ours"}} in template(objects, name)["spec"]["volumes"]
    assert not [found for found in chart.of_kind(objects, "ConfigMap") if "rewards" in found["metadata"]["name"]]


def test_only_generators_use_the_image_with_dependencies() -> None:
    objects = chart.render({"rewards": {"image": "example.com/mine:1"}, "judge": {"enabled": True, "model": "a/b"}})
    images = {label: [each["image"] for each in chart.containers(found)] for label, found in chart.pods(objects)}
    assert [label for label, found in images.items() if "example.com/mine:1" in found] == ["Deployment/demo-generator"]


def test_generators_reach_the_service_and_have_its_secret() -> None:
    objects = chart.render(SERVICE)
    (generator,) = template(objects, "generator")["spec"]["containers"]
    assert generator["envFrom"] == [{"secretRef": {"name": "reward-keys"}}]
    assert "envFrom" not in template(objects, "dataprep")["spec"]["containers"][0]
    policy = chart.named(objects, "NetworkPolicy", "demo-rewards")["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "generator"
    assert policy["egress"] == SERVICE["rewards"]["egress"]
    closed = chart.render(chart.changed(SERVICE, "networkPolicy.enabled", False))
    assert not chart.of_kind(closed, "NetworkPolicy")


def test_the_judge_has_the_documented_url_and_admits_generators(tmp_path: Path) -> None:
    objects = chart.render(JUDGE)
    service = chart.named(objects, "Service", "demo-judge")
    (port,) = service["spec"]["ports"]
    (tmp_path / "config.toml").write_text(chart.named(objects, "ConfigMap", "demo-config")["data"]["config.toml"])
    (verifier,) = load(tmp_path / "config.toml", environ={}).verifiers
    assert verifier.kind == "judge"
    assert verifier.url == f"http://demo-judge.ml.svc.cluster.local:{port['port']}/v1"
    (judge,) = template(objects, "judge")["spec"]["containers"]
    assert judge["command"][judge["command"].index("--model") + 1] == verifier.model
    assert judge["command"][-2:] == ["--max-model-len", "8192"]
    assert judge["resources"]["limits"]["nvidia.com/gpu"] == 1
    inwards, outwards = (chart.named(objects, "NetworkPolicy", f"demo-{name}")["spec"] for name in ("judge", "rewards"))
    (ingress,), (egress,) = inwards["ingress"], outwards["egress"]
    assert [peer["podSelector"] for peer in ingress["from"]] == [outwards["podSelector"]]
    assert [peer["podSelector"] for peer in egress["to"]] == [inwards["podSelector"]]
    assert ingress["ports"] == egress["ports"] == [{"port": 8000}]
    assert f'url = "{verifier.url.replace(".ml.", ".default.")}", model = "Qwen/Qwen3-8B"' in chart.notes(JUDGE)


def test_a_judge_uses_all_its_gpus_or_runs_on_cpus() -> None:
    several = template(chart.render(chart.changed(JUDGE, "judge.gpus", 2)), "judge")["spec"]["containers"][0]
    assert several["command"][several["command"].index("--tensor-parallel-size") + 1] == "2"
    assert several["resources"]["limits"]["nvidia.com/gpu"] == 2
    cpus = template(chart.render(chart.changed(JUDGE, "accelerator", "none")), "judge")["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in cpus["resources"]["limits"]
    assert cpus["image"].endswith("-cpu")


def test_a_judge_mounts_its_folder_or_downloads_from_the_hub() -> None:
    volume = {"storage": {"models": {"enabled": True}}}
    for model, mounted in (("/srv/grpo/models/judge", True), ("Qwen/Qwen3-8B", False)):
        objects = chart.render({"judge": {"enabled": True, "model": model}, "hub": {"tokenSecret": "hub"}, **volume})
        (judge,) = template(objects, "judge")["spec"]["containers"]
        assert ("models" in {mount["name"] for mount in judge["volumeMounts"]}) == mounted
        names = {entry["name"] for entry in judge["env"]}
        assert ("HF_HUB_OFFLINE" in names, "HF_TOKEN" in names) == (mounted, not mounted)
