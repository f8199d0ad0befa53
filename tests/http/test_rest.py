"""The pod of a finished run stays idle until it is terminated or the run is restored to a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.http.entry import Arguments, open_service, rest
from services.runtime.process_tools import free_port
from services.store import Store
from tests.support.harness import small_config, wait_until


@pytest.fixture
def config(store: Store, server: RedisServer, tmp_path: Path) -> RunConfig:
    return small_config(tmp_path, server, f"run.name={store.keys.name}", f"api.port={free_port()}")


async def test_a_pod_of_an_unfinished_run_does_not_rest(config: RunConfig, store: Store) -> None:
    given = Arguments(config, "generator-0", stay=True)
    assert not await rest("generator", given)  # there is no run yet
    await store.run.create("config", "data", 4, 8)
    assert not await rest("generator", given)
    await store.run.finish("done")
    assert not await rest("generator", Arguments(config, "generator-0"))  # without --stay the process ends


async def test_an_idle_pod_is_ready_and_resumes_with_the_run(
    config: RunConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.http.entry.REST_POLL_S", 0.05)
    await store.run.create("config", "data", 4, 8)
    await store.run.finish("trained 4 of 4 steps")
    resting = asyncio.create_task(rest("generator", Arguments(config, "generator-0", stay=True)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.api.port}") as http:

        async def rests() -> bool:
            try:
                answer = await http.get("/health/ready")
            except httpx.TransportError:
                return False
            return answer.json() == {"ready": True, "phase": "finished", "why_not": ""}

        await wait_until(rests, 60)
        assert (await http.get("/health/live")).status_code == 200
    assert not resting.done()
    await store.run.request_restore(1)
    assert await asyncio.wait_for(resting, 60) is False


async def test_a_pod_announces_the_address_given_by_the_cluster(
    config: RunConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    anywhere = config.model_copy(update={"api": config.api.model_copy(update={"host": "0.0.0.0"})})
    for address, shown in (("10.1.2.3", "10.1.2.3"), ("fd00::7", "[fd00::7]")):
        monkeypatch.setenv("GRPO_ADDRESS", address)
        async with open_service("generator", anywhere, "generator-0") as service:
            assert service.status.url == f"http://{shown}:{config.api.port}"
