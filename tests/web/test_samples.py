"""The endpoints through which the page reads the sample log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from services.console.local.redis_server import RedisServer
from services.operations.samples.folder import LogStatus
from services.store import Store
from services.web.samples import CUT
from tests.operations.samples.made import made_row, write_log
from tests.support.flow import start
from tests.support.harness import save_tokenizer_folder, small_config
from tests.web.served import served


@pytest_asyncio.fixture
async def http(store: Store, server: RedisServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(tmp_path / "model")
    await start(store)
    rows = [made_row(i) for i in range(40)] + [
        made_row(40, payload="0-10.r9", completion="of before a restore", tokens=[5], logprobs=[-1.0]),
        made_row(40, completion="x" * 1000, tokens=[5, 6, 7], logprobs=[-1.0, float("nan"), -2.0]),
    ]
    write_log(tmp_path / store.keys.name / "samples", rows).note(LogStatus({"stale": 2}))
    async with served(config, store) as url, httpx.AsyncClient(base_url=f"{url}/v1/console", timeout=30) as client:
        yield client


async def test_completions_are_searched_and_paged(http: httpx.AsyncClient) -> None:
    found = (await http.get("/samples", params={"where": "reward >= 0.5", "sort": "step", "limit": 3, "offset": 1})).json()
    assert (found["total"], found["of"], found["searched"], found["missed_groups"]) == (20, 42, 42, {"stale": 2})
    assert [row["sample"] for row in found["rows"]] == [2, 3, 2]
    [row] = (await http.get("/samples", params={"limit": 1})).json()["rows"]
    assert len(row["completion"]) == CUT + 1
    assert "tokens" not in row


async def test_a_completion_is_returned_token_by_token(http: httpx.AsyncClient) -> None:
    found = (await http.get("/samples/one", params={"payload": "0-10.7", "step": 5, "outcome": "trained", "sample": 0})).json()
    assert found["row"]["scores"] == {"exact": 0.0}
    assert found["row"]["payload"] == "0-10.7"
    assert [token["logprob"] for token in found["tokens"]] == [-1.0, None, -2.0]
    assert all(token["text"] for token in found["tokens"])
    assert found["note"] == ""


async def test_invalid_queries_are_errors_with_a_reason(http: httpx.AsyncClient) -> None:
    answer = await http.get("/samples", params={"where": "rewrad < 1"})
    assert answer.status_code == 422
    assert "no column 'rewrad'" in answer.json()["detail"]
    answer = await http.get("/samples/one", params={"payload": "0-99.7", "step": 5, "outcome": "trained", "sample": 0})
    assert answer.status_code == 404
    answer = await http.get("/samples/one", params={"payload": "' or True or '", "step": 5, "outcome": "trained"})
    assert answer.status_code == 422
