"""The endpoints through which the page reads the sample log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.operations.samples.folder import LogPosition, LogStatus
from services.operations.samples.search import SamplePage, Search
from services.runtime.loops import end_tasks
from services.store import Store
from services.tracker.writer import PartWriter
from services.web import samples
from services.web.samples import CUT
from tests.operations.samples.made import columns_of, made_row, write_log
from tests.support.flow import start
from tests.support.harness import save_tokenizer_folder, small_config, wait_until
from tests.web.served import served


@pytest.fixture
def log(store: Store, tmp_path: Path) -> Path:
    """Return the folder of the log."""
    return tmp_path / store.keys.name / "samples"


@pytest_asyncio.fixture
async def http(store: Store, server: RedisServer, tmp_path: Path, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(tmp_path / "model")
    await start(store)
    rows = [made_row(i) for i in range(40)] + [
        made_row(40, payload="0-10.r9", completion="of before a restore", tokens=[5], logprobs=[-1.0]),
        made_row(40, completion="x" * 1000, tokens=[5, 6, 7], logprobs=[-1.0, float("nan"), -2.0]),
    ]
    write_log(log, rows).note(LogStatus({"stale": 2}))
    async with served(config, store) as url, httpx.AsyncClient(base_url=f"{url}/v1/console", timeout=30) as client:
        yield client


async def test_completions_are_searched_and_paged(http: httpx.AsyncClient) -> None:
    found = (await http.get("/samples", params={"where": "reward >= 0.5", "sort": "step", "limit": 3, "offset": 1})).json()
    assert (found["total"], found["of"], found["missed_groups"]) == (20, 42, {"stale": 2})
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


async def test_a_completion_is_told_from_the_one_that_a_restore_has_undone(http: httpx.AsyncClient, log: Path) -> None:
    again = made_row(8, incarnation=9, completion="trained again")
    PartWriter(log, 1000).write(columns_of([again]), LogPosition(9, 1, {"1": 0, "9": 1}))  # restored to step 0
    where = "group == '0-2' and sample == 0 and (undone or not undone)"
    rows = (await http.get("/samples", params={"where": where})).json()["rows"]
    assert {row["incarnation"]: row["completion"] for row in rows} == {1: "it is 8", 9: "trained again"}
    asked = {"payload": "0-2.7", "step": 1, "outcome": "trained", "sample": 0}
    for given, text in (({"incarnation": 1}, "it is 8"), ({"incarnation": 9}, "trained again"), ({}, "trained again")):
        found = (await http.get("/samples/one", params=asked | given)).json()
        assert found["row"]["completion"] == text, given
    assert (await http.get("/samples/one", params=asked | {"incarnation": 5})).status_code == 404


async def test_a_search_that_nobody_waits_for_is_ended(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, proceed, ended, usual = list[Search](), threading.Event(), list[Search](), Search.find

    def find(search: Search, *asked: Any) -> SamplePage:
        searches.append(search)
        assert proceed.wait(60)
        return usual(search, *asked)

    monkeypatch.setattr(Search, "find", find)
    monkeypatch.setattr(Search, "interrupt", lambda search: ended.append(search))
    url = f"{http.base_url}samples"
    async with httpx.AsyncClient(timeout=60) as viewer:
        first = asyncio.create_task(viewer.get(url, params={"where": "'it' in completion"}))
        await wait_until(lambda: searches)
        waiting = [asyncio.create_task(viewer.get(url)) for _ in range(3)]
        assert (await http.get("/series")).status_code == 200, "the requests have arrived"
        await end_tasks([*waiting, first])
    await wait_until(lambda: ended == searches)
    last = asyncio.create_task(http.get("/samples"))
    assert (await http.get("/series")).status_code == 200
    proceed.set()
    assert (await last).json()["total"] == 42
    assert (len(searches), len(ended)) == (2, 1)


async def test_invalid_queries_are_errors_with_a_reason(http: httpx.AsyncClient) -> None:
    answer = await http.get("/samples", params={"where": "rewrad < 1"})
    assert answer.status_code == 422
    assert "no column 'rewrad'" in answer.json()["detail"]
    answer = await http.get("/samples/one", params={"payload": "0-99.7", "step": 5, "outcome": "trained", "sample": 0})
    assert answer.status_code == 404
    answer = await http.get("/samples/one", params={"payload": "' or True or '", "step": 5, "outcome": "trained"})
    assert answer.status_code == 422


class _Bytes:
    """Decodes tokens that are bytes."""

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_the_text_of_tokens_is_complete_even_if_a_character_is_cut_off() -> None:
    for text in (b"a\xc3\xa9", b"a\xc3", b"\x80\x80\x80", "über €".encode() + b"\xe2\x82"):
        pieces = samples.pieces_of(_Bytes(), [*text])  # type: ignore[arg-type]
        assert "".join(pieces) == text.decode(errors="replace")
    assert samples.pieces_of(_Bytes(), [*"aé".encode()]) == ["a", "", "é"]  # type: ignore[arg-type]
