"""The scaler follows the last change, and makes only the calls that its Role allows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from services.config import ConfigError, to_toml
from services.console.commands.__main__ import main
from services.console.run.redis_server import RedisServer
from services.http.api import serve
from services.http.credentials import ApiTokens
from services.http.entry import open_service
from services.operations.control import RunControl
from services.protocol.messages import PodStatus
from services.runtime.process_tools import CONFIG_ENV
from services.runtime.service import Service
from services.scaler.__main__ import ReleaseFollower, ScalerSettings
from services.scaler.reconcile import Decision, decide, whole_or_none
from services.scaler.workload import ClusterError, KubernetesApi, WorkloadChanged
from services.store import Store
from services.store.records import Scale
from tests.kubernetes.support.api_server import ApiServer
from tests.kubernetes.support.scaler import SETTINGS, following
from tests.support.harness import small_config, wait_until


def test_the_scaler_follows_the_last_change() -> None:
    def of(wanted: int | None, followed: int | None) -> Scale:
        return Scale(wanted=wanted, followed=followed, object="it")

    assert decide(of(None, 2), 2, "it") == Decision()
    assert decide(of(None, 2), 5, "it") == Decision(requested=5, followed=5)
    assert decide(of(4, 2), 2, "it") == Decision(replicas=4, followed=4)
    assert decide(of(4, 4), 4, "it") == Decision()
    assert decide(of(4, 4), 0, "it") == Decision(requested=0, followed=0)
    assert decide(of(4, 4), 1, "it") == Decision(requested=1, followed=1)
    assert decide(of(3, 4), 6, "it") == Decision(replicas=3, followed=3)


def test_a_new_deployment_gets_the_initial_or_last_requested_size() -> None:
    """A manifest without replicas gets 1. Any other number was set by someone."""
    assert decide(Scale(), 1, "new", 3) == Decision(replicas=3, followed=3, object="new")
    assert decide(Scale(), 3, "new", 3) == Decision(requested=3, followed=3, object="new")
    assert decide(Scale(wanted=6, followed=6, object="old"), 1, "new", 3) == Decision(replicas=6, followed=6, object="new")
    assert decide(Scale(wanted=6, followed=6, object="old"), 4, "new", 3) == Decision(requested=4, followed=4, object="new")
    # from a version that set replicas in the manifest, with a request that is not yet followed
    assert decide(Scale(wanted=5, followed=3), 3, "new", 2) == Decision(replicas=5, followed=5, object="new")
    # requested before the run existed, while the scaler or an operator set another number
    for replicas in (3, 4):
        assert decide(Scale(wanted=2), replicas, "new", 3) == Decision(replicas=2, followed=2, object="new")
    # scaled to zero when the run finished, then resumed
    before = Scale(wanted=6, followed=6, object="it")
    for replicas in (0, 1):
        assert decide(before, replicas, "it", 3, emptied=True) == Decision(replicas=6, followed=6, object="it")
    assert decide(before, 2, "it", 3, emptied=True) == Decision(requested=2, followed=2, object="it")
    # scaled to zero when the previous run of the release finished, or by an operator
    assert decide(Scale(), 0, "it", 3, emptied=True) == Decision(replicas=3, followed=3, object="it")
    assert decide(Scale(), 0, "it", 3) == Decision(requested=0, followed=0, object="it")


def test_trainer_and_judge_have_all_replicas_or_none() -> None:
    assert whole_or_none(2, 1, emptied=False) == 2
    assert whole_or_none(2, 4, emptied=False) == 2
    assert whole_or_none(2, 2, emptied=False) is None
    assert whole_or_none(2, 0, emptied=False) is None
    assert whole_or_none(2, 0, emptied=True) == 2


async def test_requests_and_kubectl_are_followed_over_tls(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    await store.run.create("config", "data", 4, 8)
    await store.run.scale_generators(3, "before")

    async def adopted(number: int) -> bool:
        state = await store.run.state()
        assert state is not None
        return state.scale.wanted == number

    async with open_service("scaler", config, "scaler-0") as service:
        follower = ReleaseFollower(service, SETTINGS, kubernetes)
        running = asyncio.create_task(service.run(follower.follow))
        await wait_until(lambda: api.replicas == 3, 60)
        await store.run.scale_generators(0, "grpo scale")
        await wait_until(lambda: api.replicas == 0, 60)
        api.scale(5)
        await wait_until(lambda: adopted(5), 60)
        assert api.replicas == 5
        service.stop()
        await asyncio.wait_for(running, 60)
    scaled = {(verb, each.path) for verb in ("get", "patch") for each in (api.generators, api.trainer)}
    assert api.calls == scaled | {("get", api.config_map)}


async def test_the_initial_size_is_set_once_before_the_run_exists(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(None)
        assert (api.replicas, api.trainer.replicas) == (3, 2)
        api.scale(1)
        await follower.once(None)
        assert api.replicas == 1
        await store.run.create("config", "data", 4, 8)
        api.scale(4)
        await follower.once(await store.run.state())
        state = await store.run.state()
        assert state is not None
        assert (api.replicas, state.scale.wanted, state.scale.object) == (4, 4, api.generators.uid)


async def test_a_request_from_before_the_run_is_followed_once_it_exists(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(None)
        assert api.replicas == 3
        await RunControl(store, 10).scale(2, "GPUs are short", "me")
        assert await store.run.state() is None
        await store.run.create("config", "data", 4, 8)
        for _ in range(2):
            await follower.once(await store.run.state())
            state = await store.run.state()
            assert state is not None
            assert (api.replicas, state.scale.wanted, state.scale.why) == (2, 2, "me: GPUs are short")


async def test_a_reinstalled_release_keeps_its_former_size(
    cluster: tuple[ApiServer, KubernetesApi], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, kubernetes = cluster
    await store.run.create("config", "data", 4, 8)
    async with following(store, server, tmp_path, kubernetes) as follower:
        await follower.once(await store.run.state())
        api.scale(6)
        await follower.once(await store.run.state())
        api.recreate()
        assert api.replicas == 1
        await follower.once(await store.run.state())
        assert api.replicas == 6
        await follower.once(await store.run.state())
        api.scale(1)  # the number that the Deployment started with
        await follower.once(await store.run.state())
        state = await store.run.state()
        assert state is not None
        assert (api.replicas, state.scale.wanted) == (1, 1)


async def test_a_leader_worker_set_has_one_group_or_none(store: Store, server: RedisServer, tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account", "127.0.0.1", "ml", "demo-generator", kind="LeaderWorkerSet")
    kubernetes = KubernetesApi.in_cluster(api.environ, tmp_path / "account")
    settings = replace(SETTINGS, trainer_kind="LeaderWorkerSet", trainer_replicas=1)
    await store.run.create("config", "data", 4, 8)
    try:
        async with following(store, server, tmp_path, kubernetes, settings) as follower:
            await follower.once(await store.run.state())
            assert api.trainer.replicas == 1
            await store.run.finish("4 steps trained")
            await follower.once(await store.run.state())
            assert api.trainer.replicas == 0
    finally:
        await kubernetes.close()
        api.close()
    assert ("patch", "/apis/leaderworkerset.x-k8s.io/v1/namespaces/ml/leaderworkersets/demo-trainer/scale") in api.calls


async def test_concurrent_changes_are_not_overwritten(cluster: tuple[ApiServer, KubernetesApi]) -> None:
    api, kubernetes = cluster
    generators = kubernetes.workload("Deployment", "demo-generator")
    seen = await generators.replicas()
    assert (seen.count, seen.version, seen.uid) == (1, "1", api.generators.uid)
    api.scale(7)
    with pytest.raises(WorkloadChanged):
        await generators.scale(4, seen)
    assert api.replicas == 7


async def test_a_rejected_call_is_named_in_the_error(cluster: tuple[ApiServer, KubernetesApi], tmp_path: Path) -> None:
    api, kubernetes = cluster
    with pytest.raises(ClusterError, match="read Deployment another: 403"):
        await kubernetes.workload("Deployment", "another").replicas()
    api.token = "of tomorrow"
    with pytest.raises(ClusterError, match="401"):
        await kubernetes.workload("Deployment", "demo-generator").replicas()
    with pytest.raises(ConfigError, match="needs a cluster"):
        KubernetesApi.in_cluster({}, tmp_path / "account")


def test_invalid_settings_are_rejected() -> None:
    rejected = {
        "": "truncated",
        '{"trainer": "t", "notes": "n", "replicas": "two"}': r"Expected `int`, got `str` - at `\$.replicas`",
        '{"trainer": "t", "notes": "n", "trainer_kind": "DaemonSet"}': "Invalid enum value 'DaemonSet'",
        '{"trainer": "t", "notes": "n", "size": 1}': "unknown field `size`",
        '{"trainer": "t"}': "needs `trainer` and `notes`",
    }
    for text, named in rejected.items():
        with pytest.raises(ConfigError, match=named):
            ScalerSettings.from_environment({"GRPO_SCALER": text})


async def test_a_request_that_nothing_would_follow_is_rejected(
    store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remedy = "use kubectl scale or generator.autoscaling.minReplicas"
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", "fleet.scaling=cluster")
    await store.run.create("config", "data", 4, 8)
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "run.toml"))
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert await asyncio.to_thread(main, ["scale", "generators", "3"]) == 2
    assert remedy in capsys.readouterr().err
    service = Service("generator", config, store, PodStatus("generator", "g", "b", "here", 1, "", "ready", 0, 1, {}))
    async with serve(service, ApiTokens("token")) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/fleet/generators", headers={"Authorization": "Bearer token"}, json={"replicas": 3})
    assert (answer.status_code, remedy in answer.json()["detail"]) == (409, True)
    state = await store.run.state()
    assert state is not None
    assert state.scale.wanted is None


@pytest.mark.parametrize(("scaling", "shown"), [("request", "0 running, 8 desired (before)"), ("cluster", "0 running\n")])
async def test_status_ignores_requests_that_nothing_follows(
    scaling: str, shown: str, store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They were made before the release got an autoscaler."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"fleet.scaling={scaling}")
    await store.run.create("config", "data", 4, 8)
    await store.run.scale_generators(8, "before")
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "run.toml"))
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert await asyncio.to_thread(main, ["status"]) == 0
    assert f"generators: {shown}" in capsys.readouterr().out
