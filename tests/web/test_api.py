"""The endpoints that the page uses, over a real socket and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.runtime.loops import Loop
from services.store import Store
from services.web.feed import MAX_WATCHERS
from services.web.pages import POLICY, STATIC
from services.web.watch import Watch
from tests.support.flow import start
from tests.support.harness import small_config, wait_until
from tests.web.served import served

TOKEN = {"Authorization": "Bearer test-token"}


@pytest_asyncio.fixture
async def http(store: Store, server: RedisServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the console of a run."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", "generator.count=3")
    async with served(config, store) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


def row(step: int, incarnation: float = 1.0, reward: float | None = 0.5) -> dict[str, float]:
    return {"step": float(step), "time_s": 100.0 + step, "run/incarnation": incarnation, "reward/train/mean": reward}  # type: ignore[dict-item]


async def frames(http: httpx.AsyncClient, count: int) -> list[dict[str, object]]:
    """Return the next frames of the event stream."""
    found = []
    async with http.stream("GET", "/v1/console/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(msgspec.json.decode(line[6:]))
            if len(found) == count:
                return found
    return found


async def test_the_page_is_served_with_a_strict_security_policy(http: httpx.AsyncClient) -> None:
    files = [path.relative_to(STATIC) for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in ("/", *(f"/{file}" for file in files)):
        answer = await http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    page = (await http.get("/")).text
    assert "<script>" not in page
    assert "style=" not in page
    for path in ("/nothing", "/../api.py", "/%2e%2e/api.py", "/static"):
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


async def test_a_frame_shows_the_current_state_of_the_run(http: httpx.AsyncClient, store: Store) -> None:
    (before,) = await frames(http, 1)
    assert (before["state"], before["fault"]) == (None, "")
    await start(store)
    await store.run.pause("trainer", "me: a look")
    await store.monitor.record(row(0))
    first, second = await frames(http, 2)
    assert first["state"]["paused"] == {"trainer": "me: a look"}  # type: ignore[index]
    assert (first["steps"]["last"], first["steps"]["count"]) == (0, 1)  # type: ignore[index]
    assert second["at"] >= first["at"] + 0.5  # type: ignore[operator]


async def test_all_watchers_share_one_poll(http: httpx.AsyncClient, store: Store) -> None:
    await start(store)

    async def polls() -> int:
        stats = await store.client.info("commandstats")
        return stats["cmdstat_zrange"]["calls"] if "cmdstat_zrange" in stats else 0

    before = await polls()
    pages = [asyncio.create_task(frames(http, 3)) for _ in range(20)]
    found = await asyncio.gather(*pages)
    assert {len(each) for each in found} == {3}
    assert await polls() - before < 40, "twenty pages of three frames must not take sixty polls"

    async def resting() -> bool:
        at = await polls()
        await asyncio.sleep(2.5)
        return await polls() == at

    await wait_until(resting, 60.0)  # no page is open


async def test_the_number_of_watchers_is_limited(http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.web.feed.MAX_WATCHERS", 2)
    assert MAX_WATCHERS > 2
    await start(store)

    async def watch(shown: asyncio.Event) -> None:
        async with http.stream("GET", "/v1/console/live") as answer:
            async for _ in answer.aiter_lines():
                shown.set()

    events = [asyncio.Event(), asyncio.Event()]
    two = [asyncio.create_task(watch(shown)) for shown in events]
    for shown in events:  # both are connected before the next request
        await asyncio.wait_for(shown.wait(), 30.0)

    async def refused() -> bool:
        async with http.stream("GET", "/v1/console/live") as answer:
            return answer.status_code == 503

    await wait_until(refused, 30.0)
    for page in two:
        page.cancel()
    await asyncio.gather(*two, return_exceptions=True)

    async def room() -> bool:
        return not await refused()

    await wait_until(room, 30.0)


async def test_series_are_downsampled_and_follow_a_restore(http: httpx.AsyncClient, store: Store) -> None:
    await start(store)
    for step in range(10):
        await store.monitor.record(row(step, reward=None if step == 9 else float(step)))
    found = (await http.get("/v1/console/series", params={"points": 5})).json()
    assert found["steps"] == [1, 3, 5, 7, 9]
    assert found["columns"]["reward/train/mean"] == [0.5, 2.5, 4.5, 6.5, 8.0]
    assert found["columns"]["entropy/train/mean"] == [None] * 5
    for version in (4, 9):
        body = msgspec.json.encode({"eval/version": version, "run/incarnation": 1.0})
        await store.client.xadd(store.keys.evaluations, {"m": body})
    await asyncio.sleep(1.0)  # a poll is reused for half a second
    assert [one["eval/version"] for one in (await http.get("/v1/console/evaluations")).json()["rounds"]] == [9, 4]
    await store.monitor.record(row(6, incarnation=2.0, reward=60.0))
    await asyncio.sleep(1.0)  # a poll is reused for half a second
    again = (await http.get("/v1/console/series")).json()
    assert again["steps"] == list(range(7))
    assert again["columns"]["reward/train/mean"][6] == 60.0
    assert again["revision"] != found["revision"]
    assert [one["eval/version"] for one in (await http.get("/v1/console/evaluations")).json()["rounds"]] == [4]
    page = (await http.get("/v1/console/steps", params={"limit": 3, "before": 6})).json()
    assert [each["step"] for each in page["steps"]] == [5, 4, 3]
    assert (page["total"], page["next"]) == (7, 3)
    assert page["steps"][0]["metrics"]["reward/train/mean"] == 5.0


async def test_scopes_are_checked_by_the_server(http: httpx.AsyncClient, store: Store) -> None:
    await start(store)
    for headers, scope in (({}, ""), ({"Authorization": "Bearer wrong"}, ""), (TOKEN, "operate")):
        assert (await http.get("/v1/console/scope", headers=headers)).json() == {"scope": scope}
    for path in ("/v1/pause", "/v1/resume", "/v1/fleet/generators", "/v1/checkpoint", "/v1/restore", "/v1/run/stop"):
        assert (await http.post(path)).status_code in (401, 422), path
    assert (await http.post("/v1/deadletters/requeue", json={"all": True})).status_code == 401
    assert (await http.post("/v1/run/stop", headers=TOKEN, json={"why": "enough"})).status_code == 200
    state = await store.run.state()
    assert state is not None
    assert state.stopping == "REST: enough"


async def test_the_audit_and_the_facts_of_the_run_are_served(http: httpx.AsyncClient, store: Store) -> None:
    assert (await http.get("/v1/audit")).status_code == 503
    await start(store)
    assert (await http.get("/v1/audit")).json()["messages"] == []
    about = (await http.get("/v1/console/about")).json()
    assert about["run"] == store.keys.name
    assert about["facts"]["generator.count"] == 3
    assert "trained" in about["outcomes"]


async def test_an_unreachable_redis_is_reported_with_the_last_state(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await start(store)
    watch = Watch(store, 3.0)
    await watch.poll()
    good = msgspec.json.decode(watch.frame())

    async def gone() -> None:
        raise StoreError("Redis went away")

    monkeypatch.setattr(store.run, "state", gone)
    await asyncio.sleep(1.0)  # a poll is reused for half a second
    await watch.poll()
    bad = msgspec.json.decode(watch.frame())
    assert (good["fault"], bad["fault"]) == ("", "Redis went away")
    assert bad["state"] == good["state"]
    assert bad["looked_at"] == good["looked_at"]


@pytest.mark.parametrize(
    ("scaling", "awaited"), [("request", "a generator: 0 are desired (grpo scale N)"), ("cluster", "the generators to start")]
)
async def test_the_page_ignores_requests_that_nothing_follows(scaling: str, awaited: str, store: Store) -> None:
    await start(store)
    await store.run.scale_generators(0, "before")
    for kind in ("dataprep", "trainer"):
        await store.fleet.beat(PodStatus(kind, kind, "b", "here", 1, "", "ready", 0, 0, {}), 60)
    watch = Watch(store, 60.0, 2, scaling=scaling)
    await watch.poll()
    assert msgspec.json.decode(watch.frame())["awaited"] == awaited


async def test_the_last_frame_announces_the_end_of_the_console(store: Store) -> None:
    await start(store)
    watch, stopping = Watch(store, 3.0), asyncio.Event()
    following = asyncio.create_task(watch.follow(stopping, Loop("watch", lambda loop: watch.follow(stopping, loop), 30.0)))
    seen = []
    async for frame in watch.feed.subscribe():
        seen.append(frame.split(b"\n")[0])
        stopping.set()
    await following
    assert seen == [b"event: frame", b"event: bye"]
