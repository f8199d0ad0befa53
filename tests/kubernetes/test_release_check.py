"""The check before an install or upgrade rejects changes that prevent the run from resuming, on one line, and cleans up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.config import RunConfig, defining, digest, load, to_toml
from services.console.release_check import main, refusal
from services.console.run.redis_server import RedisServer
from services.store import Store
from tests.kubernetes.support import chart
from tests.support.harness import small_config

pytest.importorskip("helm_python", reason="the extra `dev` has Helm: pip install helm-python-sdk")


@pytest.fixture
def config(store: Store, server: RedisServer, tmp_path: Path) -> RunConfig:
    return small_config(tmp_path, server, f"run.name={store.keys.name}")


def written(config: RunConfig, folder: Path, name: str, **changed: object) -> Path:
    path = folder / name
    path.write_text(to_toml(config.model_copy(update=changed)))
    return path


async def test_an_upgrade_that_redefines_the_run_is_rejected(
    config: RunConfig, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load(written(config, tmp_path, "before.toml"))
    loss = config.loss.model_copy(update={"kl_beta": config.loss.kl_beta + 0.25})
    other = str(written(config, tmp_path, "other.toml", loss=loss))
    assert await asyncio.to_thread(main, [other]) == 0, "there is no run yet"
    await store.run.create(digest(before), "data", 4, 8, defining=defining(before))
    assert await asyncio.to_thread(main, [other]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert f"values of config: loss.kl_beta was {config.loss.kl_beta} and is {config.loss.kl_beta + 0.25}" in output
    for words in (f"run '{store.keys.name}' exists", "Set config.run.name to a new name", "nothing was changed"):
        assert words in output


async def test_allowed_changes_and_another_name_pass(config: RunConfig, store: Store, tmp_path: Path) -> None:
    before = written(config, tmp_path, "before.toml")
    await store.run.create(digest(load(before)), "data", 4, 8)
    optimizer = config.optimizer.model_copy(update={"learning_rate": 0.5})
    longer = config.run.model_copy(update={"steps": config.run.steps + 10})
    for changed in ({"optimizer": optimizer}, {"run": longer}):
        assert await asyncio.to_thread(main, [str(written(config, tmp_path, "new.toml", **changed))]) == 0
    named = config.run.model_copy(update={"name": f"{store.keys.name}-2"})
    loss = config.loss.model_copy(update={"kl_beta": 0.25})
    assert await asyncio.to_thread(main, [str(written(config, tmp_path, "new.toml", run=named, loss=loss))]) == 0


async def test_a_run_of_another_version_or_with_more_steps_is_rejected(config: RunConfig, store: Store, tmp_path: Path) -> None:
    path = written(config, tmp_path, "config.toml")
    await store.run.create(digest(load(path)), "data", 4, 8)
    assert await refusal(load(path)) == ""
    await store.client.hset(store.keys.run, "committed_step", config.run.steps)
    assert f"config.run.steps = {config.run.steps}, but run" in await refusal(load(path))
    await store.client.hset(store.keys.run, "protocol", 1)
    assert "has protocol version 1" in await refusal(load(path)), "its services would restart in a loop"
    assert await asyncio.to_thread(main, [str(path)]) == 2


def test_invalid_values_are_reported_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("[model]\npath = 'a/b'\nshape = 3\n")
    assert main([str(tmp_path / "config.toml"), "--offline"]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "model.shape" in output


def test_an_unreachable_redis_rejects_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(small_config(tmp_path, None, "redis.url=redis://127.0.0.1:1/0"), tmp_path, "config.toml")
    assert main([str(path)]) == 0
    assert "not compared with the run: Redis at redis://127.0.0.1:1/0 cannot be reached" in capsys.readouterr().out


def test_the_check_mounts_what_it_reads_and_is_deleted() -> None:
    values = {"rewards": {"files": {"a.py": "x = 1\n"}}, "environment": {"existingConfigMap": "ours", "internet": True}}
    values["storage"] = {"data": {"existingClaim": "prompts"}}
    values["config"] = {
        "verifiers": [{"kind": "python", "function": "/srv/grpo/rewards/a.py:score"}],
        "environments": [{"name": "e", "kind": "python", "function": "/srv/grpo/environments/e.py:E"}],
        "data": {"sources": [{"kind": "jsonl", "path": "/srv/grpo/data/x.jsonl", "environment": "e"}]},
    }
    objects = chart.render(values)
    hooks = [found for found in objects if "pre-upgrade" in found["metadata"].get("annotations", {}).get("helm.sh/hook", "")]
    assert {(found["kind"], found["metadata"]["name"]) for found in hooks} == {
        ("ConfigMap", "demo-check"), ("ConfigMap", "demo-check-rewards"), ("Job", "demo-check"),
    }  # fmt: skip
    for found in hooks:
        assert "hook-failed" in found["metadata"]["annotations"]["helm.sh/hook-delete-policy"], "nothing is left behind"
    job = chart.named(objects, "Job", "demo-check")
    assert job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-failed", "Helm 4 prints why"
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--offline" in container["command"], "on install the chart's Redis does not exist yet"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/srv/grpo/rewards"]["configMap"]["name"] == "demo-check-rewards"
    assert mounted["/srv/grpo/environments"]["configMap"]["name"] == "ours"
    assert all(source["secret"]["optional"] for source in mounted["/run/grpo/secrets"]["projected"]["sources"])
    external = {"redis": {"enabled": False, "external": {"url": "redis://redis.example.com:6379/0"}}}
    (container,) = chart.named(chart.render(external), "Job", "demo-check")["spec"]["template"]["spec"]["containers"]
    assert "--offline" not in container["command"]
