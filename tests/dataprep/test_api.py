"""Dataprep's endpoints over a real socket and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.http.api import serve
from services.http.credentials import ApiTokens
from services.http.endpoints import add_run_routes
from services.protocol.messages import PodStatus
from services.runtime.service import Service
from services.store import Store
from tests.support import flow
from tests.support.flow import buffer, claim, header, issue, payload_bytes, prepare, settle, start
from tests.support.harness import save_tokenizer_folder, small_config

TOKEN = {"Authorization": "Bearer test-token"}


@pytest_asyncio.fixture
async def http(store: Store, server: RedisServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the endpoints of a dataprep pod without its loops."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(tmp_path / "model")
    status = PodStatus("dataprep", "dataprep-0", "b00t", "here", 1, "", "standby", -1, 0, {})
    service = Service("dataprep", config, store, status)
    async with serve(service, ApiTokens("test-token")) as url, httpx.AsyncClient(base_url=url) as client:
        add_run_routes(service)
        yield client


async def bury(store: Store, team: flow.Team, count: int) -> list[str]:
    """Create dead letters; return their ids, newest first."""
    await issue(store, team, count)
    for one in await claim(store, "g", count):
        assert await store.tickets.fail("g", one, "verifier broke", max_attempts=1)
    return [letter.id for letter in await store.dead_letters.page(count)]


def is_problem(answer: httpx.Response, status: int, detail: str) -> bool:
    body = answer.json()
    return (
        answer.status_code == body["status"] == status
        and answer.headers["content-type"] == "application/problem+json"
        and detail in body["detail"]
    )


async def test_the_buffer_is_paged(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 5)
    found = (await http.get("/v1/buffer", params={"limit": 2, "offset": 1, "reverse": True})).json()
    assert (found["size"], found["sampler"], found["offset"]) == (5, "fifo", 1)
    assert [group["group"] for group in found["groups"]] == ["0-3", "0-2"]
    assert is_problem(await http.get("/v1/buffer", params={"sort": "weight"}), 404, "no weights to sort by")
    assert is_problem(await http.get("/v1/buffer", params={"sort": "colour"}), 422, "sort")
    assert is_problem(await http.get("/v1/buffer", params={"limit": 501}), 422, "limit")
    assert is_problem(await http.get("/v1/buffer", params={"offset": -1}), 422, "offset")


async def test_a_group_is_shown_with_its_text_and_place(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    found = (await http.get("/v1/groups/0-0", params={"limit": 2})).json()
    assert (found["place"], found["size"], len(found["completions"])) == ("replay", 4, 2)
    assert [one["advantage"] for one in found["completions"]] == pytest.approx([-1.0, 1.0])
    assert found["prompt"]["text"] == "<|end|><|system|>"  # tokens 1 and 2 of the tiny tokenizer
    assert is_problem(await http.get("/v1/groups/0-9"), 404, "unknown ticket 0-9")
    assert is_problem(await http.get("/v1/groups/nine"), 404, "is not a ticket")
    assert is_problem(await http.get("/v1/groups/0-0", params={"limit": 65}), 422, "limit")


async def test_a_group_without_its_tokens_names_the_sample_log(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    await prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, 1)
    await store.steps.checkpointed(team.trainer, 0)
    await store.steps.retire()
    found = (await http.get("/v1/groups/0-0")).json()
    assert (found["place"], found["completions"]) == ("trained", [])
    assert """grpo samples RUN --where "group == '0-0'" shows them""" in found["where"]


async def test_weight_sync_is_shown(http: httpx.AsyncClient, store: Store) -> None:
    await start(store)
    await store.fleet.beat(PodStatus("generator", "generator-0", "b", "here", 1, "", "ready", 0, 1, {}), 60.0)
    found = (await http.get("/v1/sync")).json()
    assert (found["published"], found["sent_bytes"]) == (0, None)
    assert [(one["member"], one["behind"], one["bytes"]) for one in found["members"]] == [("generator-0:b", 0, None)]


async def test_a_step_is_shown_or_reported_as_missing(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0", "0-1"])
    found = (await http.get("/v1/steps/0", params={"limit": 1, "offset": 1})).json()
    assert (found["state"], found["plan"]["size"], found["record"]) == ("prepared", 2, None)
    assert [group["group"] for group in found["plan"]["groups"]] == ["0-1"]
    assert is_problem(await http.get("/v1/steps/1"), 404, "step 1 is not prepared yet: the last one is step 0")
    for none in ("minus", "-1", "99999999999999999999"):
        assert is_problem(await http.get(f"/v1/steps/{none}"), 422, "n")


async def test_dead_letters_are_listed_shown_and_requeued(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    ids = await bury(store, team, 3)
    first = (await http.get("/v1/deadletters", params={"limit": 2})).json()
    assert ([row["id"] for row in first["letters"]], first["next"], first["total"]) == (ids[:2], ids[1], 3)
    rest = (await http.get("/v1/deadletters", params={"limit": 2, "before": first["next"]})).json()
    assert ([row["id"] for row in rest["letters"]], rest["next"]) == (ids[2:], None)
    found = (await http.get(f"/v1/deadletters/{ids[0]}")).json()
    assert (found["kind"], found["fields"]["answer"], found["hex"]) == ("ticket", "2", None)
    assert is_problem(await http.get("/v1/deadletters/5-5"), 404, "there is no dead letter 5-5")
    assert is_problem(await http.get("/v1/deadletters", params={"before": "x"}), 404, "is not the id of a dead letter")
    answer = (await http.post("/v1/deadletters/requeue", headers=TOKEN, json={"ids": [ids[0], "5-5"]})).json()
    assert ([row["ticket"] for row in answer["requeued"]], [row["id"] for row in answer["refused"]]) == (["0-2"], ["5-5"])
    answer = (await http.post("/v1/deadletters/requeue", headers=TOKEN, json={"all": True})).json()
    assert (len(answer["requeued"]), answer["refused"]) == (2, [])
    assert (await store.run.audit())["requeued"] == 3


@pytest.mark.parametrize(
    "body", [{}, {"ids": []}, {"ids": ["1-1"], "all": True}, {"all": False}, {"everything": True}, {"ids": ["1-1"] * 1001}, []]
)
async def test_a_requeue_must_select_letters(http: httpx.AsyncClient, store: Store, body: object) -> None:
    team = await start(store)
    await bury(store, team, 1)
    assert is_problem(await http.post("/v1/deadletters/requeue", headers=TOKEN, json=body), 422, "body")
    assert await store.dead_letters.count() == 1


async def test_a_requeue_needs_the_token_and_an_unfinished_run(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    before, _ = await bury(store, team, 2)
    assert is_problem(await http.post("/v1/deadletters/requeue", json={"all": True}), 401, "there is no token")
    await store.dead_letters.requeue([before])
    await store.run.finish("trained 4 of 4 steps")
    over = await http.post("/v1/deadletters/requeue", headers=TOKEN, json={"all": True})
    assert is_problem(over, 409, "the run is over: trained 4 of 4 steps")
    assert await store.dead_letters.count() == 1
    again = (await http.post("/v1/deadletters/requeue", headers=TOKEN, json={"ids": [before]})).json()
    assert [(row["id"], row["before"]) for row in again["requeued"]] == [(before, True)]


async def test_nonfinite_numbers_are_null(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "g")
    bad = header(one, rewards=[float("nan"), float("inf"), 0.0, 1.0])
    assert await store.tickets.submit("g", one, bad, payload_bytes(one), 60)
    assert (await http.get("/v1/groups/0-0")).json()["completions"][1]["reward"] is None
    await settle(store, team, "failed:rewards are not finite")
    (letter,) = await store.dead_letters.page()
    assert (await http.get(f"/v1/deadletters/{letter.id}")).json()["fields"]["rewards"] == [None, None, 0.0, 1.0]


async def test_the_endpoints_are_documented(http: httpx.AsyncClient) -> None:
    """Every field of every response has a description."""
    spec = (await http.get("/openapi.json")).json()
    for path in ("/v1/buffer", "/v1/groups/{id}", "/v1/steps/{n}", "/v1/deadletters", "/v1/deadletters/{id}"):
        answer = spec["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert "$ref" in answer
    described = spec["components"]["schemas"]
    for name in ("Buffer", "BufferGroup", "Group", "Completion", "Step", "Plan", "StepGroup", "DeadLetters", "DeadLetterBody"):
        bare = [field for field, of in described[name]["properties"].items() if "description" not in of and "$ref" not in of]
        assert bare in ([], ["step"])  # a field `step` needs no description


async def test_the_ledger_counts_places(http: httpx.AsyncClient, store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    assert (await http.get("/v1/ledger")).json()["buffered"] == 2
