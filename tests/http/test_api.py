"""The REST endpoints that every service has, over a real socket and a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.config import ConfigError
from services.console.run.redis_server import RedisServer
from services.http.api import serve
from services.http.authorization import BODY_LIMIT_BYTES
from services.http.credentials import ApiTokens, api_tokens
from services.http.entry import open_service
from services.operations.control import POLL_S
from services.protocol.messages import PodStatus
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Store
from services.store.client import REPLY_TIMEOUT_S
from services.store.fleet import FleetCalls
from tests.support.harness import small_config, wait_until

TOKEN = {"Authorization": "Bearer test-token"}


@pytest_asyncio.fixture
async def service(store: Store, server: RedisServer, tmp_path: Path) -> AsyncIterator[Service]:
    """A generator pod of a run, without its loops."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    await store.run.create("config", "data", 4, 8)
    status = PodStatus("generator", "generator-0", "b00t", "here", 1, "", "ready", 3, 1, {})
    yield Service("generator", config, store, status)


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(service, ApiTokens("test-token")) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


def is_problem(answer: httpx.Response, status: int) -> bool:
    body = answer.json()
    return (
        answer.status_code == body["status"] == status
        and answer.headers["content-type"] == "application/problem+json"
        and set(body) == {"type", "title", "status", "detail"}
    )


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic dGVzdC10b2tlbg=="}])
async def test_mutating_calls_need_the_token(http: httpx.AsyncClient, store: Store, headers: dict[str, str]) -> None:
    for path in ("/v1/pause", "/v1/resume"):
        answer = await http.post(path, headers=headers)
        assert is_problem(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
    state = await store.run.state()
    assert state is not None
    assert state.paused == {}


async def test_a_wait_ends_when_its_client_leaves(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls, complies = list[float](), service.status

    async def members(*_: object) -> list[PodStatus]:
        polls.append(time.monotonic())
        return [complies]

    monkeypatch.setattr(FleetCalls, "members", members)
    waits = {"params": {"wait_s": 600}, "headers": TOKEN, "timeout": httpx.Timeout(5.0, read=0.3)}
    for path, body, paused in (("/v1/pause", {"why": "maintenance"}, False), ("/v1/resume", None, True)):
        complies = msgspec.structs.replace(complies, paused=paused)  # never
        with pytest.raises(httpx.ReadTimeout):
            await http.post(path, json=body, **waits)
        await wait_until(lambda: time.monotonic() - polls[-1] > 3 * POLL_S)
    answer = await http.post("/v1/resume", headers=TOKEN, params={"wait_s": 0.2})
    assert answer.json()["waiting_for"] == ["generator-0"]


async def test_pause_and_resume_reach_redis(http: httpx.AsyncClient, store: Store) -> None:
    answer = await http.post("/v1/pause", headers=TOKEN, json={"why": "maintenance"})
    assert answer.json() == {"role": "generator", "paused": True, "why": "REST: maintenance", "waiting_for": []}
    assert (await http.post("/v1/pause", headers=TOKEN, params={"role": "trainer"})).json()["role"] == "trainer"
    state = await store.run.state()
    assert state is not None
    assert state.paused == {"generator": "REST: maintenance", "trainer": "REST"}
    assert (await http.get("/v1/state")).json()["state"]["paused"]["generator"] == "REST: maintenance"
    await http.post("/v1/resume", headers=TOKEN)
    state = await store.run.state()
    assert state is not None
    assert state.paused == {"trainer": "REST"}


async def test_scaling_generators_is_a_request_stored_in_redis(http: httpx.AsyncClient, store: Store) -> None:
    assert is_problem(await http.post("/v1/fleet/generators", json={"replicas": 3}), 401)
    answer = await http.post("/v1/fleet/generators", headers=TOKEN, json={"replicas": 3})
    assert (answer.status_code, answer.json()) == (200, {"replicas": 3, "why": "REST", "waiting_for": ["3 more generators"]})
    await http.post("/v1/fleet/generators", headers=TOKEN, json={"replicas": 0, "why": "night"})
    assert (await http.get("/v1/state")).json()["state"]["scale"] == {
        "wanted": 0, "why": "REST: night", "most": None, "followed": None, "object": None,
    }  # fmt: skip
    for wrong in ({"replicas": -1}, {}, {"replicas": "many"}):
        assert is_problem(await http.post("/v1/fleet/generators", headers=TOKEN, json=wrong), 422)
    await store.run.bound_generators(2)
    refused = await http.post("/v1/fleet/generators", headers=TOKEN, json={"replicas": 3})
    assert is_problem(refused, 409)
    assert "exceeds the 2 that the run's machine allows" in refused.json()["detail"]
    state = await store.run.state()
    assert state is not None
    assert state.scale.wanted == 0


async def test_the_state_shows_run_and_pod(http: httpx.AsyncClient, store: Store) -> None:
    body = (await http.get("/v1/state")).json()
    assert body["run"] == store.keys.name
    assert (body["pod"]["phase"], body["pod"]["version"]) == ("ready", 3)
    assert (body["state"]["slots"], body["state"]["committed_step"]) == (8, -1)


async def test_liveness_follows_the_loops(http: httpx.AsyncClient, service: Service) -> None:
    async def body(_: Loop) -> None: ...

    loop = service.add_loop("leases", body, limit_s=5.0)
    service.add_loop("notifications", body, limit_s=float("inf"))
    answer = await http.get("/health/live")
    assert (answer.status_code, answer.json()["alive"]) == (200, True)
    assert answer.json()["loops"]["notifications"]["limit_s"] is None
    loop.last_progress -= 60.0
    answer = await http.get("/health/live")
    assert (answer.status_code, answer.json()["alive"]) == (503, False)
    assert {name: health["alive"] for name, health in answer.json()["loops"].items()} == {"leases": False, "notifications": True}


async def test_a_pod_that_waits_for_a_hanging_redis_is_alive(http: httpx.AsyncClient, service: Service) -> None:
    async def body(_: Loop) -> None: ...

    loop = service.add_loop("view", body)
    loop.last_progress -= REPLY_TIMEOUT_S + 1.0
    assert (await http.get("/health/live")).status_code == 200
    loop.last_progress -= 60.0
    assert (await http.get("/health/live")).status_code == 503


async def test_readiness_reports_the_reason(http: httpx.AsyncClient, service: Service) -> None:
    assert (await http.get("/health/ready")).json() == {"ready": True, "phase": "ready", "why_not": ""}
    service.ready = lambda: "holds policy version 2, published is 3"
    answer = await http.get("/health/ready")
    assert (answer.status_code, answer.json()["why_not"]) == (503, "holds policy version 2, published is 3")


async def test_errors_have_one_shape(http: httpx.AsyncClient) -> None:
    assert is_problem(await http.get("/v1/nothing"), 404)
    assert is_problem(await http.get("/v1/pause"), 405)
    assert is_problem(await http.post("/v1/pause", headers=TOKEN, params={"role": "king"}), 422)
    long = await http.post("/v1/pause", headers=TOKEN, json={"why": "x" * 201})
    assert is_problem(long, 422)
    assert "why" in long.json()["detail"]


JSON = {"content-type": "application/json"}
MISTAKES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "/v1/nothing", {}, 404, "Not Found: GET /v1/nothing; /openapi.json lists the endpoints of this service"),
    ("GET", "/v1/pause", {}, 405, "Method Not Allowed: GET /v1/pause; use POST"),
    ("POST", "/v1/pause", {"json": {"mode": "drain"}}, 422, "body.mode: there is no such field"),
    ("POST", "/v1/fleet/generators", {"json": {"replicas": 1, "count": 2}}, 422, "body.count: there is no such field"),
    ("POST", "/v1/pause", {"params": {"wait": "9"}}, 422, "query.wait: there is no such parameter; those of this call"),
    ("POST", "/v1/fleet/generators", {"json": {"replicas": True}}, 422, "body.replicas: "),
    ("POST", "/v1/pause", {"params": [("role", "trainer"), ("role", "generator")]}, 422, "query.role: this parameter is given"),
    ("POST", "/v1/pause", {"content": '{"mode":', "headers": JSON}, 422, "body: not JSON at character 8: Expecting value"),
    ("POST", "/v1/pause", {"data": {"{}": ""}}, 422, "content-type: 'application/x-www-form-urlencoded' is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "sent", "status", "detail"), MISTAKES)
async def test_a_mistaken_request_changes_nothing_and_says_what_to_correct(
    http: httpx.AsyncClient, store: Store, method: str, path: str, sent: dict[str, Any], status: int, detail: str
) -> None:
    answer = await http.request(method, path, **{**sent, "headers": TOKEN | sent.get("headers", {})})
    assert is_problem(answer, status)
    assert answer.json()["detail"].startswith(detail)
    state = await store.run.state()
    assert state is not None
    assert (state.paused, state.scale.wanted) == ({}, None)
    assert (await http.get("/v1/state", params={"_": "1"})).status_code == 200, "what changes nothing may be asked in any way"


async def test_a_missing_and_an_unknown_token_are_told_apart(http: httpx.AsyncClient) -> None:
    for headers, why in (({}, "there is no token: "), ({"Authorization": "Bearer wrong"}, "the token is unknown: ")):
        detail = (await http.post("/v1/pause", headers=headers)).json()["detail"]
        assert detail.startswith(why)
        assert "runs/NAME/api-token" in detail


async def test_request_bodies_are_limited(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{}"

    assert is_problem(await http.post("/v1/pause", headers=TOKEN, content=b"x" * (BODY_LIMIT_BYTES + 1)), 413)
    assert is_problem(await http.post("/v1/pause", headers=TOKEN, content=endless()), 413)


async def test_metrics_are_prometheus_text(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")


async def test_a_port_in_use_is_an_error_with_a_remedy(service: Service, http: httpx.AsyncClient) -> None:
    taken = service.config.api.model_copy(update={"port": http.base_url.port})
    other = Service("generator", service.config.model_copy(update={"api": taken}), service.store, service.status)
    with pytest.raises(ConfigError, match=rf"api.port = {http.base_url.port}: .* choose another port, or 0"):
        async with serve(other, ApiTokens("test-token")):
            pass


async def test_endpoints_can_be_served_over_ipv6(service: Service) -> None:
    api = service.config.api.model_copy(update={"host": "::1"})
    other = Service("generator", service.config.model_copy(update={"api": api}), service.store, service.status)
    async with serve(other, ApiTokens("test-token")) as url, httpx.AsyncClient(base_url=url) as client:
        assert url.startswith("http://[::1]:")
        assert (await client.get("/health/live")).status_code == 200


def test_a_missing_token_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_API_TOKEN", raising=False)
    config = small_config(tmp_path)
    open_door = config.model_copy(update={"api": config.api.model_copy(update={"token_file": ""})})
    with pytest.raises(ConfigError, match=r"api\.token_file"):
        api_tokens(open_door)
    monkeypatch.setenv("GRPO_API_TOKEN", "from-environment")
    assert api_tokens(open_door) == ApiTokens("from-environment")
    assert api_tokens(config) == ApiTokens("test-token")


async def _until_ready(store: Store) -> None:
    async with asyncio.timeout(30):
        while [status.phase for status in await store.fleet.members(5.0)] != ["ready"]:
            await asyncio.sleep(0.01)


async def test_a_service_is_in_the_fleet_until_the_run_ends(store: Store, server: RedisServer, tmp_path: Path) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    await store.run.create("config", "data", 4, 8)
    async with open_service("generator", config, "generator-0") as service:

        async def work(loop: Loop) -> None:
            service.say(phase="ready", version=0)
            await service.stopping.wait()

        running = asyncio.create_task(service.run(work))
        await _until_ready(store)
        await store.run.finish("trained 4 of 4 steps")
        await asyncio.wait_for(running, 30)
    assert await store.fleet.members(5.0) == []


async def test_a_stopped_pod_does_not_wait_for_a_run(service: Service) -> None:
    assert not await service.created(limit_s=0.01)
    waiting = asyncio.create_task(service.created())
    await asyncio.sleep(0)
    service.stop()
    assert not await asyncio.wait_for(waiting, 30)
    await service.view.refresh()
    assert await service.created()
