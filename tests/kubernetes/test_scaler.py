"""The scaler: whoever changed last is followed, with the calls that its Role allows and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.config import ConfigError, to_toml
from services.console.__main__ import main
from services.console.local.redis_server import RedisServer
from services.protocol.messages import PodStatus
from services.runtime.entry import open_service
from services.runtime.http.api import serve
from services.runtime.http.credentials import ApiTokens
from services.runtime.process_tools import CONFIG_ENV
from services.runtime.service import Service
from services.scaler.__main__ import follow
from services.scaler.deployment import ClusterError, Deployment, DeploymentChanged, Replicas
from services.scaler.reconcile import Decision, decide
from services.store import Store
from services.store.records import Scale
from tests.kubernetes.api_server import ApiServer
from tests.support.harness import small_config, wait_until


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, Deployment]]:
    server = ApiServer(tmp_path / "account", "127.0.0.1", "ml", "demo-generator", 2)
    deployment = Deployment.in_cluster("demo-generator", server.environ, tmp_path / "account")
    yield server, deployment
    await deployment.close()
    server.close()


def test_the_last_change_is_followed() -> None:
    assert decide(Scale(), 2) == Decision(followed=2)
    assert decide(Scale(followed=2), 2) == Decision()
    assert decide(Scale(followed=2), 5) == Decision(wish=5, followed=5)
    assert decide(Scale(wanted=4, followed=2), 2) == Decision(replicas=4, followed=4)
    assert decide(Scale(wanted=4, followed=4), 4) == Decision()
    assert decide(Scale(wanted=4, followed=4), 0) == Decision(wish=0, followed=0)
    assert decide(Scale(wanted=3, followed=4), 6) == Decision(replicas=3, followed=3)
    assert decide(Scale(wanted=4), 4) == Decision(followed=4)
    assert decide(Scale(wanted=4), 1) == Decision(replicas=4, followed=4)


async def test_both_ways_over_tls(
    cluster: tuple[ApiServer, Deployment], store: Store, server: RedisServer, tmp_path: Path
) -> None:
    api, deployment = cluster
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    await store.run.create("config", "data", 4, 8)
    await store.run.scale_generators(3, "before")

    async def wanted() -> int | None:
        state = await store.run.state()
        assert state is not None
        return state.scale.wanted

    async def adopted(number: int) -> bool:
        return await wanted() == number

    async with open_service("scaler", config, "scaler-0") as service:

        async def work(loop: object) -> None:
            await follow(service, deployment, loop)  # type: ignore[arg-type]

        running = asyncio.create_task(service.run(work))
        await wait_until(lambda: api.replicas == 3, 60)
        await store.run.scale_generators(0, "grpo scale")
        await wait_until(lambda: api.replicas == 0, 60)
        api.scale(5)
        await wait_until(lambda: adopted(5), 60)
        assert api.replicas == 5
        service.stop()
        await asyncio.wait_for(running, 60)
    assert api.calls == {("get", api.path), ("patch", api.path)}


async def test_a_change_of_somebody_else_is_not_overwritten(cluster: tuple[ApiServer, Deployment]) -> None:
    api, deployment = cluster
    seen = await deployment.replicas()
    assert seen == Replicas(2, "1")
    api.scale(7)
    with pytest.raises(DeploymentChanged):
        await deployment.scale(4, seen)
    assert api.replicas == 7


async def test_a_refusal_says_what_was_asked(cluster: tuple[ApiServer, Deployment], tmp_path: Path) -> None:
    api, deployment = cluster
    (tmp_path / "account" / "token").write_text("of yesterday")
    with pytest.raises(ClusterError, match="401 Unauthorized"):
        await deployment.replicas()
    (tmp_path / "account" / "token").write_text(api.token)
    assert (await deployment.replicas()).count == 2
    with pytest.raises(ConfigError, match="needs a cluster"):
        Deployment.in_cluster("demo-generator", {}, tmp_path / "account")


@pytest.mark.parametrize(("scaling", "remedy"), [("keda", "generator.autoscaling.minReplicas"), ("kubectl", "use kubectl scale")])
async def test_a_wish_that_nobody_would_follow_is_refused(
    scaling: str, remedy: str, store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"fleet.scaling={scaling}")
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
